"""FlashAttention-3's functions: flash_attn_interface.

Tensors are PyTorch's, on a CPU or a GPU: float16, bfloat16, float32 or float8_e4m3fn. num_splits of calls without a
cache, pack_gqa, sm_margin and scheduler_metadata are hints for FlashAttention-3's kernels; they do not affect results
and are not used here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ... import attention as core
from ...errors import Unsupported
from ...kvcache import flash_attn_with_kvcache as core_with_kvcache
from ...torch._inputs import dense_rows
from . import _caches
from ._calls import check_array, parts, refusing, score_options, without_gradient
from ._packed import Used

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_MOST_HEADDIM = 512  # in calls without a cache; calls over a cache take 576


def _attend(q, k, v, qv, varlen: tuple | None, descales: tuple, options: dict[str, Any]) -> Any:
    """Returns out and lse. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    if q.dtype == torch.float8_e4m3fn:
        if qv is not None:
            raise RuntimeError(f"qv is given, but q is {q.dtype}: scores of two products are served in 16 and 32 bits")
        return _float8(q, k, v, varlen, descales, options)
    if any(x is not None for x in descales):
        raise RuntimeError(f"q_descale, k_descale or v_descale is given, but q is {q.dtype}: not of 8 bits")
    q, k, v, qv = dense_rows(q, k, v, qv)
    if qv is not None:
        rows = ("batch", "seqlen") if varlen is None else ("rows",)
        check_array(q, "q", q, *rows, "nheads", "headdim")
        check_array(q, "k", k, *rows, "nheads_k", q.shape[-1])
        check_array(q, "v", v, *k.shape[:-1], "headdim_v")
        check_array(q, "qv", qv, *q.shape[:-1], v.shape[-1])
        # q k^T + qv v^T is one product of the concatenated rows
        q = torch.cat([qv, q], -1)
        if q.shape[-1] > _MOST_HEADDIM:
            return _over_a_cache(q, k, v, varlen, options)
        k, v = _caches.joined(v, k)
    run, lengths = (core.flash_attn_func, ()) if varlen is None else (core.flash_attn_varlen_func, varlen)
    return run(q, k, v, *lengths, return_lse=True, **options)


@without_gradient("headdim + headdim_v is above 512 with qv: attention of such rows has no backward pass")
def _over_a_cache(q, k, v, varlen, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of concatenated rows of q and qv that exceed the head dims of other calls, as a call over a cache."""
    options = {name: value for name, value in options.items() if name != "deterministic"}
    if varlen is None:
        k, v = _caches.joined(v, k)
        return core_with_kvcache(q, k, v, return_lse=True, **options)
    cu_q, cu_k, max_q, max_k = varlen
    k, v, where = _caches.packed_keys(k, v, cu_k, max_k)
    return _caches.attend_packed(q, *_caches.joined(v, k), cu_q, max_q, cu_k.diff(), where, options)


@without_gradient("q is float8_e4m3fn, which has no backward pass")
def _float8(q, k, v, varlen, descales, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a float8 kernel or, if none serves the call, computes in bfloat16, which has every number of float8."""
    group = q.shape[-2] // k.shape[-2]
    batch = q.shape[0] if varlen is None else varlen[0].shape[0] - 1
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        check_array(q, name, x, batch, k.shape[-2])
    ones = torch.ones(batch, k.shape[-2], device=q.device)
    q_descale, k_descale, v_descale = (ones if x is None else x.float() for x in descales)
    factors = {"q_descale": q_descale.repeat_interleave(group, -1), "k_descale": k_descale, "v_descale": v_descale}
    run, lengths = (core.flash_attn_func, ()) if varlen is None else (core.flash_attn_varlen_func, varlen)
    try:
        return run(q, k, v, *lengths, return_lse=True, **factors, **options)
    except Unsupported:
        pass
    cu_q = None if varlen is None else varlen[0]
    q = _caches.scaled(q.bfloat16(), _caches.per_head(q_descale, group) * _caches.per_head(k_descale, group), cu_q)
    out, lse = run(q, k.bfloat16(), v.bfloat16(), *lengths, return_lse=True, **options)
    return _caches.scaled(out, _caches.per_head(v_descale, group), cu_q), lse


def _options(q, qv, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic) -> dict[str, Any]:
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5
    options = score_options(softmax_scale, causal, window_size, softcap)
    return options | {"attention_chunk": attention_chunk, "deterministic": deterministic}


@refusing
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention: q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k,
    nheads_k, headdim_v).

    qv (batch, seqlen_q, nheads, headdim_v): the scores are q k^T + qv v^T, and the default scale is (headdim +
    headdim_v) ** -0.5. headdim + headdim_v is at most 576, with gradients 512. q_descale, k_descale and v_descale
    (batch, nheads_k): factors that the values of float8_e4m3fn inputs are multiplied by. Returns out, and with
    return_attn_probs the pair (out, lse)."""
    options = _options(q, qv, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    out, lse = _attend(q, k, v, qv, None, (q_descale, k_descale, v_descale), options)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with q, k and v in one tensor: qkv (batch, seqlen, 3, nheads, headdim), or with num_heads_q
    (batch, seqlen, num_heads_q + 2 nheads_k, headdim)."""
    if not isinstance(qkv, torch.Tensor) or qkv.ndim != 4:
        q, k, v = parts("qkv", qkv, 3, "batch", "seqlen")
    elif num_heads_q is None:
        raise RuntimeError(f"num_heads_q is None, but qkv has shape {tuple(qkv.shape)}: its heads belong to q, k and v")
    else:
        heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if heads_k < 1 or odd:
            raise RuntimeError(
                f"num_heads_q={num_heads_q}, but qkv has {qkv.shape[2]} heads: expected num_heads_q + 2 nheads_k"
            )
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@refusing
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func for packed sequences: q (total_q, nheads, headdim), k (total_k, nheads_k, headdim), v (total_k,
    nheads_k, headdim_v), qv (total_q, nheads, headdim_v).

    seqused_q, seqused_k (batch,) int32: only this many rows of each sequence count, the first ones. Other rows of q
    have out = 0 and lse = -inf, and other rows of all arrays have zero gradients."""
    options = _options(q, qv, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    rows = keys = None
    if seqused_q is not None:
        check_array(q, "q", q, "total_q", "nheads", "headdim")
        check_array(q, "qv", qv, *q.shape[:-1], "headdim_v")
        rows = Used(cu_seqlens_q, seqused_q, q.shape[0], "q")
        q, qv, cu_seqlens_q = rows.gather(q), None if qv is None else rows.gather(qv), rows.cu_seqlens
    if seqused_k is not None:
        check_array(k, "k", k, "total_k", "nheads_k", "headdim")
        check_array(k, "v", v, *k.shape[:-1], "headdim_v")
        keys = Used(cu_seqlens_k, seqused_k, k.shape[0], "k")
        k, v, cu_seqlens_k = keys.gather(k), keys.gather(v), keys.cu_seqlens
    varlen = (cu_seqlens_q, cu_seqlens_k, operator.index(max_seqlen_q), operator.index(max_seqlen_k))
    out, lse = _attend(q, k, v, qv, varlen, (q_descale, k_descale, v_descale), options)
    if rows is not None:
        out, lse = rows.scatter(out, 0.0), rows.scatter(lse.T, -torch.inf).T.contiguous()
    return (out, lse) if return_attn_probs else out


@refusing
@without_gradient("flash_attn_with_kvcache has no backward pass")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn_minimal.flash_attn_with_kvcache with more arguments.

    Arguments beyond those:
        qv: as in flash_attn_func.
        page_table: the block_table; with cache_batch_idx, sequence b uses row cache_batch_idx[b].
        cu_seqlens_q, max_seqlen_q: for packed rows of q, and of qv: (total_q, nheads, headdim).
        cu_seqlens_k_new: for packed rows of k and v.
        rotary_seqlens: (batch,) int32, the position of each sequence's first new row, in place of cache_seqlens.
        q_descale, k_descale, v_descale: (batch, nheads_k), for an 8-bit cache. q may be float8_e4m3fn too.

    Returns out, and with return_softmax_lse (out, lse, empty, empty), where FlashAttention-3 has the results of its
    splits in the last two."""
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise RuntimeError(
            "max_seqlen_q is None with cu_seqlens_q: packed rows need the length of the longest sequence"
        )
    options = _options(q, qv, softmax_scale, causal, window_size, attention_chunk, softcap, False)
    del options["deterministic"]
    q, k, v, qv, rotary_cos, rotary_sin = dense_rows(q, k, v, qv, rotary_cos, rotary_sin)
    out, lse = _caches.with_kvcache(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        rotary_interleaved=rotary_interleaved, options=options | {"num_splits": num_splits},
    )  # fmt: skip
    return (out, lse, out.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


@refusing
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of keys into attention over their union. out_partial (splits, batch, seqlen,
    nheads, headdim_v) float32, lse_partial (splits, batch, seqlen, nheads), or both without batch. Returns out, in
    out_dtype or float32, and lse. A split with lse = -inf adds nothing, whatever its out holds."""
    rows = ("seqlen",) if out_partial.ndim == 4 else ("batch", "seqlen")
    check_array(out_partial, "out_partial", out_partial, "splits", *rows, "nheads", "headdim_v")
    check_array(out_partial, "lse_partial", lse_partial, *out_partial.shape[:-1])
    lse = torch.logsumexp(lse_partial.float(), 0)
    weight = (lse_partial - torch.where(lse == -torch.inf, 0.0, lse)).exp().unsqueeze(-1)
    total = torch.zeros_like(out_partial[0], dtype=torch.float32)
    for part, share in zip(out_partial, weight, strict=True):
        total += torch.where(share == 0, 0.0, share * part)
    if out is None:
        return total.to(out_dtype or torch.float32), lse
    return out.copy_(total), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """An empty int32 tensor on cache_seqlens' device. The kernels here plan their own work on the device, so nothing
    has to be computed before a step."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
