"""Integer expressions that are linear in q_idx and kv_idx, from which windows and distances are recognised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._arrays import torch_modes
from ...errors import Unsupported
from ._terms import Term, evaluate

PAIR = frozenset(("q_idx", "kv_idx"))
FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
INVERTED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


class Linear(NamedTuple):
    """rows * q_idx + keys * kv_idx + number + the sum of `others`, which are (factor, term without q_idx and kv_idx).
    All numbers are integers."""

    rows: int = 0
    keys: int = 0
    number: int = 0
    others: tuple[tuple[int, Any], ...] = ()

    def times(self, n: int) -> Linear:
        others = tuple((sign * n, x) for sign, x in self.others)
        return Linear(self.rows * n, self.keys * n, self.number * n, others)

    def plus(self, x: Linear) -> Linear:
        return Linear(self.rows + x.rows, self.keys + x.keys, self.number + x.number, self.others + x.others)


def number_of(x: Any) -> float | None:
    """The number that x equals everywhere, or None."""
    if isinstance(x, Term) and x.reads:
        return None
    x = evaluate(x, {})
    if isinstance(x, torch.Tensor):
        if x.dim():
            return None
        if x.requires_grad and torch_modes.records():
            raise Unsupported(f"{x.item()} requires a gradient, which only a bias gets: detach it")
        x = x.item()
    return x if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def linear_of(x: Any) -> Linear | None:
    """x as a Linear, or None."""
    number = number_of(x)
    if number is not None:
        return Linear(number=int(number)) if float(number).is_integer() else None
    if not isinstance(x, Term):
        return None
    if x.operation == "q_idx":
        return Linear(rows=1)
    if x.operation == "kv_idx":
        return Linear(keys=1)
    if not x.reads & PAIR:
        return None if "score" in x.reads else Linear(others=((1, x),))
    parts = [linear_of(a) for a in x.arguments]
    if x.options or None in parts:
        return None
    if x.operation == "neg":
        return parts[0].times(-1)
    if x.operation in ("add", "sub"):
        return parts[0].plus(parts[1].times(1 if x.operation == "add" else -1))
    if x.operation == "mul":
        for one, other in (parts, parts[::-1]):
            if one == Linear(number=one.number):
                return other.times(one.number)
    return None


def bounds_of(operation: str, x: Linear) -> tuple[int | None, int | None] | None:
    """The bounds of kv_idx - q_idx for which `x operation 0` holds, or None if the condition is not of this form."""
    if x.others or (x.rows, x.keys) not in ((1, -1), (-1, 1)):
        return None
    if x.keys < 0:
        x, operation = x.times(-1), FLIPPED[operation]
    return {
        "le": (None, -x.number),
        "lt": (None, -x.number - 1),
        "ge": (-x.number, None),
        "gt": (-x.number + 1, None),
        "eq": (-x.number, -x.number),
    }[operation]


def difference_of(a: Any, b: Any) -> Linear | None:
    """a - b as a Linear, or None."""
    one, other = linear_of(a), linear_of(b)
    return None if one is None or other is None else one.plus(other.times(-1))
