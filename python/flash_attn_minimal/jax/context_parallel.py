"""Attention of sequences that are spread over the devices of a mesh axis, for use inside jax.shard_map.

XLA owns devices and transfers, so the modes consist of JAX's collectives around calls of flash_attn_minimal.jax.

    gather     a device gets the keys and values of all others (with a window, of those that it reaches). Its queries
               are then parts of the whole sequences (fa_part of flash_attn.h). The position of a part is data, not
               shape, so one program serves every device, and a kernel skips keys that a part does not see
    ulysses    a device gets all tokens of some heads, and sends the rows of the result back
               (Jacobs et al. 2023, DeepSpeed Ulysses)
    ring       keys and values move from device to device. Results are merged by their lse in float32
               (Liu et al. 2023, Ring Attention)

The backward pass repeats the transfers, so a device keeps only its own q, k, v, out and lse. (ulysses keeps its share
of heads instead, which is as large.) The contributions of several devices to the gradient of a key are rounded to its
dtype, sent to its owner, and added up there in float32, in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._core.checks import _flag, _quoted, _window
from .._core.options import Options
from ..errors import BadArgument, Unsupported
from ._attention import Call, check_served, no_second_derivative, scaled, traced
from ._axes import vary
from ._custom_call import as_array
from ._gradients import nothing

LAYOUTS = {"contiguous": 1, "zigzag": 2}  # -> chunks of a sequence that a device holds
MODES = ("auto", "gather", "ulysses", "ring")
_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")


def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    layout: str = "zigzag",
    mode: str = "auto",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    top_left: bool = False,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    kernel: str | None = None,
    allow_tf32: bool = False,
    num_threads: int = 0,
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
        mode: "auto" takes "ulysses" if it serves the call and no window makes "gather" cheaper, else "gather". "ring"
            is for keys and values that together are too large for one device.
        alibi_slopes, sinks: as in flash_attn_func, with all heads, the same on every device.
        bias, mask: broadcast to (batch, nheads, seqlen_q / P, seqlen_k): the device's rows, in its layout, and all
            keys in their natural order.
        dropout_p: drops the elements that one device would drop. Devices that differ along another axis of the mesh
            drop the same elements of their own arrays.
        The other options are those of flash_attn_func. Those that are not arrays are Python values, except
            softmax_scale, which may be traced.

    Not served:
        by ulysses: nheads that P does not divide; nheads_k, unless P divides it or is a multiple of it (key heads are
            then copied); a bias or mask with an axis of rows, even of size 1 where a device has one row, because it
            may be the device's own row or one that all share; dropout.
        by ring: bias and mask; dropout with chunks of keys whose length is not a multiple of 8.

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
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        num_threads=num_threads, deterministic=deterministic, top_left=top_left, dropout_seed=dropout_seed,
        dropout_offset=dropout_offset, kernel=kernel, allow_tf32=allow_tf32,
    )  # fmt: skip
    check_served(None, return_lse, options, ())
    return_lse = _flag("return_lse", return_lse)
    given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    given = {name: as_array(name, x) for name, x in given.items() if x is not None}
    arrays = vary([jnp.asarray(x) for x in given.values()], [*given.values(), lax.axis_index(axis_name)])
    given = dict(zip(given, arrays, strict=True))
    given["q"], options = scaled(given["q"], options)
    tokens = _tokens_of(given, axis_name, layout, options)
    scores = [name for name in ("bias", "mask") if name in given]
    by_row = frozenset(name for name in scores if _has_rows(given[name], given["q"], tokens))
    given |= {name: _four_axes(name, given, tokens) for name in scores}
    mode = _choose(mode, given, tokens, options, by_row)

    def serve(given):
        if mode == "ulysses":
            return _ulysses(given, tokens, options, return_lse)
        out, lse = _with_gradients((_Gather if mode == "gather" else _Ring)(tokens, options, given), given)
        return (out, lse) if return_lse else out

    return jax.jit(serve, inline=True)(given)  # jit, because jax.shard_map alone does not support symbolic zeros


def shard_tokens(x: Any, size: int, layout: str = "zigzag", axis: int = 1) -> Any:
    """Reorders tokens so that plain sharding of `axis` over `size` devices gives each device its own tokens."""
    return _by_rank(x, *_chunks_of(x, size, layout, axis), axis)


def unshard_tokens(x: Any, size: int, layout: str = "zigzag", axis: int = 1) -> Any:
    """Restores the natural order of tokens: the inverse of shard_tokens."""
    return _natural(x, *_chunks_of(x, size, layout, axis), axis)


def _chunks_of(x: Any, size: int, layout: str, axis: int) -> tuple[int, int]:
    slots = _slots(layout)
    if x.shape[axis] % (size * slots):
        raise BadArgument(
            f"x has shape {tuple(x.shape)}: layout={layout!r} on {size} devices needs an axis {axis} that "
            f"{size * slots} divides"
        )
    return size, slots


def _slots(layout: Any) -> int:
    if layout not in tuple(LAYOUTS):
        raise BadArgument(f"layout={_quoted(layout)} is not one of {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[layout]


def _by_rank(x: Any, size: int, slots: int, axis: int) -> Any:
    """Reorders tokens from the natural order to those of rank 0, of rank 1, ..."""
    if slots == 1:
        return x
    axis %= x.ndim
    first, second = jnp.split(x.reshape(*x.shape[:axis], 2 * size, -1, *x.shape[axis + 1 :]), 2, axis)
    return jnp.stack([first, jnp.flip(second, axis)], axis + 1).reshape(x.shape)


def _natural(x: Any, size: int, slots: int, axis: int) -> Any:
    """The inverse of _by_rank."""
    if slots == 1:
        return x
    axis %= x.ndim
    chunks = x.reshape(*x.shape[:axis], size, 2, -1, *x.shape[axis + 1 :])
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
    size, slots = lax.psum(1, axis_name), _slots(layout)
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
    left, right = _window(options.window_size)
    right = 0 if _flag("causal", options.causal) else right
    shift = 0 if _flag("top_left", options.top_left) else size * (k[1] - q[1])
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
    if mode not in MODES:
        raise BadArgument(f"mode={_quoted(mode)} is not one of {', '.join(map(repr, MODES))}")
    if mode == "auto":
        return "gather" if tokens.left >= 0 or _refusal("ulysses", given, tokens, options, by_row) else "ulysses"
    if reason := _refusal(mode, given, tokens, options, by_row):
        raise BadArgument(f"mode={mode!r} does not serve {reason}; mode='gather' does")
    return mode


def _refusal(mode: str, given: dict, tokens: _Tokens, options: Options, by_row: frozenset) -> str | None:
    """The part of a call that the mode does not serve, or None. by_row: the names of bias and mask if they have rows
    (see _has_rows)."""
    size, nheads, nheads_k = tokens.size, given["q"].shape[2], given["k"].shape[2]
    if mode == "ulysses":
        if nheads % size:
            return f"nheads={nheads} on {size} devices, which do not divide it"
        if nheads_k % size and size % nheads_k:
            return f"nheads_k={nheads_k} on {size} devices: neither divides the other"
        if options.dropout_p:
            return f"dropout_p={options.dropout_p}: the masks of heads have to be known when the call is traced"
    for name in ("bias", "mask"):
        if name in given and (mode == "ring" or mode == "ulysses" and name in by_row):
            return f"{name} of shape {given[name].shape}, (batch, nheads, rows, keys)"
    if mode == "ring" and options.dropout_p and tokens.keys % 8:
        return f"dropout_p={options.dropout_p} with chunks of {tokens.keys} keys, no multiple of 8"
    return None


# ---- ulysses ----


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
    more = {name: given[name] for name in _ARRAYS if name in given}
    for name, x in more.items():
        axis = 1 if name in ("bias", "mask") else x.ndim - 1
        if x.shape[axis] > 1:
            more[name] = own_heads(x, axis)
    results = traced(q, k, v, None, None, return_lse, options._replace(**more))
    if not return_lse:
        return own_tokens(results)
    out, lse = results
    return own_tokens(out), own_tokens(lse.swapaxes(1, 2)).swapaxes(1, 2)


# ---- gather and ring ----


def _with_gradients(mode: _Gather | _Ring, given: dict):
    """The results (out, lse) of a mode, differentiable."""
    names = tuple(given)

    @jax.custom_vjp
    def attend(*inputs):
        return mode.forward(dict(zip(names, inputs, strict=True)))

    def forward(*inputs):
        inputs = tuple(x.value for x in inputs)
        out, lse = attend(*inputs)
        return (out, lse), (inputs, out, lse)

    def backward(saved, cotangents):
        inputs, out, lse = saved
        dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
        if dout is None:
            (dout,) = vary([jnp.zeros_like(out)], [out])
        gradients = gradients_of(inputs, out, lse, dout, dlse)
        return tuple(gradients.get(name, nothing(x)) for name, x in zip(names, inputs, strict=True))

    attend.defvjp(forward, backward, symbolic_zeros=True)  # most losses do not depend on lse

    @jax.custom_vjp
    def gradients_of(inputs, *more):
        given = dict(zip(names, inputs, strict=True))
        return {name: x.astype(given[name].dtype) for name, x in mode.backward(given, *more).items()}

    gradients_of.defvjp(lambda *inputs: (gradients_of(*inputs), None), no_second_derivative)
    return attend(*given.values())


class _Keys(NamedTuple):
    """The keys that a call gets: from key `first` of its sequence on, in rows begin .. begin + count - 1 of every
    sequence in k and v. The numbers may be traced."""

    first: Any
    begin: Any
    count: Any


class _Mode:
    """Attention of one chunk of queries over some keys, by one call of the library.

    The call is a varlen one: row b of the batch is a part of sequence b, and the part's position in the whole sequence
    is read on the device."""

    def __init__(self, tokens: _Tokens, options: Options):
        self.tokens, self.options = tokens, options._replace(top_left=False)
        self.calls: dict = {}

    def attend(self, chunk, keys: _Keys, q, k, v, more: dict):
        """(out, lse). chunk: the number of q's chunk, which may be traced; more: the arrays among the options, by
        name."""
        call, arrays = self._describe(chunk, keys, q, k, v, more)
        out, lse = call.forward(*arrays)
        return out.reshape(*q.shape[:-1], -1), self._unpacked(lse, q)

    def gradients(self, chunk, keys: _Keys, q, k, v, more: dict, out, lse, dout, dlse) -> dict:
        """The gradients by name, bias's as float32. lse may include more keys than these; the gradients are then those
        through these keys only."""
        call, arrays = self._describe(chunk, keys, q, k, v, more)
        rows = [out, dout] if dlse is None else [out, dout, dlse]
        packed = [x.reshape(-1, *x.shape[2:]) if x.ndim == 4 else self._packed(x) for x in rows]
        found = call.backward(*arrays, packed[0], self._packed(lse), *packed[1:])
        gradients = dict(zip(call.wanted, found, strict=True))
        for name, x in zip("qkv", (q, k, v), strict=True):
            gradients[name] = gradients[name].reshape(x.shape)
        row = jnp.arange(k.shape[1])
        covered = (keys.begin <= row) & (row < keys.begin + keys.count)  # nothing writes the other rows
        for name in "kv":
            gradients[name] = jnp.where(covered[:, None, None], gradients[name], 0)
        return gradients

    @staticmethod
    def _packed(lse):  # (batch, nheads, rows) to (nheads, batch * rows)
        return lse.swapaxes(0, 1).reshape(lse.shape[1], -1)

    @staticmethod
    def _unpacked(lse, q):
        return lse.reshape(q.shape[2], *q.shape[:2]).swapaxes(0, 1)

    def _describe(self, chunk, keys: _Keys, q, k, v, more: dict):
        (batch, rows), length = q.shape[:2], k.shape[1]
        first_row = chunk * self.tokens.rows
        sequence = np.arange(batch)
        fields = (
            sequence * length + keys.begin, keys.count, first_row + self.tokens.shift - keys.first,
            first_row, keys.first, sequence, 0, 0,
        )  # fmt: skip
        parts = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch,)) for x in fields]
        given = {name: x.reshape(-1, *x.shape[2:]) for name, x in zip("qkv", (q, k, v), strict=True)}
        given |= more
        given["cu_seqlens_q"] = jnp.arange(batch + 1, dtype=jnp.int32) * rows
        given["parts"] = jnp.stack(parts, axis=1)
        types = tuple((x.shape, str(x.dtype)) for x in given.values())
        if types not in self.calls:
            self.calls[types] = Call(tuple(given), types, (rows, length), self.options)
        return self.calls[types], vary(list(given.values()), [q])


def _options_in(given: dict) -> dict:
    return {name: given[name] for name in _ARRAYS if name in given}


class _Gather(_Mode):
    """One call for each chunk of queries. Chunks share keys, and a call writes the gradient of a key only once."""

    def __init__(self, tokens: _Tokens, options: Options, given: dict):
        super().__init__(tokens, options)
        self.reach = self._find_reach(given)

    def forward(self, given: dict):
        rows = []
        for slot, (q, k, v) in enumerate(self._inputs(given)):
            chunk, keys = self._place(slot)
            rows.append(self.attend(chunk, keys, q, k, v, self._options_of(slot, given)))
        out, lse = zip(*rows, strict=True)
        return jnp.concatenate(out, 1), jnp.concatenate(lse, 2)

    def backward(self, given: dict, out, lse, dout, dlse) -> dict:
        split = self.tokens.split
        dlses = [None] * self.tokens.slots if dlse is None else split(dlse, 2)
        rows = [split(out), split(lse, 2), split(dout), dlses]
        found = []
        for slot, (inputs, *row) in enumerate(zip(self._inputs(given), *rows, strict=True)):
            found.append(self.gradients(*self._place(slot), *inputs, self._options_of(slot, given), *row))
        gradients = {name: [x[name] for x in found] for name in found[0]}
        sums = {name: self._return(x) if name in "kv" else _sum(x) for name, x in gradients.items() if name != "q"}
        if "bias" in given and given["bias"].shape[2] > 1:
            sums["bias"] = jnp.concatenate(gradients["bias"], 2)
        return {"q": jnp.concatenate(gradients["q"], 1), **sums}

    def _inputs(self, given: dict):
        """q, k and v for the call of each slot."""
        return zip(self.tokens.split(given["q"]), self._fetch(given["k"]), self._fetch(given["v"]), strict=True)

    def _options_of(self, slot: int, given: dict) -> dict:
        more = _options_in(given)
        for name in ("bias", "mask"):
            if name in more and more[name].shape[2] > 1:
                more[name] = self.tokens.split(more[name], 2)[slot]
        return more

    def _find_reach(self, given: dict) -> list | None:
        """For each slot, the first and last distance to the chunks of keys that its queries see on any rank. None if
        fetching everything costs no more, or if an option counts keys from the start."""
        t, reach = self.tokens, []
        for slot in range(t.slots):
            own = [t.chunk(rank, slot) for rank in range(t.size)]
            seen = [other - chunk for chunk in own for other in range(t.chunks) if t.sees(chunk, other)] or [0]
            reach.append((min(seen), max(seen)))
        from_start = self.options.dropout_p or "bias" in given or "mask" in given
        return None if from_start or sum(last - first + 1 for first, last in reach) >= t.chunks else reach

    def _place(self, slot: int):
        """The chunk of a slot's queries, and the keys of the slot's call."""
        t = self.tokens
        chunk = t.chunk(lax.axis_index(t.axis_name), slot)
        if self.reach is None:
            return chunk, _Keys(0, 0, t.chunks * t.keys)
        low, high = self.reach[slot]
        first, last = jnp.clip(chunk + low, 0, t.chunks), jnp.clip(chunk + high + 1, 0, t.chunks)
        begin = jnp.clip(first - (chunk + low), 0, high - low + 1)  # there are no keys before the first chunk
        return chunk, _Keys(first * t.keys, begin * t.keys, (last - first) * t.keys)

    def _fetch(self, x) -> list:
        """The keys, or values, for the call of each slot."""
        t = self.tokens
        if self.reach is None:
            return [_natural(lax.all_gather(x, t.axis_name, axis=1, tiled=True), t.size, t.slots, 1)] * t.slots
        own = t.split(x)
        found = []
        for slot, (low, high) in enumerate(self.reach):
            chunks = [
                own[slot] if not distance else sum(lax.ppermute(own[at], t.axis_name, pairs) for at, pairs in routes)
                for distance, routes in self._routes(slot, low, high)
            ]
            found.append(jnp.concatenate(chunks, 1))
        return found

    def _return(self, gradients: list):
        """The gradient of a rank's own keys, from those of the keys of each slot's call on every rank."""
        t = self.tokens
        if self.reach is None:
            total = gradients[0] if len(gradients) == 1 else _sum(gradients).astype(gradients[0].dtype)
            ranks = lax.all_to_all(_by_rank(total, t.size, t.slots, 1), t.axis_name, 1, 1, tiled=True)
            return _sum(jnp.split(ranks, t.size, 1))
        own: list[list] = [[] for _ in range(t.slots)]
        for slot, (low, high) in enumerate(self.reach):
            chunks = jnp.split(gradients[slot], high - low + 1, 1)
            for chunk, (distance, routes) in zip(chunks, self._routes(slot, low, high), strict=True):
                if not distance:
                    own[slot].append(chunk)
                for at, pairs in routes if distance else ():
                    own[at].append(lax.ppermute(chunk, t.axis_name, [(to, source) for source, to in pairs]))
        shape = gradients[0].shape
        (nothing,) = vary([jnp.zeros((shape[0], t.keys, *shape[2:]), jnp.float32)], gradients)
        return jnp.concatenate([_sum(x) if x else nothing for x in own], 1)

    def _routes(self, slot: int, low: int, high: int) -> list:
        """For each distance, how the chunks at that distance from a slot's chunks get to the slot: the slots that hold
        them, and pairs (source, target) of ranks."""
        t, found = self.tokens, []
        for distance in range(low, high + 1):
            routes: dict = {}
            for rank in range(t.size):
                chunk = t.chunk(rank, slot) + distance
                if 0 <= chunk < t.chunks:
                    source, at = (chunk, 0) if chunk < t.size else (2 * t.size - 1 - chunk, 1)
                    routes.setdefault(at, []).append((source, rank))
            found.append((distance, sorted(routes.items())))
        return found


class _Ring(_Mode):
    """In step i a rank works on the keys of the rank i before it. Steps, and pairs of chunks, in which no rank sees
    anything are left out. A sink is the initial value of lse before the first step."""

    def __init__(self, tokens: _Tokens, options: Options, given: dict):
        super().__init__(tokens, options)
        t, slots = tokens, range(tokens.slots)
        self.steps = []  # (step, [(slot of the queries, slot of the keys)])
        for step in range(t.size):
            ranks = [(rank, (rank - step) % t.size) for rank in range(t.size)]
            pairs = [
                (a, b) for a in slots for b in slots if any(t.sees(t.chunk(r, a), t.chunk(s, b)) for r, s in ranks)
            ]
            if pairs:
                self.steps.append((step, pairs))

    def forward(self, given: dict):
        t, (batch, rows, nheads, _) = self.tokens, given["q"].shape
        before = given["sinks"][:, None] if "sinks" in given else -jnp.inf
        out = jnp.zeros((batch, rows, nheads, given["v"].shape[3]), jnp.float32)
        out, lse = vary([out, jnp.full((batch, nheads, rows), before, jnp.float32)], [given["q"]])
        q, out, lse = t.split(given["q"]), t.split(out), t.split(lse, 2)
        for _, pairs, keys, k, v in self._walk(given):
            for a, b in pairs:
                step = self.attend(self._chunk(a), keys[b], q[a], k[b], v[b], self._options_of(given))
                out[a], lse[a] = _merge(out[a], lse[a], *step)
        return jnp.concatenate(out, 1).astype(given["q"].dtype), jnp.concatenate(lse, 2)

    def backward(self, given: dict, out, lse, dout, dlse) -> dict:
        t = self.tokens
        gradients = {} if "sinks" not in given else {"sinks": _sinks_gradient(given["sinks"], out, lse, dout, dlse)}
        dlses = [None] * t.slots if dlse is None else t.split(dlse, 2)
        rows = list(zip(t.split(out), t.split(lse, 2), t.split(dout), dlses, strict=True))
        sums = {name: t.split(*vary([jnp.zeros(given[name].shape, jnp.float32)], [given[name]])) for name in "qkv"}
        q = t.split(given["q"])
        for step, pairs, keys, k, v in self._walk(given):
            found: dict = {}  # slot -> gradients of its keys
            for a, b in pairs:
                some = self.gradients(self._chunk(a), keys[b], q[a], k[b], v[b], self._options_of(given), *rows[a])
                sums["q"][a] += some["q"].astype(jnp.float32)
                found.setdefault(b, []).append(some)
            for b, some in found.items():
                for name in "kv":
                    one = _sum([x[name] for x in some]).astype(given[name].dtype)
                    sums[name][b] += self._moved(one, -step).astype(jnp.float32)
        return gradients | {name: jnp.concatenate(x, 1) for name, x in sums.items()}

    def _options_of(self, given: dict) -> dict:
        return {name: x for name, x in _options_in(given).items() if name != "sinks"}

    def _chunk(self, slot: int):
        return self.tokens.chunk(lax.axis_index(self.tokens.axis_name), slot)

    def _walk(self, given: dict):
        """Yields for each step its number and pairs, the _Keys of each slot, and k and v split by slot."""
        t, at = self.tokens, 0
        rank, k, v = lax.axis_index(t.axis_name), given["k"], given["v"]
        for step, pairs in self.steps:
            k, v = (self._moved(x, step - at) for x in (k, v))
            at, source = step, (rank - step) % t.size
            keys = [_Keys(t.chunk(source, slot) * t.keys, 0, t.keys) for slot in range(t.slots)]
            yield step, pairs, keys, t.split(k), t.split(v)

    def _moved(self, x, distance: int):
        """x of the rank `distance` before this one."""
        size = self.tokens.size
        pairs = [(rank, (rank + distance) % size) for rank in range(size)]
        return lax.ppermute(x, self.tokens.axis_name, pairs) if distance % size else x


def _sum(arrays):
    """The sum in float32, in this order."""
    total = arrays[0].astype(jnp.float32)
    for x in arrays[1:]:
        total = total + x.astype(jnp.float32)
    return total


def _by_row(x):  # (batch, nheads, rows) to a shape that broadcasts to (batch, rows, nheads, headdim)
    return x.swapaxes(1, 2)[..., None]


def _merge(out, lse, out_b, lse_b):
    """Merges results over disjoint keys. out is float32."""
    total = jnp.logaddexp(lse, lse_b)
    known = jnp.where(jnp.isneginf(total), 0, total)  # the weights of a row that sees no key become 0
    return _by_row(jnp.exp(lse - known)) * out + _by_row(jnp.exp(lse_b - known)) * out_b.astype(jnp.float32), total


def _sinks_gradient(sinks, out, lse, dout, dlse):
    """The gradient of sinks. A sink is a key whose value is 0: dS = P (0 - rowsum(dout * out) + dlse)."""
    p = jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks[:, None] - lse))
    through = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    return (p * ((0 if dlse is None else dlse) - through)).sum((0, 2))
