"""Attention of arrays that are there, without a look at what their framework does around the call: flash_attn_func and
flash_attn_varlen_func end here, and the operators that autograd.py makes of them."""

from __future__ import annotations

import ctypes as ct

import numpy as np

from . import _record
from ._arrays import View
from ._checks import _flag
from ._launch import _with_workspace
from ._library import CPU, AttentionArgs, load
from ._options import Options, _output, _prepare
from ._pack import _results
from ._repeat import Repeats, signature

_repeats = Repeats(
    "attention_forward",
    ("q", "k", "v", "out"),
    (
        AttentionArgs,
        {"q_data": "q", "k_data": "k", "v_data": "v", "out_data": "out"}
        | {name: name for name in ("lse", "workspace", "workspace_bytes")},
    ),
)
WINDOW = 1 + Options._fields.index("window_size")


def repeated(q, k, v, out, varied: tuple):
    """The results of a call like one before, or None; and the call's signature, where it has one. varied: return_lse,
    then what Options.varied returns; the other options have their defaults."""
    arrays = q, k, v, out
    sign = signature(arrays, varied, varied[WINDOW])
    repeat = _repeats.known.get(sign)
    return repeat(arrays, None) if repeat else None, sign


def attend(q, k, v, out, return_lse, options: Options, sign: tuple | None = None):
    """A call of equal lengths; of this signature the next one may be a repeat."""
    wants_lse = _flag("return_lse", return_lse)
    args, views = _prepare(q, k, v, None, options)
    qv = views[0]
    out_view = _output(args, views, out, (*qv.shape[:3], args.headdim_v), False)
    lse_view = None
    if wants_lse:
        lse_view = qv.door.empty(qv, (args.batch, args.nheads, args.seqlen_q), "float32")
        args.lse = lse_view.pointer
    workspace = _launch(args, views, out_view, lse_view)
    _repeats.remember(sign, [args], (q, k, v, out), (qv, out_view, lse_view, workspace))
    return _results(out, out_view, lse_view)


def attend_varlen(q, k, v, varlen: tuple, out, return_lse, options: Options):
    """A call of packed sequences. varlen: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    wants_lse = _flag("return_lse", return_lse)
    args, views = _prepare(q, k, v, varlen, options)
    qv, cu = views[0], views[3]
    covered = cu.device == CPU and ct.c_int32.from_address(cu.pointer + 4 * args.batch).value == args.total_q
    out_view = _output(args, views, out, (args.total_q, args.nheads, args.headdim_v), not covered)
    lse_view = None
    if wants_lse:
        shape = (args.nheads, args.total_q)
        lse_view = qv.door.empty(qv, shape, "float32") if covered else qv.door.full(qv, shape, "float32", -np.inf)
        args.lse = lse_view.pointer
    _launch(args, views, out_view, lse_view)
    return _results(out, out_view, lse_view)


def _launch(args: AttentionArgs, views: list[View], *results: View | None) -> View | None:
    """Runs a filled struct; see _with_workspace."""
    lib = load()
    return _with_workspace(
        args,
        views,
        lambda stream: _record.run(lib, "attention_forward", args, stream, [*views, *results]),
        lambda plan: lib.fa_attention_query(args, plan),
    )
