"""Operations on packed rows, which hold one sequence after the other, to prepare them for the core. Nothing here reads
a tensor's contents on the host, so nothing waits for a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..._arrays import torch_modes


def readable(x: torch.Tensor) -> bool:
    """Whether the host may read the contents of x: on a CPU, outside of traces and transforms."""
    return x.device.type == "cpu" and not torch_modes.active()


def check_packed(name: str, cu_seqlens: Any, total: int, longest: int | None = None, longest_name: str = "") -> None:
    """Raises unless cu_seqlens is (batch + 1,), begins with 0 and does not decrease, ends at `total` at most, and has
    no sequence of more than `longest` rows. Its contents are read only where the host may read them."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or not cu_seqlens.numel():
        what = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise RuntimeError(f"{name} is {what}: expected a tensor (batch + 1,)")
    if not readable(cu_seqlens):
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise RuntimeError(f"{name}[0]={starts[0]} is not 0")
    for b, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        if last < first:
            raise RuntimeError(f"{name}[{b + 1}]={last} is below {name}[{b}]={first}: it must not decrease")
        if longest is not None and last - first > longest:
            raise RuntimeError(f"{name}: sequence {b} has {last - first} rows, more than {longest_name}={longest}")
    if starts[-1] > total:
        raise RuntimeError(f"{name}[{len(starts) - 1}]={starts[-1]} is above the {total} rows there are")


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
        if not x.shape[0] * x.shape[1]:
            return x.new_full((self.inside.shape[0], *x.shape[2:]), fill)
        rows = x[self.owner, self.place]
        return torch.where(self.inside.view(-1, *[1] * (rows.ndim - 1)), rows, fill)


class Used:
    """Packed sequences of which only the first `used` (batch,) rows count, moved together: row j of sequence b moves
    from row cu_seqlens[b] + j to row self.cu_seqlens[b] + j. The number of rows stays the same. side: "q" or "k"."""

    def __init__(self, cu_seqlens: torch.Tensor, used: torch.Tensor, total: int, side: str):
        check_packed(f"cu_seqlens_{side}", cu_seqlens, total)
        if not isinstance(used, torch.Tensor) or used.shape != (cu_seqlens.shape[0] - 1,):
            what = tuple(used.shape) if isinstance(used, torch.Tensor) else type(used).__name__
            raise RuntimeError(f"seqused_{side} is {what}: expected a tensor ({cu_seqlens.shape[0] - 1},)")
        rows = cu_seqlens.diff()
        if readable(used):
            for b in ((used < 0) | (used > rows)).nonzero().flatten().tolist():
                raise RuntimeError(f"seqused_{side}[{b}]={int(used[b])} is outside 0 .. {int(rows[b])}, the rows of it")
        used = used.clamp_min(0).minimum(rows.clamp_min(0))
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
