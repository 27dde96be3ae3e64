"""Attention with statistics of the scores (max_score, key_sums) besides out and lse, for flash_attn_func and
flash_attn_varlen_func. Statistics have no gradients."""

from __future__ import annotations

import ctypes as ct
from typing import Any, NamedTuple

import numpy as np

from .._arrays import View
from .checks import flag
from .fields import _results
from .forward import _new
from .launch import launch_with_workspace
from .options import Options, _output, _prepare
from .structs import CPU, AttentionArgs

_PLACEHOLDER = 256  # an aligned address that is not NULL, for a query or an empty array


class Results(NamedTuple):
    """Whether a call returns each of these results after out, in this order."""

    lse: bool
    max_score: bool
    key_sums: bool

    def first(self) -> str:
        """The argument that requests the first statistic."""
        return next(f"return_{name}" for name in self._fields[1:] if getattr(self, name))

    def put_placeholders(self, args: AttentionArgs) -> None:
        """Marks the wanted results in the struct of a query, which needs no addresses."""
        for name in self._fields:
            if getattr(self, name):
                setattr(args, name, _PLACEHOLDER)


def wanted(return_lse: Any, return_max_score: Any, return_key_sums: Any) -> Results | None:
    """The results of a call with statistics; None for a call that returns only out and lse."""
    if return_max_score is return_key_sums is False:
        return None
    given = {"return_lse": return_lse, "return_max_score": return_max_score, "return_key_sums": return_key_sums}
    results = Results(*(bool(flag(name, value)) for name, value in given.items()))
    return results if any(results[1:]) else None


def attend(q, k, v, varlen: tuple | None, out, results: Results, options: Options) -> tuple:
    """Runs a call with statistics: returns out and the wanted results. varlen: None, or (cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k)."""
    args, views = _prepare(q, k, v, varlen, options)
    qv = views[0]
    if varlen is None:
        rows, keys = (args.batch, args.nheads, args.seqlen_q), (args.batch, args.nheads, args.seqlen_k)
    else:
        rows, keys = (args.nheads, args.total_q), (args.nheads, args.total_k)
    # The value of each result where the library writes nothing: at rows and keys of no sequence. None: all is written.
    covered = varlen is None or _last(views[3]) == args.total_q
    covered_k = varlen is None or _last(views[4]) == args.total_k
    shapes: dict[str, tuple[tuple[int, ...], float | None]] = {
        "lse": (rows, None if covered else -np.inf),
        "max_score": ((args.batch, args.nheads), None),
        "key_sums": (keys, None if covered_k else 0.0),
    }
    out_view = _output(args, views, out, (*qv.shape[:-1], args.headdim_v), not covered)
    given: list[View] = []
    for name, (shape, fill) in shapes.items():
        if getattr(results, name):
            given.append(_new(qv, shape, fill))
            setattr(args, name, given[-1].pointer or _PLACEHOLDER)  # an empty array has no address
    launch_with_workspace("attention_forward", args, args, views, (out_view, *given))
    return _results(out, out_view, None), *(view.door.result(view) for view in given)


def _last(cu: View) -> int | None:
    """The last entry of cu_seqlens if it is on the CPU, else None."""
    return ct.c_int32.from_address(cu.pointer + 4 * (cu.shape[0] - 1)).value if cu.device == CPU else None
