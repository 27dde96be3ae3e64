"""Attention under JAX's names, and attention over a cache as a function that writes to none of its arguments.

Both can be part of a JAX program: under jit, vmap and jax.shard_map, on CPU and GPU, with arrays that are spread over
the devices of a mesh. The package's other functions can be too, under their own names: flash_attn_func and
flash_attn_varlen_func with gradients, merge and rope with gradients, rms_norm, swiglu, linear and sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import kvcache
from .._core.checks import flag, quoted
from .._core.options import Options
from ..errors import BadArgument
from ._attention import traced
from ._functions import traced_function

_jax_s = jax.nn.dot_product_attention  # JAX's own, even if that name is replaced later
_IMPLEMENTATIONS = (None, "flash_attn_minimal", "xla", "cudnn")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention: softmax(scale * query key^T + bias) value, without the matrix in memory.

    Arguments:
        query: (B, T, N, H) or (T, N, H), float32, float16 or bfloat16; H from 1 to 512.
        key, value: (B, S, K, H) or (S, K, H), the same dtype. N is a multiple of K; the H of value may differ.
        bias: broadcasts to (B, N, T, S), a floating dtype. A bias that has neither query's dtype nor float32 is
            converted to float32.
        mask: broadcasts to (B, N, T, S), bool: True takes part.
        scale: a number, which may be traced; None means H ** -0.5.
        is_causal: row i sees columns 0 .. i.
        query_seq_lengths, key_value_seq_lengths: (B,) int32, the number of rows and columns, from the start of each
            sequence, that count. Later rows of the result are 0. A kernel does not read rows and columns that do not
            count.
        local_window_size: (left, right), or one number for both: row i sees columns i - left .. i + right. Negative
            numbers are refused: to jax.nn they are numbers like others, to flash_attn_func an open end.
        implementation: None and "flash_attn_minimal" mean this library; "xla" and "cudnn" are passed on to jax.nn.
        return_residual: also return the logarithm of each row's sum of exponentials, (B, T, N) or (T, N) in query's
            dtype. As in jax.nn, no gradient goes through it.

    A row that sees no column is 0, and its residual is -inf. (In jax.nn it is the mean of all rows of value.)

    Returns:
        an array like query, with value's H; with return_residual the pair (array, residual).

    Raises:
        BadArgument (a ValueError) and Unsupported (a NotImplementedError), while the call is traced.

    >>> import jax
    >>> from flash_attn_minimal.jax import dot_product_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 10, 4, 16))
    >>> out = jax.jit(lambda *a: dot_product_attention(*a, is_causal=True))(q, k, v)
    >>> bool(abs(out - jax.nn.dot_product_attention(q, k, v, is_causal=True)).max() < 1e-5)
    True
    """
    if implementation not in _IMPLEMENTATIONS:
        raise BadArgument(
            f"implementation={quoted(implementation)} is not one of {', '.join(map(repr, _IMPLEMENTATIONS))}"
        )
    if implementation in ("xla", "cudnn"):
        more = {"return_residual": return_residual} if return_residual else {}
        return _jax_s(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            implementation=implementation, **more,
        )  # fmt: skip
    given = {"query": jnp.asarray(query), "key": jnp.asarray(key), "value": jnp.asarray(value)}
    q, k, v = (_four_axes(name, x) for name, x in given.items())
    _check_shapes(q, k, v)
    options = Options(
        softmax_scale=scale, causal=is_causal, top_left=True, bias=_bias(bias), mask=_mask(mask),
        **({} if local_window_size is None else {"window_size": _local_window(local_window_size)}),
    )  # fmt: skip
    part = None
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        part = {
            "seqlen_q": _lengths("query_seq_lengths", query_seq_lengths, q),
            "seqlen_k": _lengths("key_value_seq_lengths", key_value_seq_lengths, k),
        }
    out, lse = traced(q, k, v, None, None, True, options, part)
    out = out.reshape(*given["query"].shape[:-1], v.shape[-1])
    if not flag("return_residual", return_residual):
        return out
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2).astype(q.dtype)
    return out, residual.reshape(out.shape[:-1])


def _four_axes(name: str, x):
    if x.ndim not in (3, 4):
        raise BadArgument(f"{name} has shape {x.shape}: expected (batch, rows, heads, dim) or (rows, heads, dim)")
    return x if x.ndim == 4 else x[None]


def _check_shapes(q, k, v) -> None:
    """Checks the shapes and dtypes, with errors that use the names of this function's arguments."""
    for name, x in (("key", k), ("value", v)):
        if x.shape[0] != q.shape[0]:
            raise BadArgument(f"{name} has a batch of {x.shape[0]}, but query has one of {q.shape[0]}")
        if x.dtype != q.dtype:
            raise BadArgument(f"{name} is {x.dtype}, but query is {q.dtype}: they must be the same")
    if k.shape[-1] != q.shape[-1] or v.shape[:-1] != k.shape[:-1]:
        raise BadArgument(
            f"query, key and value have rows {q.shape[1:]}, {k.shape[1:]}, {v.shape[1:]}: they do not fit"
        )


def _local_window(size) -> tuple:
    try:
        window = (size, size) if isinstance(size, (int, np.integer)) else tuple(size)
    except TypeError:  # it has no elements
        window = ()
    if len(window) != 2 or not all(hasattr(edge, "__index__") for edge in window):
        raise BadArgument(f"local_window_size={quoted(size)} is neither an integer nor a pair of them")
    if any(isinstance(edge, (int, np.integer)) and edge < 0 for edge in window):
        raise BadArgument(f"local_window_size={quoted(size)} is negative: without an end it would be a large number")
    return window


def _bias(bias):
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise BadArgument(f"bias is {bias.dtype}: expected a floating dtype; a boolean array is a mask")
    return bias.astype(jnp.float32) if bias.dtype.itemsize > 4 else bias


def _mask(mask):
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise BadArgument(f"mask is {mask.dtype}: expected bool; what is added to the scores is a bias")
    return mask


def _lengths(name: str, lengths, x):
    if lengths is None:
        return jnp.full(x.shape[:1], x.shape[1], jnp.int32)
    lengths = jnp.asarray(lengths)
    if lengths.shape != x.shape[:1] or lengths.dtype != jnp.int32:
        raise BadArgument(f"{name} is {lengths.dtype} {lengths.shape}: expected int32 {x.shape[:1]}")
    return lengths


class CacheStep(NamedTuple):
    """The result of flash_attn_with_kvcache."""

    out: Any
    k_cache: Any
    v_cache: Any
    lse: Any = None  # with return_lse
    k_scale: Any = None  # the factors of an 8-bit cache
    v_scale: Any = None


def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, *arguments: Any, **options: Any) -> CacheStep:
    """flash_attn_minimal.flash_attn_with_kvcache as a function: the caches with k and v appended are results, and the
    given caches do not change.

    Arguments: those of flash_attn_minimal.flash_attn_with_kvcache except `out`. cache_seqlens may also be a single
    number in an array. All arrays are JAX's or NumPy's.

    XLA writes into the given caches if the program does not use them afterwards, and copies them otherwise. So a
    program that is called with caches should donate them (jax.jit's donate_argnames). A program that carries them
    through jax.lax.scan or while_loop need not do anything.

    Returns:
        CacheStep(out, k_cache, v_cache, lse, k_scale, v_scale): out (batch, seqlen_q, nheads, headdim_v) in q's dtype,
        lse (batch, nheads, seqlen_q) float32 or None, the factors of an 8-bit cache or None.

    There are no gradients.

    >>> import functools, jax, jax.numpy as jnp
    >>> from flash_attn_minimal.jax import flash_attn_with_kvcache
    >>> @functools.partial(jax.jit, donate_argnames=("k_cache", "v_cache"))
    ... def step(q, k, v, k_cache, v_cache, t):
    ...     out, k_cache, v_cache, *_ = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=t)
    ...     return out, k_cache, v_cache, t + 1
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, 2, 8))
    >>> k_cache, v_cache = jnp.zeros((1, 100, 2, 8)), jnp.zeros((1, 100, 2, 8))
    >>> out, k_cache, v_cache, t = step(q, k, v, k_cache, v_cache, jnp.int32(0))
    >>> bool((k_cache[:, 0] == k[:, 0]).all()), int(t)
    (True, 1)
    """
    given, out, wants_lse = kvcache.arguments_of("flash_attn_with_kvcache", (q, k_cache, v_cache, *arguments), options)
    if out is not None:
        raise BadArgument("out is given, but a JAX program has no memory to write to")
    lengths = given.get("cache_seqlens")
    if isinstance(lengths, (jax.Array, np.ndarray)) and lengths.ndim == 0:
        given["cache_seqlens"] = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), jnp.shape(q)[:1])
    given["return_softmax_lse"] = bool(wants_lse)
    written: tuple[str, ...] = ()
    if given.get("k") is not None:  # the caches, and factors of tokens
        scales = [name for name in ("k_scale", "v_scale") if getattr(given.get(name), "ndim", 0) == 3]
        written = ("k_cache", "v_cache", *scales)
    found = traced_function(kvcache.flash_attn_with_kvcache, given, written)
    own, became = found if written else (found, ())
    out, lse = own if wants_lse else (own, None)
    now = {name: given.get(name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    return CacheStep(out=out, lse=lse, **{**now, **dict(zip(written, became, strict=True))})
