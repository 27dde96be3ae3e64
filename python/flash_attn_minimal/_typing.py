"""What type checkers know about the options of the public functions. Nothing here is used at run time; the values are
checked by _checks.py and _options.py."""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

Array = TypeVar("Array")  # of one call's framework: numpy.ndarray, torch.Tensor, cupy.ndarray, jax.Array, ...


class KeywordOptions(TypedDict, total=False):
    """flash_attn_func's keyword-only arguments."""

    bias: Any
    mask: Any
    sinks: Any
    top_left: bool
    dropout_seed: int | None
    dropout_offset: int
    out: Any
    kernel: str | None
    allow_tf32: bool
    num_threads: int
    q_descale: Any
    k_descale: Any
    v_descale: Any
    out_dtype: str | None
    fast_accum: bool


class AttentionOptions(KeywordOptions, total=False):
    """These, and those that may be positional."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Any
    deterministic: bool


class CacheKeywordOptions(TypedDict, total=False):
    """flash_attn_with_kvcache's keyword-only arguments."""

    sinks: Any
    k_scale: Any
    v_scale: Any
    batch_invariant: bool
    programmatic: bool
    kernel: str | None
    out: Any
    num_threads: int


class CacheOptions(CacheKeywordOptions, total=False):
    """These, and those that may be positional."""

    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    block_table: Any
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: Any
    num_splits: int
