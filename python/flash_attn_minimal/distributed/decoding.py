"""Attention over keys that are spread over the ranks: `decode`, a step of inference over a sharded cache, and
`merge`."""

from __future__ import annotations

import ctypes as ct
import inspect
from typing import Any

import numpy as np

from .. import _arrays
from .._arrays import View
from .._core import checks
from .._core.options import FROM_START, Array, _output
from .._core.repeats import signature
from .._core.structs import DTYPES, AttentionArgs, new
from ..errors import BadArgument
from ..kvcache import _LENGTHS, INPUTS, SIGNATURE, _keys, _prepare_step, _repeats, _Step, arguments_of, step_of
from ._rank_call import RankCall, make_call
from ._structs import DistributedDecodeArgs, DistributedMergeArgs
from .calls import check_group, check_place, put_rows, rows_of
from .groups import Group

_UNSERVED = (*FROM_START, "tree_mask", "tree_keys", "shared_prefix")


def decode(group: Group, q: Array, k_cache: Array, v_cache: Array, *arguments: Any, **options: Any) -> Any:
    """flash_attn_with_kvcache over a cache whose keys are spread over the ranks in any way. Collective.

    Arguments, as in flash_attn_with_kvcache, for this rank's shard of the cache:
        q: the same on every rank.
        k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table, k_scale, v_scale: this rank's shard. Its page
            sizes, lengths and tables may differ from other ranks'; cache_seqlens counts this rank's keys, and may be 0.
        k, v: the keys and values to append, on the rank that is to hold them; None on the other ranks. (Other ranks may
            append in other calls.)
        causal: on the rank that appends, earlier rows of q do not see later new tokens. All rows see all keys in the
            caches.
        sinks: the same on every rank; they count once.
        window_size, alibi_slopes, rotary_cos, rotary_sin, cache_leftpad: refused, because they need positions in the
            whole sequence, which a shard does not have. Rotate q and k before the call.

    Returns:
        the whole result, on every rank: out, with return_lse or return_softmax_lse the pair (out, lse).

    Raises: as `forward`.
    """
    check_group(group)
    if unserved := [name for name in _UNSERVED if name in options]:
        raise TypeError(f"decode() got an unexpected keyword argument {unserved[0]!r}")
    given, out, return_lse = arguments_of("decode", (q, k_cache, v_cache, *arguments), options)
    step = step_of("decode", given)
    cache_seqlens = step.cache_seqlens
    at_once = type(cache_seqlens) is int  # one length for all sequences, not an array
    arrays = (*step[:_LENGTHS], None if at_once else cache_seqlens, out)

    def prepare() -> tuple[RankCall, list[View]]:
        call, args, views, room = _prepare_step(step)
        qv = views[0]
        check_place(group, qv)
        outer = new(DistributedDecodeArgs)
        outer.cache = ct.pointer(call)
        prepared = RankCall("decode", outer, args, qv, call)
        prepared.kept = call, room
        prepared.numbers = [(args, "seqlen_k")] * at_once
        for name, array in zip((*_Step._fields[: _LENGTHS + 1], "out"), arrays, strict=True):
            kind, field = _repeats.fields[name]
            if name in ("k", "v") and not call.seqlen_new:
                array = None  # nothing to append, so its address is not needed
            is_array = array is not None and not isinstance(array, (int, np.integer))
            prepared.places.append((args if kind is AttentionArgs else call, field) if is_array else None)
        view = _output(args, views, out, (*qv.shape[:3], args.headdim_v), False, INPUTS)
        prepared.output(args, "out_data", view, None if out is None else len(arrays) - 1)
        if return_lse:
            prepared.output(args, "lse", qv.door.empty(qv, (args.batch, args.nheads, args.seqlen_q), "float32"))
        return prepared, views

    def start() -> tuple[tuple | None, Any]:
        values = "decode", at_once, return_lse, *step[_LENGTHS + 1 :]
        return signature(arrays, values, step.window_size), prepare

    def numbers(known: RankCall) -> tuple:
        if not at_once:
            return ()
        call, room = known.kept
        return (_keys(room, cache_seqlens, call.seqlen_new),)

    results = make_call(group, arrays, start, numbers)
    return tuple(results) if len(results) > 1 else results[0]


_SHOWN = [x for name, x in SIGNATURE.parameters.items() if name not in _UNSERVED]
_SHOWN.insert(0, inspect.Parameter("group", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Group"))
decode.__signature__ = SIGNATURE.replace(parameters=_SHOWN)  # type: ignore[attr-defined]


def merge(group: Group, out: Array, lse: Array) -> tuple[Array, Array]:
    """Merges attention over disjoint sets of keys, one result on each rank, into attention over all keys, in place on
    every rank. Collective.

        lse = log(sum of exp(lse_r)),   out = sum of exp(lse_r - lse) out_r

    Sums are float32, in the order of the ranks, so that all ranks get the same bits. A rank's row with lse = -inf
    changes nothing, whatever its out holds. With sinks, give them to one rank only.

    Arguments:
        out: (rows, nheads, headdim_v) or (batch, rows, nheads, headdim_v), contiguous.
        lse: (nheads, all rows) float32, contiguous, as `forward` returns it.

    Returns (out, lse), the given arrays.
    """
    check_group(group)
    arrays = out, lse

    def prepare() -> tuple[RankCall, list[View]]:
        views = [_arrays.view(out, "out"), _arrays.view(lse, "lse")]
        ov, lv = views
        checks.shape("out", ov, len(ov.shape) in (3, 4), "(rows, nheads, headdim_v)")
        checks.floats("out", ov)
        checks.last_axis("out", ov)
        checks.same_place("lse", lv, "out", ov)
        check_place(group, ov, "out")
        rows, (nheads, headdim_v) = rows_of(ov), ov.shape[-2:]
        if tuple(lv.shape) != (nheads, rows) or lv.dtype != "float32":
            raise BadArgument(f"lse is {lv.dtype} {tuple(lv.shape)}: expected float32 {(nheads, rows)}")
        for name, view in (("out", ov), ("lse", lv)):
            view.door.check_seen()
            checks.contiguous(name, view)
            checks.writable(name, view, ": the results go there")
        args = new(DistributedMergeArgs)
        args.device, args.dtype = ov.device, DTYPES[ov.dtype]
        args.nheads, args.headdim_v, args.rows = nheads, headdim_v, rows
        put_rows(args, "out", ov)
        prepared = RankCall("merge", args, args, ov, None)
        prepared.places = [(args, "out_data"), (args, "lse")]
        prepared.output(args, "out_data", ov, 0)
        prepared.output(args, "lse", lv, 1)
        return prepared, views

    def start() -> tuple[tuple | None, Any]:
        return signature(arrays, ("merge",), checks.OPEN), prepare

    return tuple(make_call(group, arrays, start))  # type: ignore[return-value]
