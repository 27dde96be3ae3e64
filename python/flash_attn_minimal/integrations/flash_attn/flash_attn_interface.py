"""FlashAttention-2's functions: flash_attn.flash_attn_interface.

Tensors are PyTorch's, float16, bfloat16 or float32, on a CPU or a GPU. flash_attn_minimal.flash_attn_func explains
arguments that are not explained here. dropout draws its seed from PyTorch's generator.

With return_attn_probs every function returns (out, softmax_lse, S_dmask): lse (batch, nheads, seqlen_q), or (nheads,
total_q) for packed sequences. S_dmask is that of _calls.signed_probabilities with dropout, otherwise an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import attention as core
from ...backward import backward
from ...kvcache import flash_attn_with_kvcache as core_with_kvcache
from ...torch._inputs import dense_rows
from . import _caches
from ._calls import draw_dropout, parts, refusing, score_options, signed_probabilities, without_gradient

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The number of keys whose scores in S_dmask are relative to the same maximum: all."""
    return 2**30


def _attend(q, k, v, varlen: tuple | None, options: dict[str, Any], return_attn_probs: bool, drops: bool = True) -> Any:
    """Runs a call. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k); drops: whether S_dmask is
    computed with return_attn_probs."""
    q, k, v = dense_rows(q, k, v)
    run, lengths = (core.flash_attn_func, ()) if varlen is None else (core.flash_attn_varlen_func, varlen)
    results = run(q, k, v, *lengths, return_lse=bool(return_attn_probs), **options)
    if not return_attn_probs:
        return results
    drops = drops and options.get("dropout_p")
    return *results, signed_probabilities(q, k, varlen, options) if drops else q.new_empty(0)


@refusing
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention: q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim)."""
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"deterministic": deterministic, **draw_dropout(dropout_p, q.device)}
    return _attend(q, k, v, None, options, return_attn_probs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *options: Any, **more: Any) -> Any:
    """flash_attn_func with k and v in one tensor, kv (batch, seqlen_k, 2, nheads_k, headdim). The other arguments are
    those of flash_attn_func, in its order."""
    return flash_attn_func(q, *parts("kv", kv, 2, "batch", "seqlen_k"), *options, **more)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *options: Any, **more: Any) -> Any:
    """flash_attn_func with q, k and v in one tensor, qkv (batch, seqlen, 3, nheads, headdim). The other arguments are
    those of flash_attn_func, in its order."""
    return flash_attn_func(*parts("qkv", qkv, 3, "batch", "seqlen"), *options, **more)


@refusing
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim).

    With block_table (batch, pages of a sequence) int32, k and v are pages (pages, page_size, nheads_k, headdim) as in
    flash_attn_with_kvcache, and cu_seqlens_k gives the number of keys of each sequence. Such calls have neither dropout
    nor a gradient."""
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        if dropout_p:
            raise RuntimeError(f"dropout_p={dropout_p} with block_table: pages are served without dropout")
        lengths = _caches.lengths_of(cu_seqlens_k)
        results = _caches.attend_packed(
            q, k, v, cu_seqlens_q, max_seqlen_q, lengths, {"block_table": block_table}, options
        )
        return (*results, q.new_empty(0)) if return_attn_probs else results[0]
    options |= {"deterministic": deterministic, **draw_dropout(dropout_p, q.device)}
    varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend(q, k, v, varlen, options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **more: Any,
) -> Any:
    """flash_attn_varlen_func with k and v in one tensor, kv (total_k, 2, nheads_k, headdim). The other arguments are
    those of flash_attn_varlen_func, in its order."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, *parts("kv", kv, 2, "total_k"), *lengths, *options, **more)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *options: Any, **more: Any
) -> Any:
    """flash_attn_varlen_func with q, k and v in one tensor, qkv (total, 3, nheads, headdim). The other arguments are
    those of flash_attn_varlen_func, in its order."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*parts("qkv", qkv, 3, "total"), *lengths, *options, **more)


@refusing
@without_gradient("flash_attn_with_kvcache has no backward pass")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn_minimal.flash_attn_with_kvcache, with these of its arguments. Rotary tables without k and v rotate
    q."""
    q, k, v, rotary_cos, rotary_sin = dense_rows(q, k, v, rotary_cos, rotary_sin)
    return core_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        **score_options(softmax_scale, causal, window_size, softcap, alibi_slopes),
        rotary_interleaved=rotary_interleaved, num_splits=num_splits, return_lse=bool(return_softmax_lse),
    )  # fmt: skip


# ---- the two passes as separate functions, for programs that call them (ring attention, their own checkpointing) ----


def _rng_state(options: dict[str, Any]) -> torch.Tensor:
    """Seed and offset of dropout, in host memory."""
    seed = options.get("dropout_seed", 0)
    return torch.tensor([seed - (seed >> 63 << 64), options.get("dropout_offset", 0)])


def _drawn(dropout_p: float, rng_state: torch.Tensor | None) -> dict[str, Any]:
    if not dropout_p:
        return {}
    if rng_state is None:
        raise RuntimeError(f"rng_state is None with dropout_p={dropout_p}: pass what the forward pass returned")
    seed, offset = rng_state.tolist()
    return {"dropout_p": dropout_p, "dropout_seed": seed % 2**64, "dropout_offset": offset}


@refusing
def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state); records no gradient."""
    options = score_options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= draw_dropout(dropout_p, q.device)
    with torch.no_grad():
        return *_attend(q, k, v, None, options, True, return_softmax), _rng_state(options)


@refusing
def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state); records no gradient."""
    if num_splits > 1:
        raise RuntimeError(f"num_splits={num_splits}: num_splits > 1 is not supported for packed sequences")
    options = score_options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    if leftpad_k is not None and block_table is None:
        raise RuntimeError("leftpad_k is set without block_table: packed keys have no padding")
    with torch.no_grad():
        if block_table is not None or seqused_k is not None:
            if dropout_p:
                raise RuntimeError(f"dropout_p={dropout_p} with block_table or seqused_k: served without dropout")
            lengths = _caches.lengths_of(cu_seqlens_k) if seqused_k is None else seqused_k
            where = {"block_table": block_table, "cache_leftpad": leftpad_k}
            if block_table is None:
                k, v, where = _caches.packed_keys(k, v, cu_seqlens_k, max_seqlen_k)
            out, lse = _caches.attend_packed(q, k, v, cu_seqlens_q, max_seqlen_q, lengths, where, options)
            return out, lse, q.new_empty(0), _rng_state({})
        options |= draw_dropout(dropout_p, q.device)
        varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *_attend(q, k, v, varlen, options, True, return_softmax), _rng_state(options)


@refusing
def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Writes those of dq, dk and dv that are not None; returns the sums of dout * out over the head dim, laid out like
    softmax_lse."""
    return _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *(None,) * 4, dropout_p=dropout_p, softmax_scale=softmax_scale,
        causal=causal, window_size_left=window_size_left, window_size_right=window_size_right, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, rng_state=rng_state,
    )  # fmt: skip


@refusing
def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """_flash_attn_backward of packed sequences. zero_tensors: also set rows of no sequence to zero."""
    options = score_options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= {"deterministic": deterministic, **_drawn(dropout_p, rng_state)}
    for gradient in (dq, dk, dv):
        if zero_tensors and gradient is not None:
            gradient.zero_()
    dout, q, k, v, out = dense_rows(dout, q, k, v, out)
    with torch.no_grad():
        backward(
            dout, q, k, v, out, softmax_lse.contiguous(), dq=dq, dk=dk, dv=dv, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options,
        )  # fmt: skip
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
