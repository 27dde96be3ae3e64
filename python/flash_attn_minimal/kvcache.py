"""Attention over a cache of keys and values: flash_attn_with_kvcache, kvcache_query.

One call is one step of inference: it appends the new, rotated keys and the new values to the cache, and q attends to
all of the cache. Names and meaning are those of the flash-attn package.
"""

from __future__ import annotations

import ctypes as ct
import inspect
import itertools
import math
from collections import namedtuple
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, overload

import numpy as np

from . import _arrays
from ._arrays import View
from ._core import checks, frameworks
from ._core.fields import _option, _put_dense, _put_strides, _put_tensor, _results
from ._core.forward import joined
from ._core.frameworks import is_traced
from ._core.launch import launch_with_workspace
from ._core.library import load
from ._core.options import (
    OPTION_ARRAYS,
    AnyArray,
    Array,
    Options,
    ScoreOptions,
    Unpack,
    _output,
    arrays_of,
    default_of,
    field_of,
    hints_of,
    with_signature,
)
from ._core.queries import Plan, plan_from
from ._core.repeats import Made, Repeats
from ._core.structs import CACHE_DTYPES, DTYPES, AttentionArgs, KVCacheArgs, new
from .errors import BadArgument


class CacheKeywordOptions(ScoreOptions, total=False):
    """For type checkers: flash_attn_with_kvcache's keyword-only arguments."""

    k_scale: AnyArray | None
    v_scale: AnyArray | None
    tree_mask: AnyArray | None
    tree_keys: int
    batch_invariant: bool
    programmatic: bool
    shared_prefix: bool
    out: AnyArray | None


class CachePositionalOptions(TypedDict, total=False):
    """For type checkers: the optional arguments that flash_attn_with_kvcache also takes by position."""

    k: AnyArray | None
    v: AnyArray | None
    rotary_cos: AnyArray | None
    rotary_sin: AnyArray | None
    cache_seqlens: AnyArray | int | None
    cache_batch_idx: AnyArray | None
    cache_leftpad: AnyArray | None
    block_table: AnyArray | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: AnyArray | None
    num_splits: int


class CacheOptions(CachePositionalOptions, CacheKeywordOptions, total=False):
    """For type checkers: all optional arguments of flash_attn_with_kvcache, except those for lse."""


@overload
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: AnyArray | None = ...,
    v: AnyArray | None = ...,
    rotary_cos: AnyArray | None = ...,
    rotary_sin: AnyArray | None = ...,
    cache_seqlens: AnyArray | int | None = ...,
    cache_batch_idx: AnyArray | None = ...,
    cache_leftpad: AnyArray | None = ...,
    block_table: AnyArray | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    rotary_interleaved: bool = ...,
    alibi_slopes: AnyArray | None = ...,
    num_splits: int = ...,
    return_softmax_lse: Literal[False] = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheKeywordOptions],
) -> Array: ...
@overload
def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, *, return_softmax_lse: Literal[True], **options: Unpack[CacheOptions]
) -> tuple[Array, Array]: ...
@overload
def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, *, return_lse: Literal[True], **options: Unpack[CacheOptions]
) -> tuple[Array, Array]: ...
@overload
def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, *, return_softmax_lse: bool, **options: Unpack[CacheOptions]
) -> Array | tuple[Array, Array]: ...
@with_signature(CacheKeywordOptions)
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: AnyArray | None = None,
    v: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: AnyArray | int | None = None,
    cache_batch_idx: AnyArray | None = None,
    cache_leftpad: AnyArray | None = None,
    block_table: AnyArray | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = checks.OPEN,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: AnyArray | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[CacheKeywordOptions],
) -> Array | tuple[Array, Array]:
    """Appends k and v to the cache in place, rotates q and k, and returns attention of q over the cache.

    Arguments:
        q: (batch, seqlen_q, nheads, headdim), float32, float16 or bfloat16.
        k_cache: (entries, seqlen_cache, nheads_k, headdim), or with block_table pages (pages, page_size, nheads_k,
            headdim), any page_size from 1. Of q's dtype, or 8-bit (float8_e4m3fn, int8) with k_scale and v_scale.
            headdim is at most 512, or at most 576 with headdim_v at most 512.
        v_cache: (entries, seqlen_cache, nheads_k, headdim_v), the same dtype. It may be a view of k_cache's first
            columns. Then v must be the first columns of k, and a call with k and v takes neither a rotary embedding nor
            an 8-bit cache.
        k, v: (batch, seqlen_new, nheads_k, .) of q's dtype, the keys and values to append; both or neither. An 8-bit
            cache rounds them.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), contiguous, float32 or q's dtype: rotate the first
            rotary_dim dims of k and q. New key t is at position cache_seqlens + t. With causal, a window or chunks row
            t of q is at that position too; otherwise all rows of q are at cache_seqlens. Without k and v only q is
            rotated. A position without a row is refused, except where cache_seqlens is an array on a GPU: there it is
            rotated by the last row.
        cache_seqlens: the number of keys in the cache before this call: (batch,) int32 on q's device, or one integer
            for all sequences, which needs neither memory nor a copy. A negative entry of an array marks an idle
            sequence: it appends nothing and returns out = 0, lse = -inf (with sinks, the sink). None: the cache is
            full, except for the last seqlen_new rows, where k and v go.
        cache_batch_idx: (batch,) int32, the entry of each sequence; None means 0, 1, 2, ... Not with block_table.
            Sequences that append to the same entry race.
        cache_leftpad: (batch,) int32, the number of keys at the beginning of each sequence that are padding, 0 ..
            cache_seqlens. No row sees them. cache_seqlens and the positions of the rotary embedding count them; causal,
            windows, ALiBi and chunks count only the keys after them.
        block_table: (batch, pages of a sequence) int32: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Entries past a sequence's keys are never read.
        softmax_scale, causal, window_size, softcap, alibi_slopes, and options that are not listed here: as in
            flash_attn_func. The last row of q is aligned with the last key, including the appended ones.
        rotary_interleaved: rotate pairs (2i, 2i + 1) rather than (i, i + rotary_dim / 2).
        num_splits: the number of pieces that a sequence's keys are cut into, 1 .. 256, so that a few rows occupy the
            whole processor; 0 lets the kernel choose (on the CPU by length alone). Kernels for many rows do not cut.
        return_softmax_lse, return_lse: also return lse; two names of one option.
        k_scale, v_scale: positive float32 factors that the values of an 8-bit cache are multiplied by. (nheads_k,) or
            (entries, 1, nheads_k): one factor for each head; appended values are rounded with it. (entries,
            seqlen_cache, nheads_k): one factor for each token and head; an appended token writes its own, from its
            largest magnitude. With a block_table read (pages, page_size, nheads_k); where page_size is 1, these are
            factors of tokens.
        tree_mask: a tree of draft tokens (speculative decoding), (batch, seqlen_q) or (seqlen_q,) for all sequences,
            uint64 or int64. Each row of q sees all keys before the last tree_keys. Of the last tree_keys it sees key j,
            counted from 0, if and only if bit j is set. Not with causal, a window, ALiBi or a rotary embedding, which
            count positions.
        tree_keys: draft tokens at the end of each sequence's keys, 1 .. 64; 0 means seqlen_q, one for each row.
        batch_invariant: the bits of a sequence's result depend on its own keys only, not on what else is in the batch,
            the capacity of the cache, or the width of block_table. On the CPU a row also has the same bits in a prompt,
            in chunks and as a single token (docs/contract.md, section 7), which takes longer.
        programmatic: on a Hopper GPU the call may start while the kernels before it still run, and waits for them only
            after it has read the cache, lengths and tables. So no kernel since the last plain launch may write there.
        shared_prefix: on a GPU a call of a few rows looks for sequences whose rows of block_table begin with the same
            pages, and reads these pages once for all of them. The device finds them, also in a captured graph whose
            tables and lengths change between replays. A hint: calls in which nothing is shared, and kernels that cannot
            share, give the same result up to rounding. Needs a block_table; not with batch_invariant.
        out: array for the result, which is also returned.

    On the CPU lengths, entries and pages are checked before anything is written. On a GPU the host does not read them:
    the call waits for nothing, can be captured in a CUDA graph, and can be replayed after they have changed. Entries
    out of range then read wrong keys and write nothing, but never access memory outside the cache.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) in q's dtype; with return_lse the pair (out, lse), lse (batch, nheads,
        seqlen_q) float32, natural logarithm.

    Raises: as flash_attn_func; after a BadArgument cache and `out` are untouched.

    Source: split keys: Dao et al., Flash-Decoding, 2023; pages: Kwon et al., PagedAttention, SOSP 2023; rotary
    embedding: Su et al., RoFormer, 2021.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_func, flash_attn_with_kvcache
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), dtype=np.float32)
    >>> k_cache, v_cache = np.zeros((2, 1, 100, 2, 8), np.float32)
    >>> for t in range(6):  # one token at a time
    ...     now = slice(t, t + 1)
    ...     out = flash_attn_with_kvcache(q[:, now], k_cache, v_cache, k[:, now], v[:, now], cache_seqlens=t)
    >>> bool(np.allclose(out, flash_attn_func(q, k, v, causal=True)[:, -1:], atol=1e-6))
    True
    """
    if return_lse is not False:
        return_softmax_lse = checks.wants_lse(return_lse, return_softmax_lse)
    at_once = type(cache_seqlens) is int  # one length for all sequences, not an array
    every = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes,
        None if at_once else cache_seqlens,
    )  # fmt: skip
    there = [array is not None for array in every]
    given, arrays = tuple(itertools.compress(_POSITIONAL, there)), tuple(itertools.compress(every, there))
    values: tuple | None = (
        at_once, return_softmax_lse, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    out = None
    if options:
        named: dict[str, Any] = dict(options)
        out = named.pop("out", None)
        given, arrays, values, _ = joined(given, arrays, values, named, _ARRAYS)
        if out is not None:
            given, arrays = (*given, "out"), (*arrays, out)
    sign = None
    if values is not None:
        results, sign = _repeats.find(given, arrays, values, window_size, (cache_seqlens,) if at_once else ())
        if results is not None:
            return results
    positional = dict(zip(_POSITIONAL, (*every[:-1], cache_seqlens), strict=True))
    step = step_of(
        "flash_attn_with_kvcache", options, **positional, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved, num_splits=num_splits,
    )  # fmt: skip
    if is_traced(*arrays):
        more = {"out": out, "return_softmax_lse": return_softmax_lse}
        return frameworks.jax().traced_function(flash_attn_with_kvcache, step._asdict() | more)
    call, args, views, room = _prepare_step(step)
    qv = views[0]
    out_view = _output(args, views, out, (*qv.shape[:3], args.headdim_v), False, INPUTS)
    lse_view = None
    if checks.flag("return_softmax_lse", return_softmax_lse):
        lse_view = qv.door.empty(qv, (args.batch, args.nheads, args.seqlen_q), "float32")
        args.lse = lse_view.pointer
    workspace = launch_with_workspace("kvcache_attention", call, args, views, (out_view, lse_view))
    if k is None or call.seqlen_new:
        keys = (args.seqlen_k, call.seqlen_new, room) if at_once else None
        made = {"out": out_view} if out is None else {}
        made |= {name: view for name, view in (("lse", lse_view), ("workspace", workspace)) if view}
        made = {name: Made(view) for name, view in made.items()}
        _repeats.remember(sign, call, arrays, views[:1], made, keys, views=[*views, out_view])
    return _results(out, out_view, lse_view)


def kvcache_query(*arrays: Any, **options: Any) -> Plan:
    """Tells what flash_attn_with_kvcache would do with the same arguments, without doing it: see query.

    >>> import numpy as np
    >>> from flash_attn_minimal import kvcache_query
    >>> q, cache = np.zeros((2, 1, 8, 64), np.float32), np.zeros((2, 1000, 2, 64), np.float32)
    >>> kvcache_query(q, cache, cache, cache_seqlens=700, kernel="cpu_naive").status
    'FA_OK'
    """
    given, out, _ = arguments_of("kvcache_query", arrays, options)
    call, args, views, _ = _prepare_step(step_of("kvcache_query", given))
    shape = (*views[0].shape[:3], args.headdim_v)
    if out is not None:
        _output(args, views, out, shape, False, INPUTS)
    else:
        _put_dense(args, "out", shape)
    return plan_from(lambda plan: load().fa_kvcache_query(call, plan), call)


SIGNATURE = inspect.signature(flash_attn_with_kvcache)
_ORDER = [name for name, x in SIGNATURE.parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]


def arguments_of(function: str, arguments: tuple, named: Mapping[str, Any]) -> tuple[dict[str, Any], Any, int]:
    """The arguments of flash_attn_with_kvcache by name, without those for results; `out`; and whether lse is one."""
    given = dict(zip(_ORDER, arguments, strict=False))
    lacks = any(name not in given and name not in named for name in _ORDER[:3])
    if lacks or len(arguments) > len(_ORDER) or any(name in given for name in named):
        try:
            SIGNATURE.bind(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"{function}() {error}") from None
    given |= named
    out, return_lse = given.pop("out", None), given.pop("return_lse", False)
    return given, out, checks.wants_lse(return_lse, given.pop("return_softmax_lse", False))


# The arguments of a step: arrays, then cache_seqlens, an array or a number, then the others, each with its type.
_HINTS = {name: hint for name, hint in hints_of(CacheOptions).items() if name != "out"}
INPUTS = ("q", "k_cache", "v_cache")
_ARRAYS = (*INPUTS, *[x for x in arrays_of(CacheOptions) if x not in ("cache_seqlens", "out")])
NUMBERS = {name: hint for name, hint in _HINTS.items() if not hint.startswith("AnyArray")}
_POSITIONAL = (
    *(*INPUTS, "k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"),
    *("block_table", "alibi_slopes", "cache_seqlens"),
)
_FIELDS = (*_ARRAYS, "cache_seqlens", *NUMBERS)
_DEFAULTS = {name: default_of(_HINTS[name]) for name in _FIELDS[3:]} | {"rotary_interleaved": True}


# The arguments of a step except for its results.
_Step = namedtuple("_Step", _FIELDS, defaults=_DEFAULTS.values())  # type: ignore[misc]
_LENGTHS = _FIELDS.index("cache_seqlens")
_SHARED = [name for name in Options._fields if name in _Step._fields]


def step_of(function: str, given: Mapping[str, Any], **named: Any) -> _Step:
    """The step of a function's arguments: those in `given`, which may be wrong, and the named ones."""
    given = {name: x for name, x in given.items() if name != "out"}
    if unknown := [name for name in given if name not in _FIELDS]:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")
    return _Step(**given, **named)


_repeats = Repeats(
    "kvcache_attention",
    (
        AttentionArgs,
        {"seqlen_k": "keys", "q_data": "q", "k_data": "k_cache", "v_data": "v_cache", "out_data": "out"}
        | {field_of(name): name for name in _SHARED if name in OPTION_ARRAYS}
        | {name: name for name in ("lse", "workspace", "workspace_bytes")},
    ),
    (
        KVCacheArgs,
        {"k_new_data": "k", "v_new_data": "v", "k_scale_data": "k_scale"}
        | {"v_scale_data": "v_scale", "tree_mask": "tree_mask"}
        | {name: name for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")}
        | {name: name for name in ("rotary_cos", "rotary_sin")},
    ),
)


def _prepare_step(step: _Step) -> tuple[KVCacheArgs, AttentionArgs, list[View], int]:
    """Prepares all but the outputs and the workspace. Returns the two structs, of which the first points to the second;
    the views (q, k_cache, v_cache, then the optional ones), which keep the memory alive; and the number of keys that a
    sequence can hold."""
    views = [_arrays.view(step.q, "q"), _arrays.view(step.k_cache, "k_cache"), _arrays.view(step.v_cache, "v_cache")]
    qv, kv, vv = views
    for name, view in (("q", qv), ("k_cache", kv), ("v_cache", vv)):
        if len(view.shape) != 4:
            axes = "(batch, seqlen_q, nheads, headdim)" if view is qv else "(entries, seqlen_cache, nheads_k, headdim)"
            advice = f"; for one row of each sequence pass {name}[:, None]" if view is qv and len(qv.shape) == 3 else ""
            raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected {axes}{advice}")
        checks.last_axis(name, view)
    checks.same_place("k_cache", kv, "q", qv)
    checks.same_place("v_cache", vv, "q", qv)
    checks.floats("q", qv)
    if vv.dtype != kv.dtype or kv.dtype not in (qv.dtype, *CACHE_DTYPES):
        raise BadArgument(
            f"k_cache is {kv.dtype}, v_cache is {vv.dtype}: expected q's {qv.dtype}, float8_e4m3fn or int8 for both"
        )
    batch, seqlen_q, nheads, headdim = qv.shape
    entries, rows, nheads_k, headdim_k = kv.shape
    if headdim_k != headdim:
        raise BadArgument(f"k_cache has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: headdim must agree")
    checks.values_like_keys("v_cache", vv, "k_cache", kv)

    args, call = new(AttentionArgs), new(KVCacheArgs)
    call.attention = ct.pointer(args)
    args.device, args.dtype = qv.device, DTYPES[qv.dtype]
    args.batch, args.seqlen_q, args.nheads, args.headdim = batch, seqlen_q, nheads, headdim
    args.seqlen_k, args.nheads_k, args.headdim_v = rows, nheads_k, vv.shape[-1]
    for name, view in (("q", qv), ("k", kv), ("v", vv)):
        _put_tensor(args, name, view)
    call.cache_dtype, call.cache_batch = CACHE_DTYPES.get(kv.dtype, 0), entries
    Options(**{name: getattr(step, name) for name in _SHARED}).put(args, views)

    if step.block_table is not None:
        table = _option(views, "block_table", step.block_table, ("int32",))
        if len(table.shape) != 2 or table.shape[0] != batch:
            raise BadArgument(f"block_table has shape {tuple(table.shape)}: expected ({batch}, pages of a sequence)")
        checks.last_axis("block_table", table)
        call.block_table, call.block_table_stride, call.page_size = table.pointer, table.strides[0], rows
        if rows < 1:
            raise BadArgument(f"k_cache has shape {tuple(kv.shape)}: a page has at least one row")
        args.seqlen_k = table.shape[1] * rows
    room = args.seqlen_k
    for name in ("cache_batch_idx", "cache_leftpad"):
        if (array := getattr(step, name)) is not None:
            setattr(call, name, _per_sequence(views, name, array, batch))
    _put_new(call, args, views, step.k, step.v)
    lengths = step.cache_seqlens
    if isinstance(lengths, (int, np.integer)) and not isinstance(lengths, bool):
        args.seqlen_k = _keys(room, lengths, call.seqlen_new)  # the cache ends there, so it needs no lengths
    elif isinstance(lengths, (bool, float)):
        raise BadArgument(f"cache_seqlens={lengths} is neither an integer nor an array of int32")
    elif lengths is not None:
        call.cache_seqlens = _per_sequence(views, "cache_seqlens", lengths, batch)
    if step.rotary_cos is not None or step.rotary_sin is not None:
        _put_rotary(call, views, step.rotary_cos, step.rotary_sin, step.rotary_interleaved)
    for name, scale in (("k_scale", step.k_scale), ("v_scale", step.v_scale)):
        if scale is not None:
            _put_scale(call, views, name, scale, (entries, rows, nheads_k))
    _put_tree(call, args, views, step)
    for name in ("batch_invariant", "programmatic", "shared_prefix"):
        setattr(call, name, checks.flag(name, getattr(step, name)))
    call.num_splits = checks.integer("num_splits", step.num_splits, -(2**31), 2**31 - 1)
    return call, args, views, room


def _per_sequence(views: list[View], name: str, array: Any, batch: int) -> int | None:
    view = _option(views, name, array, ("int32",))
    if tuple(view.shape) != (batch,):
        one = name == "cache_seqlens" and math.prod(view.shape) == 1
        advice = "; for one length of all sequences pass int(cache_seqlens)" if one else ""
        raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected ({batch},){advice}")
    checks.last_axis(name, view)
    return view.pointer


def _keys(room: int, length: int, seqlen_new: int) -> int:
    """The number of keys after a call with one length for all sequences. room: the most that an entry holds."""
    length = checks.integer("cache_seqlens", length, 0, 2**63 - 1)
    if length + seqlen_new > room:
        swapped = "; the order of arguments is q, k_cache, v_cache, k, v" if seqlen_new > room else ""
        raise BadArgument(
            f"cache_seqlens={length} and {seqlen_new} new keys are more than the {room} keys of a cache entry{swapped}"
        )
    return length + seqlen_new


def _put_new(call: KVCacheArgs, args: AttentionArgs, views: list[View], k: Any, v: Any) -> None:
    if k is None and v is None:
        return
    checks.pair("k", k, "v", v, ": keys and values are appended together")
    qv, kv, vv = views[:3]
    kn, vn = _option(views, "k", k, (qv.dtype,)), _option(views, "v", v, (qv.dtype,))
    for name, view, dim in (("k", kn, args.headdim), ("v", vn, args.headdim_v)):
        shape = tuple(view.shape)
        if len(shape) != 4 or (shape[0], *shape[2:]) != (args.batch, args.nheads_k, dim):
            expected = f"expected ({args.batch}, seqlen_new, {args.nheads_k}, {dim})"
            raise BadArgument(f"{name} has shape {shape}: {expected}{_new_rows(name, shape, args.batch, kv)}")
        checks.last_axis(name, view)
    if vn.shape[1] != kn.shape[1]:
        raise BadArgument(f"v has shape {tuple(vn.shape)}, but k has {tuple(kn.shape)}: seqlen_new must agree")
    advice = "; flash_attn_minimal.jax.flash_attn_with_kvcache returns the new cache" if kv.door.name == "JAX" else ""
    for name, view in (("k_cache", kv), ("v_cache", vv)):
        checks.writable(name, view, f": k and v cannot join it{advice}")
    call.seqlen_new = kn.shape[1]
    if call.seqlen_new:
        kv.written = vv.written = True
        _put_tensor(call, "k_new", kn)
        _put_tensor(call, "v_new", vn)


def _new_rows(name: str, shape: tuple[int, ...], batch: int, cache: View) -> str:
    """Advice for new keys or values that do not fit the cache."""
    rows = cache.shape[1]
    if len(shape) == 3:
        return f"; for one row of each sequence pass {name}[:, None]"
    if len(shape) == 4 and shape[0] == batch and rows in (shape[1], shape[2]):  # heads where the rows should be
        return (
            f", as k_cache has shape {tuple(cache.shape)}, (entries, seqlen_cache, nheads_k, headdim): of a cache "
            "(entries, nheads_k, seqlen_cache, headdim) pass k_cache.swapaxes(1, 2) and v_cache.swapaxes(1, 2)"
        )
    return f", as k_cache has shape {tuple(cache.shape)}"


def _put_rotary(call: KVCacheArgs, views: list[View], cos: Any, sin: Any, interleaved: Any) -> None:
    checks.pair("rotary_cos", cos, "rotary_sin", sin)
    dtypes = ("float32", views[0].dtype)
    cv, sv = _option(views, "rotary_cos", cos, dtypes), _option(views, "rotary_sin", sin, dtypes)
    for name, view in (("rotary_cos", cv), ("rotary_sin", sv)):
        checks.shape(name, view, len(view.shape) == 2, "(positions, rotary_dim / 2)")
        checks.contiguous(name, view)
    if tuple(sv.shape) != tuple(cv.shape) or sv.dtype != cv.dtype:
        raise BadArgument(f"rotary_sin is {sv.dtype} {tuple(sv.shape)}, but rotary_cos is {cv.dtype} {tuple(cv.shape)}")
    call.rotary_cos, call.rotary_sin, call.rotary_dtype = cv.pointer, sv.pointer, DTYPES[cv.dtype]
    call.rotary_rows, call.rotary_dim = cv.shape[0], 2 * cv.shape[1]
    call.rotary_interleaved = checks.flag("rotary_interleaved", interleaved)


def _put_tree(call: KVCacheArgs, args: AttentionArgs, views: list[View], step: _Step) -> None:
    keys = checks.integer("tree_keys", step.tree_keys, -(2**31), 2**31 - 1)
    if step.tree_mask is None:
        if keys:
            raise BadArgument(f"tree_keys={keys} without a tree_mask")
        return
    view = _option(views, "tree_mask", step.tree_mask, ("uint64", "int64"))
    each, alike = (args.batch, args.seqlen_q), (args.seqlen_q,)
    checks.shape("tree_mask", view, tuple(view.shape) in (each, alike), f"{each} or {alike}")
    if keys == 0:
        keys = args.seqlen_q
        if not 1 <= keys <= 64:
            raise BadArgument(f"tree_keys=0 means seqlen_q={keys}, which is outside 1 .. 64: name tree_keys")
    call.tree_mask, call.tree_keys = view.pointer, keys
    call.tree_batch_stride, call.tree_row_stride = (0, *view.strides)[-2:]


def _put_scale(call: KVCacheArgs, views: list[View], name: str, scale: Any, full: tuple[int, int, int]) -> None:
    """Puts k_scale or v_scale into call. The library takes row stride 0 for factors of heads, which it only reads, and
    any other row stride for factors of tokens, which an append writes."""
    view = _option(views, name, scale, ("float32",))
    shape, strides = tuple(view.shape), tuple(view.strides)
    entries, rows, nheads_k = full
    if shape == full:
        batch_stride, row_stride, head_stride = strides
        if call.seqlen_new:
            checks.writable(name, view, ": appended tokens write their factors")
        if rows == 1:
            row_stride = 1  # not 0: with one row the factors belong to tokens
        elif call.seqlen_new and row_stride == 0:
            raise BadArgument(f"{name} has strides {strides}: appended tokens write factors that all {rows} rows share")
        view.written = bool(call.seqlen_new)
    elif shape == (entries, 1, nheads_k):
        batch_stride, row_stride, head_stride = strides[0], 0, strides[2]
    elif shape == (nheads_k,):
        batch_stride, row_stride, head_stride = 0, 0, strides[0]
    else:
        raise BadArgument(f"{name} has shape {shape}: expected ({nheads_k},), {(entries, 1, nheads_k)} or {full}")
    _put_strides(call, name, view.pointer, (batch_stride, row_stride, head_stride), ("batch", "row", "head"))
