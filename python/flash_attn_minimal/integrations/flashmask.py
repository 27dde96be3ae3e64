"""FlashMask's function (arXiv 2410.01359): the names and arguments of flash_mask in Paddle's flash-attention, for
PyTorch tensors on a CPU or a GPU, with gradients.

    from flash_attn_minimal.integrations.flashmask import flashmask_attention

startend_row_indices has the meaning of flash_attn_minimal.flash_attn_func. Unlike there, tensors may be float32, any
head dim is served beside block_mask, and block_mask may come without startend_row_indices.
"""

from __future__ import annotations

from typing import Any

import torch

from ..attention import flash_attn_func
from ..errors import Unsupported
from ..torch._inputs import dense_rows
from ..torch._seeded import draw_dropout

__all__ = ["flashmask_attention"]


def flashmask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Any = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: torch.Tensor | None = None,
) -> Any:
    """Attention under a mask by intervals, and by blocks.

    Arguments:
        query (batch, seqlen_q, heads, headdim); key, value (batch, seqlen_k, heads_k, .).
        startend_row_indices: int32, (batch, 1 or heads_k or heads, seqlen_k, 1 or 2 or 4), or None.
        dropout: the seed is drawn from PyTorch's generator; 0 where training is False.
        causal, window_size: a window of n is (n, n). Both apart from and beside startend_row_indices.
        return_softmax_lse: also return lse (batch, heads, seqlen_q), float32.
        block_mask: integers or bool, (batch, 1 or heads_k or heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)): a row
            sees only keys of blocks that are not 0. Blocks of 64 are served, too.
        name: ignored. return_seed_offset, fixed_seed_offset, rng_name: refused.
    """
    for option, given in (
        ("return_seed_offset", return_seed_offset), ("fixed_seed_offset", fixed_seed_offset is not None),
        ("rng_name", rng_name),
    ):  # fmt: skip
        if given:
            raise Unsupported(f"{option} is given: dropout draws its seed from PyTorch's generator here")
    window = (-1, -1) if window_size is None else window_size
    query, key, value = dense_rows(query, key, value)
    return flash_attn_func(
        query, key, value, softmax_scale=softmax_scale, causal=causal, startend_row_indices=startend_row_indices,
        window_size=(window, window) if isinstance(window, int) else window,
        block_mask=block_mask if block_mask is None or block_mask.dtype == torch.bool else block_mask != 0,
        return_lse=return_softmax_lse, **(draw_dropout(dropout, query.device) if training and dropout else {}),
    )  # fmt: skip
