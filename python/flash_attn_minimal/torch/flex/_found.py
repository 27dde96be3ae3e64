"""The recognised meaning of a score_mod and mask_mod, and the Form that computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...errors import Unsupported
from ._form import Form, documents, prefix
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


def form_of(found: Found, call: Call) -> Form:
    """The Form for a call. Raises Unsupported if no options express the functions."""
    rows, keys = call.rows, call.keys
    form = Form(call.batch, call.heads, rows, keys, factor=found.factor, softcap=found.softcap)
    if found.same or found.prefixes:
        form = _packed(form, found, call)
    slopes = None
    ends = [0] if rows == keys else [0, keys - rows]  # the key that row 0 is aligned with
    if found.slopes is not None:
        slopes = found.slopes
        sign, place = found.distance
        # kv_idx - q_idx + place is the distance, or its negative, for a row that is aligned with key q_idx - place.
        ends = [end for end in ends if end == -place]
        if not ends:
            refuse(
                found.alibi, f"distances from q_idx + {-place}: rows stand at q_idx, or at q_idx + seqlen_k - seqlen_q"
            )
        if sign:
            below = found.high is not None and found.high <= -place
            above = found.low is not None and found.low >= -place
            if not below and not above:
                refuse(found.alibi, "a signed distance needs a causal mask, or abs() of it")
            slopes = Step(operator.mul, (slopes, -sign if below else sign))
    for end in ends:
        left = -1 if found.low is None else end - found.low
        right = -1 if found.high is None else found.high - end
        if (found.low is None or left >= 0) and (found.high is None or right >= 0):
            break
    else:
        refuse(
            f"kv_idx - q_idx in {found.low} .. {found.high}",
            "a window must hold the key that its row stands at, q_idx or q_idx + seqlen_k - seqlen_q",
        )
    return replace(
        form, window=(left, right), from_end=end != 0, alibi_slopes=slopes,
        bias=_joined(found.biases, operator.add, call), mask=_joined(found.masks, operator.and_, call),
        fixed=tuple(found.fixed), derived=tuple(found.derived),
    )  # fmt: skip


def _joined(parts: list[Step], join: Callable, call: Call) -> Step | None:
    if not parts:
        return None
    whole = parts[0]
    for other in parts[1:]:
        whole = Step(join, (whole, other))
    return Step(_with_keys, (whole, call.keys))


def _with_keys(x: torch.Tensor, keys: int) -> torch.Tensor:
    if x.shape[3] != keys:
        x = x.expand(*x.shape[:3], keys)
    return x if x.stride(-1) == 1 or keys <= 1 else x.contiguous()


def _packed(form: Form, found: Found, call: Call) -> Form:
    """The form for documents or a prefix."""
    what = "documents" if found.same else "a prefix"
    if call.rows != call.keys:
        raise Unsupported(f"{what} with seqlen_q={call.rows} and seqlen_k={call.keys}: they must be the same")
    if found.masks or found.biases:
        raise Unsupported(f"{what} beside {'padding or a mask' if found.masks else 'a bias'} in memory are not served")
    if found.same:
        if found.prefixes:
            raise Unsupported("documents beside a prefix are not served")
        for x in found.same:
            found.fix(x)
        ids = [call.values(x)[:, 0, :, 0].expand(call.batch, -1) for x in found.same]
        if any((x != x).any() for x in ids):
            refuse(found.same[0], "a document that is NaN, which is not equal to itself")
        runs = documents(torch.stack([x.unique(return_inverse=True)[1] for x in ids]))
        if runs is None:
            refuse(found.same[0], "a document that is not in one piece")
        return replace(form, documents=runs)
    if len(found.prefixes) > 1 or (found.low, found.high) != (None, None):
        raise Unsupported("a prefix beside another prefix or a window is not served")
    lengths = found.prefixes[0].view(-1).expand(call.batch)
    return replace(form, prefix=prefix(lengths, call.rows))
