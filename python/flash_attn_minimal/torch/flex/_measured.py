"""Masks that are known by their values: intervals of hidden rows for each key (startend_row_indices), or whole blocks
(block_mask). A mask that is no window, documents or prefix is evaluated at every place, as create_block_mask does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ._found import Call, Found, refuse
from ._terms import evaluate, reads

_PLACES = 1 << 22  # evaluated at once
_BLOCK = 64
_UNKNOWN = (
    "not a window, documents, a prefix, padding or a mask in memory, which recognise knows; it hides more than two "
    "intervals of rows from some key, and its values are not those of whole blocks of 64; flex_attention of PyTorch "
    "serves it"
)


def measured(found: Found, call: Call, end: int, window: tuple[int, int] | None) -> dict[str, Any]:
    """The fields of a Form for all conditions and windows that were found. end: the key that row 0 is aligned with;
    window: the window as options of a call, or None where options cannot say it."""
    conditions = [*found.rest, *found.conditions]
    names = frozenset().union(*(reads(x) for x in conditions)) if conditions else frozenset()
    lead = call.batch if "b" in names else 1, call.heads if "h" in names else 1
    full, causal = _Runs(lead, call), _Runs(lead, call)
    blocks = []
    for first, seen, inside in _values(conditions, names, lead, found, call):
        hidden = ~(seen & inside)
        full.add(first, hidden)
        rows = torch.arange(first, first + hidden.shape[2], device=call.device)[:, None]
        causal.add(first, hidden & (torch.arange(call.keys, device=call.device) <= rows + end))
        blocks.append([_of_blocks(seen), _of_blocks(~seen)])
    if found.high == end and (numbers := causal.within_one()) is not None:
        return {"row_indices": numbers, "window": (-1, 0)}
    if (numbers := full.within_two()) is not None:
        return {"row_indices": numbers, "window": (-1, -1)}
    some, some_hidden = (torch.cat(x, 2) for x in zip(*blocks, strict=True))
    if window is None or found.blocks is not None or (some & some_hidden).any():
        refuse(conditions[0], _UNKNOWN)
    return {"blocks": some, "window": window}


def _values(conditions, names, lead, found: Found, call: Call) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Rows of the mask: the first row, what the conditions show (batch or 1, heads or 1, rows, keys), and what the
    window shows (rows, keys)."""
    step = max(_PLACES // max(lead[0] * lead[1] * call.keys, 1) // _BLOCK, 1) * _BLOCK
    places = call.places(names)
    keys = torch.arange(call.keys, device=call.device)
    for first in range(0, call.rows, step):
        rows = torch.arange(first, min(first + step, call.rows), device=call.device)[:, None]
        here = places | ({"q_idx": rows[None, None]} if "q_idx" in names else {})
        seen = torch.ones(*lead, len(rows), call.keys, dtype=torch.bool, device=call.device)
        for x in conditions:
            values = torch.as_tensor(evaluate(x, here), device=call.device)
            if values.dtype != torch.bool:
                refuse(x, f"a mask of {values.dtype}: expected bool")
            seen = seen & values
        inside = torch.ones_like(seen[0, 0])
        if found.low is not None:
            inside = inside & (keys - rows >= found.low)
        if found.high is not None:
            inside = inside & (keys - rows <= found.high)
        yield first, seen, inside


def _of_blocks(seen: torch.Tensor) -> torch.Tensor:
    """Whether a block has a place that is True."""
    *_, rows, keys = seen.shape
    x = F.pad(seen, (0, -keys % _BLOCK, 0, -rows % _BLOCK), value=False)
    return x.unflatten(3, (-1, _BLOCK)).any(4).unflatten(2, (-1, _BLOCK)).any(3)


class _Runs:
    """The first two runs of hidden rows of each key, while rows are added."""

    def __init__(self, lead: tuple[int, int], call: Call):
        self.rows = call.rows
        self.begin, self.end = torch.zeros(2, 2, *lead, call.keys, dtype=torch.int64, device=call.device)
        self.count = torch.zeros_like(self.begin[0], dtype=torch.int32)
        self.last = torch.zeros_like(self.begin[0], dtype=torch.bool)

    def add(self, first: int, hidden: torch.Tensor) -> None:
        before = torch.cat([self.last[:, :, None], hidden[:, :, :-1]], 2)
        starts, stops = hidden & ~before, before & ~hidden
        number = self.count[:, :, None] + starts.cumsum(2, dtype=torch.int32)
        rows = torch.arange(first, first + hidden.shape[2], device=hidden.device)[:, None]
        for x in (0, 1):
            self.begin[x] += (rows * (starts & (number == x + 1))).sum(2)
            self.end[x] += (rows * (stops & (number == x + 1))).sum(2)
        self.count, self.last = number[:, :, -1], hidden[:, :, -1]

    def _runs(self, most: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """(begin, end) of the runs, (0, 0) where a key has fewer. None if a key has more."""
        if self.count.numel() and int(self.count.max()) > most:
            return None
        return [
            (self.begin[x], torch.where(self.last & (self.count == x + 1), self.rows, self.end[x]))
            for x in range(most)
        ]  # fmt: skip

    def within_one(self) -> torch.Tensor | None:
        """1 or 2 numbers for each key, beside causal."""
        if (runs := self._runs(1)) is None:
            return None
        ((begin, end),) = runs
        if ((end == self.rows) | (self.count == 0)).all():
            return _numbers(torch.where(self.count == 0, self.rows, begin))
        return _numbers(begin, end)

    def within_two(self) -> torch.Tensor | None:
        """2 or 4 numbers for each key."""
        if (runs := self._runs(2)) is None:
            return None
        late, early = torch.full_like(self.begin[0], self.rows), torch.zeros_like(self.begin[0])
        outside = torch.ones_like(self.last)
        for begin, end in runs:
            first, last, any_row = begin == 0, end == self.rows, begin < end
            early = torch.where(any_row & first, end, early)
            late = torch.where(any_row & last & ~first, begin, late)
            outside = outside & (first | last)
        if outside.all():
            return _numbers(late, early)
        return _numbers(*(x for run in runs for x in run))


def _numbers(*columns: torch.Tensor) -> torch.Tensor:
    """(batch or 1, heads or 1, keys, numbers)."""
    return torch.stack(columns, -1).int()
