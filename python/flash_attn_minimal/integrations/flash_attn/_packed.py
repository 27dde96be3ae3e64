"""Operations on packed rows, which hold one sequence after the other, to prepare them for the core. Nothing here reads
a tensor's contents on the host, so nothing waits for a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def owners(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(total,) the sequence of each packed row, and (total,) the row's number in it. Rows after the last sequence count
    as further rows of that sequence."""
    rows = torch.arange(total, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp_max(cu_seqlens.shape[0] - 2)
    return owner, rows - cu_seqlens[owner]


def inside(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """(total,) whether a packed row belongs to a sequence."""
    return torch.arange(total, device=cu_seqlens.device) < cu_seqlens[-1]


class Tails:
    """Packed rows as a dense batch (batch, longest, ...), with each sequence at the end of its entry. A call that
    aligns the last row with the last key then aligns every sequence that way. Rows before a sequence hold rows of
    others."""

    def __init__(self, cu_seqlens: torch.Tensor, longest: int, total: int):
        columns = torch.arange(longest, device=cu_seqlens.device)
        self.from_packed = (cu_seqlens[1:, None] - longest + columns).clamp(0, max(total - 1, 0))
        self.owner, number = owners(cu_seqlens, total)
        self.place = (longest - cu_seqlens.diff()[self.owner] + number).clamp(0, max(longest - 1, 0))
        self.inside = inside(cu_seqlens, total)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.from_packed] if x.shape[0] else x.new_zeros(*self.from_packed.shape, *x.shape[1:])

    def pack(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """(batch, longest, ...) as (total, ...); rows of no sequence are `fill`."""
        rows = x[self.owner, self.place]
        return torch.where(self.inside.view(-1, *[1] * (rows.ndim - 1)), rows, fill)


class Used:
    """Packed sequences of which only the first `used` (batch,) rows count, moved together: row j of sequence b moves
    from row cu_seqlens[b] + j to row self.cu_seqlens[b] + j. The number of rows stays the same."""

    def __init__(self, cu_seqlens: torch.Tensor, used: torch.Tensor, total: int):
        self.cu_seqlens = F.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        owner, number = owners(self.cu_seqlens, total)
        self.source = (cu_seqlens[owner] + number).clamp(0, max(total - 1, 0))
        owner, number = owners(cu_seqlens, total)
        self.counts = number < used[owner]
        self.back = (self.cu_seqlens[owner] + number).clamp(0, max(total - 1, 0))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self.source)

    def scatter(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """The inverse of gather; rows that do not count are `fill`."""
        return torch.where(self.counts.view(-1, *[1] * (x.ndim - 1)), x.index_select(0, self.back), fill)
