"""Functions for flex_attention that the kernels support, by name. They are plain functions, which PyTorch's own
flex_attention takes too. Join masks with PyTorch's and_masks, and scores with `chain`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def causal(b, h, q_idx, kv_idx):
    """A mask_mod: each row sees the keys up to its own."""
    return kv_idx <= q_idx


def sliding_window(left: int, right: int = 0) -> Callable:
    """A mask_mod: row i sees keys i - left .. i + right."""

    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return sliding_window


def documents(ids: torch.Tensor) -> Callable:
    """A mask_mod: rows see the keys of their own document. ids: (seqlen,) or (batch, seqlen), equal inside a document.
    Each document is one run of rows, with an id of its own."""

    def documents(b, h, q_idx, kv_idx):
        if ids.dim() == 1:
            return ids[q_idx] == ids[kv_idx]
        return ids[b, q_idx] == ids[b, kv_idx]

    return documents


def prefix_lm(length: int | torch.Tensor) -> Callable:
    """A mask_mod: causal, except that every row sees the first `length` keys. length: a number, or (batch,)
    integers."""

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | (kv_idx < (length[b] if isinstance(length, torch.Tensor) else length))

    return prefix_lm


def padding(lengths: torch.Tensor) -> Callable:
    """A mask_mod: keys from lengths[b] on are hidden. lengths: (batch,) integers."""

    def padding(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    return padding


def softcap(cap: float) -> Callable:
    """A score_mod: cap * tanh(score / cap)."""

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap


def alibi(slopes: torch.Tensor) -> Callable:
    """A score_mod: subtracts slope times distance. slopes: (heads,) or (batch, heads)."""

    def alibi(score, b, h, q_idx, kv_idx):
        slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
        return score - slope * (q_idx - kv_idx).abs()

    return alibi


def bias(tensor: torch.Tensor) -> Callable:
    """A score_mod: adds `tensor`, (batch, heads, seqlen_q, seqlen_k), or without the first axes."""

    def bias(score, b, h, q_idx, kv_idx):
        place = (b, h, q_idx, kv_idx)[4 - tensor.dim() :]
        return score + tensor[place]

    return bias


def chain(*score_mods: Callable) -> Callable:
    """A score_mod that applies the given ones one after the other."""

    def chain(score, b, h, q_idx, kv_idx):
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return chain
