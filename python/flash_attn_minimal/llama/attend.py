"""Attention over the cache: one call of this library."""

from __future__ import annotations

from typing import Any

from ..errors import BadArgument
from .config import Config

Array = Any
DTYPES = ("float32", "float16", "bfloat16")


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise BadArgument(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")


def cached_attention(
    q: Array, k: Array, v: Array, cache_k: Array, cache_v: Array, rows, rope, config: Config, kernel: str | None = None
) -> Array:
    """Rotates q and k, appends k and v to the cache, and attends, in one call: (batch, seqlen, nheads, headdim)."""
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
