"""Calls with all their inputs, the float64 answer, and the error of a plain implementation of the same precision. The
allowed error of a result is in flash_attn_lab/fuzz/judge.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_attn_lab import reference
from flash_attn_lab.fuzz import judge
from flash_attn_lab.fuzz.arrays import random_intervals
from flash_attn_lab.fuzz.judge import (
    EPSILON,
    check,
    plain_attention,
    plain_backward,
    plain_head,
    round_to,
    rounding_floor,
    within,
)

__all__ = [
    "EPSILON",
    "Case",
    "check",
    "expected",
    "expected_backward",
    "gradient_floor",
    "inputs",
    "plain_attention",
    "plain_head",
    "round_to",
    "rounding_floor",
    "within",
]


@dataclass(frozen=True)
class Case:
    """One call, small enough to print. Its arrays follow from the seed."""

    seqlen_q: int = 65
    seqlen_k: int = 65
    headdim: int = 64
    headdim_v: int | None = None
    batch: int = 1
    nheads: int = 2
    nheads_k: int = 1
    dtype: str = "float32"
    softmax_scale: float | None = None
    causal: bool = False
    top_left: bool = False
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    alibi: int = 0  # rank of alibi_slopes: 0 off, 1 (nheads), 2 (batch, nheads)
    bias: tuple[bool, ...] | None = (
        None  # which of the leading axes are full size, the columns left out; () is a bias of rank 1
    )
    bias_float32: bool = False
    mask: tuple[bool, ...] | None = None
    mask_rate: float = 0.7
    intervals: tuple[int, int] | None = None  # heads of startend_row_indices, and numbers for each key
    blocks: tuple[int, int, int] | None = None  # heads of block_mask, and rows and keys of a block
    block_rate: float = 0.5
    sinks: bool = False
    dropout_p: float = 0.0
    dlse: bool = False  # the loss of the backward pass depends on lse, too
    spread: float = 1.0  # standard deviation of q
    cu_seqlens_q: tuple[int, ...] | None = None  # varlen: seqlen_q and seqlen_k are then the longest
    cu_seqlens_k: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None


def inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """(q, k, v, options). The arrays hold values of case.dtype, as float32."""
    rng = np.random.default_rng(case.seed)
    if case.varlen:
        batch = len(case.cu_seqlens_q) - 1
        lead_q, lead_k = (case.cu_seqlens_q[-1],), (case.cu_seqlens_k[-1],)
    else:
        batch, lead_q, lead_k = case.batch, (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    headdim_v = case.headdim if case.headdim_v is None else case.headdim_v

    def normal(*shape, spread=1.0):
        return round_to(spread * rng.standard_normal(shape, dtype=np.float32), case.dtype)

    q = normal(*lead_q, case.nheads, case.headdim, spread=case.spread)
    k = normal(*lead_k, case.nheads_k, case.headdim)
    v = normal(*lead_k, case.nheads_k, headdim_v)

    def score_shape(full: tuple[bool, ...]):
        sizes = (batch, case.nheads, case.seqlen_q)[3 - len(full) :]
        return (*[size if whole else 1 for size, whole in zip(sizes, full, strict=True)], case.seqlen_k)

    options: dict[str, Any] = {}
    for name in ("softmax_scale", "causal", "top_left", "window_size", "attention_chunk", "softcap", "dropout_p"):
        if getattr(case, name) != getattr(Case, name):
            options[name] = getattr(case, name)
    if case.dropout_p:
        options |= {"dropout_seed": 2**63 + case.seed, "dropout_offset": 2**40 + 3}
    if case.alibi:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, (batch, case.nheads)[2 - case.alibi :]).astype(np.float32)
    if case.bias is not None:
        bias = rng.standard_normal(score_shape(case.bias), dtype=np.float32)
        options["bias"] = bias if case.bias_float32 else round_to(bias, case.dtype)
    if case.mask is not None:
        options["mask"] = rng.random(score_shape(case.mask)) < case.mask_rate
    if case.intervals is not None:
        shape = (*([] if case.varlen else [batch]), case.intervals[0], lead_k[-1], case.intervals[1])
        options["startend_row_indices"] = random_intervals(rng, shape, case.seqlen_q)
    if case.blocks is not None:
        heads, *sizes = case.blocks
        counts = (-(-n // size) for n, size in zip((case.seqlen_q, case.seqlen_k), sizes, strict=True))
        options["block_mask"] = rng.random((batch, heads, *counts)) < case.block_rate
    if case.sinks:
        options["sinks"] = rng.standard_normal(case.nheads, dtype=np.float32)
    return q, k, v, options


def gradient_floor(case: Case, exact: np.ndarray) -> float:
    (q, k, *_), (_, lse), _ = expected(case)
    return judge.gradient_floor(q, k, lse, exact, case.softmax_scale)


@functools.lru_cache(maxsize=128)
def expected_backward(case: Case):
    """(inputs with dout, out and lse; float64 gradients; plain gradients) of a case. If the options have dlse, it is
    NaN in rows that see nothing."""
    (q, k, v, options), (out, lse), _ = expected(case)
    rng = np.random.default_rng(case.seed + 1)
    dout = round_to(rng.standard_normal(out.shape, dtype=np.float32), case.dtype)
    plain = functools.partial(plain_backward, dtype=case.dtype)
    arrays = (dout, q, k, v)
    if case.dlse:
        dlse = rng.standard_normal(lse.shape, dtype=np.float32)
        options = {**options, "dlse": np.where(np.isneginf(lse), np.float32(np.nan), dlse)}
    if case.varlen:
        cu = case.cu_seqlens_q, case.cu_seqlens_k
        exact = reference.varlen_backward(reference.standard_attention_backward, *arrays, *cu, **options)
        plain = reference.varlen_backward(plain, *arrays, *cu, **options)
    else:
        exact = reference.standard_attention_backward(*arrays, **options)
        plain = plain(*arrays, **options)
    return (*arrays, round_to(out, case.dtype), lse.astype(np.float32), options), exact, plain


@functools.lru_cache(maxsize=128)
def expected(case: Case):
    """(inputs, float64 out and lse, plain out and lse) of a case. All kernels that run the case share them."""
    q, k, v, options = inputs(case)

    def plain(*arrays, **rest):
        return plain_attention(*arrays, dtype=case.dtype, **rest)

    if not case.varlen:
        return (q, k, v, options), reference.standard_attention(q, k, v, **options), plain(q, k, v, **options)
    cu = case.cu_seqlens_q, case.cu_seqlens_k
    exact = reference.varlen(reference.standard_attention, q, k, v, *cu, **options)
    return (q, k, v, options), exact, reference.varlen(plain, q, k, v, *cu, **options)
