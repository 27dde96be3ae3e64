"""Attention with more results than out and lse: flash_attn_func and flash_attn_varlen_func end here when they are asked
for statistics of the scores. These have no gradients."""

from __future__ import annotations

import ctypes as ct
from typing import Any, NamedTuple

import numpy as np

from ._arrays import View
from ._checks import _flag
from ._forward import _launch
from ._library import CPU, AttentionArgs
from ._options import Options, _output, _prepare

_PLACEHOLDER = 256  # for a query: an address that is aligned, and not NULL


class Results(NamedTuple):
    """Which results a call gives beside out, in their order."""

    lse: bool
    max_score: bool

    def first(self) -> str:
        """The argument that asks for the first statistic."""
        return next(f"return_{name}" for name in self._fields[1:] if getattr(self, name))

    def put_placeholders(self, args: AttentionArgs) -> None:
        """Into the struct of a query, which asks what is wanted, not where it goes."""
        for name in self._fields[1:]:
            if getattr(self, name):
                setattr(args, name, _PLACEHOLDER)


def wanted(return_lse: Any, return_max_score: Any) -> Results | None:
    """None where a call gives out and lse alone."""
    if return_max_score is False:
        return None
    more = bool(_flag("return_max_score", return_max_score))
    return Results(bool(_flag("return_lse", return_lse)), more) if more else None


def attend(q, k, v, varlen: tuple | None, out, results: Results, options: Options) -> tuple:
    """out and the wanted results. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    args, views = _prepare(q, k, v, varlen, options)
    qv = views[0]
    covered = True  # whether every row belongs to a sequence; the others are not written
    if varlen is not None:
        cu = views[3]
        covered = cu.device == CPU and ct.c_int32.from_address(cu.pointer + 4 * args.batch).value == args.total_q
    shapes = {
        "lse": (args.batch, args.nheads, args.seqlen_q) if varlen is None else (args.nheads, args.total_q),
        "max_score": (args.batch, args.nheads),
    }
    out_view = _output(args, views, out, (*qv.shape[:-1], args.headdim_v), not covered)
    given: list[View] = []
    for name, shape in shapes.items():
        if getattr(results, name):
            whole = covered or name != "lse"
            given.append(qv.door.empty(qv, shape, "float32") if whole else qv.door.full(qv, shape, "float32", -np.inf))
            setattr(args, name, given[-1].pointer)
    _launch(args, views, out_view, *given)
    result = out if out is not None else out_view.door.result(out_view)
    return result, *(view.door.result(view) for view in given)
