"""The rotary embedding (Su et al., RoFormer, 2021) in PyTorch's own operations."""

from __future__ import annotations

import torch

from .... import _modes
from .._packed import inside, owners


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (..., nheads, headdim) with each row rotated by the angles of its position, in float32 and rounded once.

    positions (...): those outside the tables are refused on a CPU. On a GPU, and in traces and transforms, positions
    are not read; such rows are rotated by the nearest row of the tables. counts (...) bool: rows that do not count may
    have any position."""
    if positions.device.type == "cpu" and not _modes.active():  # a trace or a transform has no values to read
        seen = positions if counts is None else positions[counts]
        if seen.numel() and not 0 <= (worst := int(seen.min() if seen.min() < 0 else seen.max())) < cos.shape[0]:
            raise RuntimeError(f"cos has {cos.shape[0]} rows, but a row of x stands at position {worst}")
    positions = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = cos[positions].float().unsqueeze(-2), sin[positions].float().unsqueeze(-2)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, a * s + b * c
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x with the first 2 * cos.shape[1] dims of each row rotated by the angles of its position.

    Arguments:
        x: (batch, seqlen, nheads, headdim), or with cu_seqlens (total, nheads, headdim).
        cos, sin: (positions, rotary_dim / 2).
        interleaved: the pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        inplace: change x itself, and return it.
        seqlen_offsets: the position of each sequence's first row: an integer, or (batch,).
        cu_seqlens: (batch + 1,) int32; max_seqlen is not needed here.
    """
    counts = None
    if cu_seqlens is None:
        offsets = seqlen_offsets.unsqueeze(-1) if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
        positions = (torch.arange(x.shape[1], device=x.device) + offsets).expand(x.shape[:2])
    else:
        owner, positions = owners(cu_seqlens, x.shape[0])
        offset = seqlen_offsets[owner] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
        positions, counts = positions + offset, inside(cu_seqlens, x.shape[0])
    turned = rotate(x, cos, sin, positions, interleaved, counts)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb
