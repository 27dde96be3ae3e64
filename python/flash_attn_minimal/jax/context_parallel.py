"""Attention of sequences that are spread over the devices of a mesh axis, for use inside jax.shard_map.

XLA owns devices and transfers, so the modes consist of JAX's collectives around one call for each chunk of queries.

    gather     a device gets the keys and values of all others (with a window, of those that it reaches). Its queries
               are then parts of the whole sequences (fa_part of flash_attn.h). The position of a part is data, not
               shape, so one program serves every device, and a kernel skips keys that a part does not see
    ulysses    a device gets all tokens of some heads, and sends the rows of the result back
               (Jacobs et al. 2023, DeepSpeed Ulysses)

The backward pass repeats the transfers, so a device keeps only its own q, k, v, out and lse. (ulysses keeps its share
of heads instead, which is as large.) The contributions of several devices to the gradient of a key are rounded to its
dtype, sent to its owner, and added up there in float32, in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.checks import flag, one_of, window
from .._core.options import (
    FLOAT8,
    FROM_START,
    OPTION_ARRAYS,
    AttentionOptions,
    Options,
    Unpack,
    _options_of,
    with_signature,
)
from ..errors import BadArgument, Unsupported
from ._attention import ARRAYS, RESULT, check_served, scaled, traced
from ._custom_call import as_array, vary

LAYOUTS = {"contiguous": 1, "zigzag": 2}  # -> chunks of a sequence that a device holds
MODES = ("auto", "gather", "ulysses")
_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")
_UNSERVED = (*FROM_START, *[name for name in OPTION_ARRAYS if name not in _ARRAYS], *FLOAT8)


@with_signature(AttentionOptions, _UNSERVED)
def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    layout: str = "zigzag",
    mode: str = "auto",
    return_lse: bool = False,
    **given_options: Unpack[AttentionOptions],
) -> Any:
    """A device's rows of flash_attn_func over the whole sequences. Every device calls it, inside jax.shard_map.

    P is the number of devices along the axis. The whole sequences have seqlen_q queries and seqlen_k keys.

    Arguments:
        q: (batch, seqlen_q / P, nheads, headdim), float32, float16 or bfloat16: this device's rows.
        k, v: (batch, seqlen_k / P, nheads_k, headdim) and (..., headdim_v), the same dtype.
        axis_name: the mesh axis that the sequence is sharded over, or a tuple of them.
        layout: "contiguous": device r holds chunk r of P. "zigzag": it holds chunks r and 2 P - 1 - r of 2 P, so that
            devices have equal work under a causal mask; shard_tokens brings the tokens into this order. The local
            lengths must then be even: 2 P divides seqlen_q and seqlen_k.
        mode: "auto" takes "ulysses" if it serves the call and no window makes "gather" cheaper, else "gather".
        alibi_slopes, sinks: as in flash_attn_func, with all heads, the same on every device.
        bias, mask: broadcast to (batch, nheads, seqlen_q / P, seqlen_k): the device's rows, in its layout, and all
            keys in their natural order.
        dropout_p: drops the elements that one device would drop. Devices that differ along another axis of the mesh
            drop the same elements of their own arrays.
        The other options are those of flash_attn_func. Those that are not arrays are Python values, except
            softmax_scale, which may be traced.

    Not served by ulysses: nheads that P does not divide; nheads_k, unless P divides it or is a multiple of it (key
        heads are then copied); a bias or mask with an axis of rows, even of size 1 where a device has one row, because
        it may be the device's own row or one that all share; dropout.

    Returns:
        out (batch, seqlen_q / P, nheads, headdim_v) in q's dtype; with return_lse the pair (out, lse), lse (batch,
        nheads, seqlen_q / P) float32. q, k, v, bias and sinks have gradients, through out and lse.

    Raises:
        BadArgument (a ValueError) and Unsupported (a NotImplementedError), both while the call is traced.

    >>> import functools, jax
    >>> from jax.sharding import Mesh, PartitionSpec
    >>> from flash_attn_minimal.jax import context_parallel_attention, shard_tokens, unshard_tokens
    >>> mesh = Mesh(jax.devices(), ("context",))
    >>> tokens = PartitionSpec(None, "context")
    >>> attend = functools.partial(context_parallel_attention, axis_name="context", causal=True)
    >>> attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens))
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16 * mesh.size, 8, 32))
    >>> q, k, v = (shard_tokens(x, mesh.size) for x in (q, k, v))  # once for a model: its layers keep the order
    >>> unshard_tokens(attend(q, k, v), mesh.size).shape == (1, 16 * mesh.size, 8, 32)
    True
    """
    if unserved := [name for name in _UNSERVED if name in given_options]:
        raise TypeError(f"context_parallel_attention() got an unexpected keyword argument {unserved[0]!r}")
    options = _options_of("context_parallel_attention", given_options)
    given = {"q": q, "k": k, "v": v, **{name: getattr(options, name) for name in _ARRAYS}}
    options = options._replace(**dict.fromkeys(_ARRAYS))
    check_served(None, return_lse, options, ())
    return_lse = flag("return_lse", return_lse)
    given = {name: as_array(name, x) for name, x in given.items() if x is not None}
    arrays = vary([jnp.asarray(x) for x in given.values()], [*given.values(), lax.axis_index(axis_name)])
    given = dict(zip(given, arrays, strict=True))
    given["q"], options = scaled(given["q"], options)
    tokens = _tokens_of(given, axis_name, layout, options)
    scores = [name for name in ("bias", "mask") if name in given]
    by_row = frozenset(name for name in scores if _has_rows(given[name], given["q"], tokens))
    given |= {name: _four_axes(name, given, tokens) for name in scores}
    mode = _choose(mode, given, tokens, options, by_row)
    attend = _ulysses if mode == "ulysses" else _gather
    # jit, because jax.shard_map alone does not support symbolic zeros.
    return jax.jit(lambda given: attend(given, tokens, options, return_lse), inline=True)(given)


def shard_tokens(x: Any, size: int, layout: str = "zigzag", axis: int = 1) -> Any:
    """Reorders tokens so that plain sharding of `axis` over `size` devices gives each device its own tokens."""
    return _by_rank(x, *_chunks_of(x, size, layout, axis), axis)


def unshard_tokens(x: Any, size: int, layout: str = "zigzag", axis: int = 1) -> Any:
    """Restores the natural order of tokens: the inverse of shard_tokens."""
    return _natural(x, *_chunks_of(x, size, layout, axis), axis)


def _chunks_of(x: Any, size: int, layout: str, axis: int) -> tuple[int, int]:
    slots = LAYOUTS[one_of("layout", layout, LAYOUTS)]
    if x.shape[axis] % (size * slots):
        raise BadArgument(
            f"x has shape {tuple(x.shape)}: layout={layout!r} on {size} devices needs an axis {axis} that "
            f"{size * slots} divides"
        )
    return size, slots


def _by_rank(x: Any, size: int, slots: int, axis: int) -> Any:
    """Reorders tokens from the natural order to those of rank 0, of rank 1, ..."""
    if slots == 1:
        return x
    axis %= x.ndim
    chunk = x.shape[axis] // (2 * size)
    first, second = jnp.split(x.reshape(*x.shape[:axis], 2 * size, chunk, *x.shape[axis + 1 :]), 2, axis)
    return jnp.stack([first, jnp.flip(second, axis)], axis + 1).reshape(x.shape)


def _natural(x: Any, size: int, slots: int, axis: int) -> Any:
    """The inverse of _by_rank."""
    if slots == 1:
        return x
    axis %= x.ndim
    chunk = x.shape[axis] // (2 * size)
    chunks = x.reshape(*x.shape[:axis], size, 2, chunk, *x.shape[axis + 1 :])
    first, second = (lax.index_in_dim(chunks, slot, axis + 1, keepdims=False) for slot in range(2))
    return jnp.concatenate([first, jnp.flip(second, axis)], axis).reshape(x.shape)


# ---- which device holds which tokens, and which queries see which keys ----


class _Tokens(NamedTuple):
    """Sequences in size * slots chunks. Rank r holds chunk r in slot 0 and, if there are two slots, in slot 1 chunk
    2 size - 1 - r."""

    axis_name: Any
    size: int
    slots: int
    rows: int  # queries of a chunk
    keys: int  # keys of a chunk
    shift: int  # row i of the whole sequence is aligned with key i + shift
    left: int  # the window; -1 is open
    right: int

    @property
    def chunks(self) -> int:
        return self.size * self.slots

    def chunk(self, rank, slot: int):
        """The chunk that a rank, which may be traced, holds in a slot."""
        return 2 * self.size - 1 - rank if slot else rank

    def sees(self, rows: int, keys: int) -> bool:
        """Whether any query of one chunk sees any key of another."""
        first = rows * self.rows + self.shift
        if 0 <= self.right < keys * self.keys - (first + self.rows - 1):
            return False
        return self.left < 0 or first - self.left < (keys + 1) * self.keys

    def split(self, x, axis: int = 1) -> list:
        return jnp.split(x, self.slots, axis)


def _tokens_of(given: dict, axis_name: Any, layout: str, options: Options) -> _Tokens:
    size, slots = lax.psum(1, axis_name), LAYOUTS[one_of("layout", layout, LAYOUTS)]
    if str(given["q"].dtype) == "float8_e4m3fn":
        raise Unsupported("q is float8_e4m3fn: float8 is not served in a traced call")
    for name in "qkv":
        if len(shape := given[name].shape) != 4:
            raise BadArgument(f"{name} has shape {shape}: expected (batch, seqlen / {size}, nheads, headdim)")
        if shape[1] % slots:
            raise BadArgument(
                f"{name} has shape {shape} on each of {size} devices, {size * shape[1]} tokens together: "
                f"layout={layout!r} needs a number of tokens that 2 * {size} divides"
            )
    q, k, v = (given[name].shape for name in "qkv")
    if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3]:
        raise BadArgument(f"q, k and v have shapes {q}, {k} and {v}: batch, seqlen_k, nheads_k and headdim must agree")
    if k[2] < 1 or q[2] % k[2]:
        raise BadArgument(f"nheads={q[2]} is not a multiple of nheads_k={k[2]}")
    for name, shapes in (("sinks", [(q[2],)]), ("alibi_slopes", [(q[2],), (q[0], q[2])])):
        if name in given and given[name].shape not in shapes:
            raise BadArgument(f"{name} has shape {given[name].shape}: expected {' or '.join(map(str, shapes))}")
    left, right = window(options.window_size)
    right = 0 if flag("causal", options.causal) else right
    shift = 0 if flag("top_left", options.top_left) else size * (k[1] - q[1])
    if left < 0 and right < 0 and not options.dropout_p and given.keys().isdisjoint(("bias", "mask", "alibi_slopes")):
        slots = 1  # no option depends on where a token is, so two chunks may count as one
    return _Tokens(axis_name, size, slots, q[1] // slots, k[1] // slots, shift, left, right)


def _has_rows(x, q, tokens: _Tokens) -> bool:
    """Whether devices may have different rows of a bias or mask. An axis of size 1 is broadcast, but if a device has
    only one row of q, it may be that device's own row."""
    return x.ndim > 1 and (x.shape[-2] > 1 or q.shape[1] == 1 < tokens.size)


def _four_axes(name: str, given: dict, tokens: _Tokens):
    """A bias or mask with the axes (batch, nheads, rows, keys); all but the last may have size 1."""
    x, (batch, rows, nheads, _) = given[name], given["q"].shape
    shape, keys = (1,) * (4 - x.ndim) + x.shape, tokens.chunks * tokens.keys
    wanted = batch, nheads, rows, keys
    if len(shape) > 4 or shape[-1] != keys or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        raise BadArgument(
            f"{name} has shape {x.shape}: expected one that broadcasts to {wanted}, (batch, nheads, seqlen_q / "
            f"{tokens.size}, seqlen_k), with all {keys} keys in its last axis"
        )
    return x.reshape(shape)


def _choose(mode: str, given: dict, tokens: _Tokens, options: Options, by_row: frozenset) -> str:
    reason = None if one_of("mode", mode, MODES) == "gather" else _refusal(given, tokens, options, by_row)
    if mode == "auto":
        return "gather" if tokens.left >= 0 or reason else "ulysses"
    if reason:
        raise BadArgument(f"mode={mode!r} does not serve {reason}; mode='gather' does")
    return mode


def _refusal(given: dict, tokens: _Tokens, options: Options, by_row: frozenset) -> str | None:
    """The part of a call that ulysses does not serve, or None. by_row: the names of bias and mask if they have rows
    (see _has_rows)."""
    size, nheads, nheads_k = tokens.size, given["q"].shape[2], given["k"].shape[2]
    if nheads % size:
        return f"nheads={nheads} on {size} devices, which do not divide it"
    if nheads_k % size and size % nheads_k:
        return f"nheads_k={nheads_k} on {size} devices: neither divides the other"
    if options.dropout_p:
        return f"dropout_p={options.dropout_p}: the masks of heads have to be known when the call is traced"
    for name in by_row:
        return f"{name} of shape {given[name].shape}, (batch, nheads, rows, keys)"
    return None


def _ulysses(given: dict, tokens: _Tokens, options: Options, return_lse: int):
    size, slots, axis_name = tokens.size, tokens.slots, tokens.axis_name
    rank = lax.axis_index(axis_name)

    def all_tokens(x):
        return _natural(lax.all_to_all(x, axis_name, 2, 1, tiled=True), size, slots, 1)

    def own_tokens(x):
        return lax.all_to_all(_by_rank(x, size, slots, 1), axis_name, 1, 2, tiled=True)

    def own_heads(x, axis):
        heads = x.shape[axis] // size
        return lax.dynamic_slice_in_dim(x, rank * heads, heads, axis)

    def copied(x):
        """Copies key heads until each device has one. The gradients of copies are added up in float32."""
        copies = max(size // x.shape[2], 1)
        return jnp.repeat(x.astype(jnp.float32), copies, axis=2).astype(x.dtype) if copies > 1 else x

    q, k, v = all_tokens(given["q"]), all_tokens(copied(given["k"])), all_tokens(copied(given["v"]))
    more = {name: given[name] for name in ARRAYS if name in given}
    for name, x in more.items():
        axis = 1 if name in ("bias", "mask") else x.ndim - 1
        if x.shape[axis] > 1:
            more[name] = own_heads(x, axis)
    results = traced(q, k, v, None, None, return_lse, options._replace(**more))
    if not return_lse:
        return own_tokens(results)
    out, lse = results
    return own_tokens(out), own_tokens(lse.swapaxes(1, 2)).swapaxes(1, 2)


# ---- gather ----


def _gather(given: dict, tokens: _Tokens, options: Options, return_lse: bool):
    """One call for each chunk of queries. Chunks share keys, and a call writes the gradient of a key only once."""
    t, options = tokens, options._replace(top_left=False)
    counts_from_start = options.dropout_p or "bias" in given or "mask" in given
    reach = None if counts_from_start else _find_reach(t)

    # Keys of other devices are not kept for the backward pass, which fetches them again.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(RESULT))
    def attend(given):
        queries, keys, values = t.split(given["q"]), _fetched(t, reach, given["k"]), _fetched(t, reach, given["v"])
        found = []
        for slot, of_slot in enumerate(zip(queries, keys, values, strict=True)):
            more = {name: given[name] for name in ARRAYS if name in given}
            for name in ("bias", "mask"):
                if name in more and more[name].shape[2] > 1:
                    more[name] = t.split(more[name], 2)[slot]
            found.append(traced(*of_slot, None, None, return_lse, options._replace(**more), _part(t, reach, slot)))
        if not return_lse:
            return jnp.concatenate(found, 1)
        return tuple(jnp.concatenate(x, axis) for x, axis in zip(zip(*found, strict=True), (1, 2), strict=True))

    return attend(given)


def _find_reach(t: _Tokens) -> list[tuple[int, int]] | None:
    """For each slot, the first and last distance to the chunks of keys that its queries see on any rank. None if
    fetching everything costs no more."""
    reach = []
    for slot in range(t.slots):
        own = [t.chunk(rank, slot) for rank in range(t.size)]
        seen = [other - chunk for chunk in own for other in range(t.chunks) if t.sees(chunk, other)] or [0]
        reach.append((min(seen), max(seen)))
    return None if sum(last - first + 1 for first, last in reach) >= t.chunks else reach


def _part(t: _Tokens, reach: list | None, slot: int) -> dict:
    """The part of the whole sequences that the call of a slot computes: fields of fa_part."""
    chunk = t.chunk(lax.axis_index(t.axis_name), slot)
    first, begin, count = 0, 0, t.chunks
    if reach is not None:
        low, high = reach[slot]
        first = jnp.clip(chunk + low, 0, t.chunks)
        count = jnp.clip(chunk + high + 1, 0, t.chunks) - first
        begin = jnp.clip(first - (chunk + low), 0, high - low + 1)  # there are no keys before the first chunk
    row, key = chunk * t.rows, first * t.keys
    where = {"first_row": row, "first_key": key, "shift": row + t.shift - key}
    return where | {"key_begin": begin * t.keys, "seqlen_k": count * t.keys}


def _fetched(t: _Tokens, reach: list | None, x) -> tuple:
    """The keys, or values, for the call of each slot."""

    @jax.custom_vjp
    def fetch(x):
        if reach is None:
            return (_natural(lax.all_gather(x, t.axis_name, axis=1, tiled=True), t.size, t.slots, 1),) * t.slots
        own, found = t.split(x), []
        for slot, (low, high) in enumerate(reach):
            chunks = [
                own[slot] if not distance else sum(lax.ppermute(own[at], t.axis_name, pairs) for at, pairs in routes)
                for distance, routes in _routes(t, slot, low, high)
            ]
            found.append(jnp.concatenate(chunks, 1))
        return tuple(found)

    def send_back(_, gradients):
        """The gradient of a rank's own keys, from those of the keys of each slot's call on every rank."""
        dtype, shape = gradients[0].dtype, gradients[0].shape
        if reach is None:
            total = _sum(gradients).astype(dtype)
            ranks = lax.all_to_all(_by_rank(total, t.size, t.slots, 1), t.axis_name, 1, 1, tiled=True)
            return (_sum(jnp.split(ranks, t.size, 1)).astype(dtype),)
        own: list[list] = [[] for _ in range(t.slots)]
        for slot, (low, high) in enumerate(reach):
            chunks = jnp.split(gradients[slot], high - low + 1, 1)
            for chunk, (distance, routes) in zip(chunks, _routes(t, slot, low, high), strict=True):
                if not distance:
                    own[slot].append(chunk)
                for at, pairs in routes if distance else ():
                    own[at].append(lax.ppermute(chunk, t.axis_name, [(to, source) for source, to in pairs]))
        (nothing,) = vary([jnp.zeros((shape[0], t.keys, *shape[2:]), dtype)], gradients)
        return (jnp.concatenate([_sum(x).astype(dtype) if x else nothing for x in own], 1),)

    fetch.defvjp(lambda x: (fetch(x), None), send_back)
    return fetch(x)


def _routes(t: _Tokens, slot: int, low: int, high: int) -> list:
    """For each distance, how the chunks at that distance from a slot's chunks get to the slot: the slots that hold
    them, and pairs (source, target) of ranks."""
    found = []
    for distance in range(low, high + 1):
        routes: dict = {}
        for rank in range(t.size):
            chunk = t.chunk(rank, slot) + distance
            if 0 <= chunk < t.chunks:
                source, at = (chunk, 0) if chunk < t.size else (2 * t.size - 1 - chunk, 1)
                routes.setdefault(at, []).append((source, rank))
        found.append((distance, sorted(routes.items())))
    return found


def _sum(arrays):
    """The sum in float32, in this order."""
    return functools.reduce(jnp.add, [x.astype(jnp.float32) for x in arrays])
