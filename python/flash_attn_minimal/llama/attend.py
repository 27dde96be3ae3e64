"""Attention over the cache. Flash attention is one call of this library. Standard attention keeps the whole score
matrix in memory. It is a kernel of the library in a decode step on the host; elsewhere it uses array operations, which
work without the library."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BadArgument
from .config import Config

Array = Any
ATTENTIONS = ("flash", "standard")
DTYPES = ("float32", "float16", "bfloat16")


def check_names(attention: str, dtype: str) -> None:
    if attention not in ATTENTIONS:
        raise BadArgument(f"attention={attention!r} is none of {', '.join(ATTENTIONS)}")
    if dtype not in DTYPES:
        raise BadArgument(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")


def flash_attention(q: Array, k: Array, v: Array, cache_k: Array, cache_v: Array, rows, rope, config: Config) -> Array:
    """Rotates q and k, appends k and v to the cache, and attends, in one call: (batch, seqlen, nheads, headdim)."""
    return cached_attention(q, k, v, cache_k, cache_v, rows, rope, config)


def cached_attention(
    q: Array, k: Array, v: Array, cache_k: Array, cache_v: Array, rows, rope, config: Config, kernel: str | None = None
) -> Array:
    """flash_attention, with a kernel of the library by its name; cpu_naive is standard attention."""
    from .. import flash_attn_with_kvcache

    if rows.table is None:
        cache_k, cache_v = (c[rows.first : rows.first + len(q)] for c in (cache_k, cache_v))
    return flash_attn_with_kvcache(
        q,
        cache_k,
        cache_v,
        k,
        v,
        *rope,
        cache_seqlens=rows.lengths,
        block_table=rows.table,
        causal=True,
        window_size=(config.window - 1, -1),
        rotary_interleaved=config.rope_interleaved,
        kernel=kernel,
        programmatic=True,  # safe: cache and lengths were written before the step's first kernel, a plain launch
    )


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    """RoPE in place: x (batch, seqlen, nheads, headdim) float32; cos, sin (batch, seqlen, headdim / 2)."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = turned


def standard_attention(xp, q: Array, k: Array, v: Array, window: int = 0) -> Array:
    """Causal attention of the last rows of each sequence over all its keys: the last row sees the last key.

    q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim) -> the shape of q. 16-bit inputs
    are converted to float32 first. A row sees the last `window` keys up to its own; 0 = all keys up to its own.
    """
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    group = nheads // nheads_k  # the query heads that share a key head are adjacent: one product has all their rows
    rows = (
        q.reshape(batch, seqlen_q, nheads_k, group, headdim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch, nheads_k, group * seqlen_q, headdim)
    )
    keys = k.transpose(0, 2, 3, 1).astype(xp.float32, copy=False)
    values = v.transpose(0, 2, 1, 3).astype(xp.float32, copy=False)
    s = (rows.astype(xp.float32, copy=False) * headdim**-0.5) @ keys  # (batch, nheads_k, group * seqlen_q, seqlen_k)
    if seqlen_q > 1 or 0 < window < seqlen_k:  # else the single row sees every key
        own = xp.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
        visible = xp.arange(seqlen_k) <= own
        if window:
            visible &= xp.arange(seqlen_k) > own - window
        s = s.reshape(batch, nheads_k, group, seqlen_q, seqlen_k)
        s = xp.where(visible, s, xp.float32(-np.inf)).reshape(batch, nheads_k, group * seqlen_q, seqlen_k)
    p = xp.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = (p @ values).reshape(batch, nheads_k, group, seqlen_q, headdim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, seqlen_q, nheads, headdim).astype(q.dtype, copy=False)
