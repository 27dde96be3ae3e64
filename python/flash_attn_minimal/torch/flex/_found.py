"""The recognised meaning of a score_mod and mask_mod."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import Unsupported
from ._live import Derived, Fixed, Step, fix, tensors_of
from ._terms import Term, evaluate, reads, steps_of

ARGUMENTS = ("b", "h", "q_idx", "kv_idx")


def refuse(x: Any, why: str) -> None:
    raise Unsupported(f"{x}: {why}")


class Call(NamedTuple):
    batch: int
    heads: int
    rows: int
    keys: int
    device: torch.device

    def places(self, names: frozenset[str] = frozenset(ARGUMENTS)) -> dict[str, torch.Tensor]:
        """The values of these symbols, on axes (batch, heads, rows, keys)."""
        sizes = dict(zip(ARGUMENTS, self[:4], strict=True))
        return {
            name: torch.arange(sizes[name], device=self.device).view([-1 if name == x else 1 for x in ARGUMENTS])
            for name in names
        }

    def values(self, x: Any) -> torch.Tensor:
        """A term's values, on axes (batch, heads, rows, keys); axes that it does not read have length 1."""
        return _on_axes(evaluate(x, self.places(reads(x))), self.device)

    def steps(self, x: Any) -> Step:
        """The steps that compute `values` again at every call."""
        return Step(_on_axes, (steps_of(x, self.places(reads(x))), self.device))


def _on_axes(x: Any, device: torch.device) -> torch.Tensor:
    found = x if isinstance(x, torch.Tensor) and x.device == device else torch.as_tensor(x, device=device)
    return found.view(1, 1, 1, 1) if found.dim() == 0 else found


class Found:
    """The meaning of the functions, before it is decided which options express it."""

    def __init__(self) -> None:
        self.low: int | None = None  # the least kv_idx - q_idx
        self.high: int | None = None  # the greatest
        self.same: list[Term] = []  # terms of q_idx whose values must be equal for kv_idx
        self.prefixes: list[Any] = []  # lengths
        self.conditions: list[Term] = []  # of documents and prefixes, as they were written
        self.rest: list[Term] = []  # all others of q_idx, which are measured
        self.blocks: torch.Tensor | None = None  # of a BlockMask that hides more than its function
        self.masks: list[Step] = []
        self.factor, self.softcap = 1.0, 0.0
        self.slopes: Step | None = None
        self.distance: tuple[int, int] | None = None  # (sign, n): sign * |...| is kv_idx - q_idx + n; sign 0: abs of it
        self.alibi = ""  # the text of the ALiBi term, for messages
        self.biases: list[Step] = []
        self.fixed: list[Fixed] = []  # tensors whose values decide which kind of call is made
        self.derived: list[Derived] = []

    def fix(self, x: Any, scales: bool = False) -> None:
        """Makes the values of captured tensors in this term part of the form. scales: they would have a gradient."""
        self.fixed += fix(tensors_of(x), str(x) if isinstance(x, Term) else "a captured tensor", scales)

    def bound(self, low: int | None, high: int | None) -> None:
        if low is not None:
            self.low = low if self.low is None else max(self.low, low)
        if high is not None:
            self.high = high if self.high is None else min(self.high, high)
