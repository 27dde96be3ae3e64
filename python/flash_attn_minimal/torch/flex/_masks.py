"""Reads a mask_mod, or the condition of a torch.where in a score_mod: windows, documents, prefixes, padding, masks, and
others that are measured later (_measured.py)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import BadArgument
from ._found import ARGUMENTS, Call, Found, refuse
from ._linear import FLIPPED, INVERTED, Linear, bounds_of, difference_of, linear_of, number_of
from ._live import Step
from ._terms import Term, flat, reads, same


def read_mask(mask: Any, found: Found, call: Call) -> None:
    for x in flat(mask, "and", "logical_and"):
        read_condition(x, found, call)


def read_condition(x: Any, found: Found, call: Call) -> None:
    if "score" in reads(x):
        refuse(x, "a mask that depends on the score")
    if not isinstance(x, Term) or not x.reads & {"q_idx"}:
        values = call.values(x)
        if values.dtype != torch.bool:
            refuse(x, f"a mask of {values.dtype}: expected bool")
        if values.numel() > 1 or not values.item():
            found.masks.append(call.steps(x))
        else:
            found.fix(x)
        return
    if x.operation in ("not", "logical_not"):
        (inner,) = x.arguments
        if isinstance(inner, Term) and inner.operation in INVERTED:
            x = Term(INVERTED[inner.operation], inner.arguments)
    if x.operation in FLIPPED:
        documents = len(found.same)
        if _read_comparison(x.operation, *x.arguments, found):
            found.fix(x)
            found.conditions += [x] * (len(found.same) - documents)
            return
    if x.operation in ("or", "logical_or") and _read_prefix(x, found, call):
        found.fix(x)
        found.conditions.append(x)
        return
    if x.operation == "index" and (stored := in_memory(x, call)) is not None and x.arguments[0].dtype == torch.bool:
        found.masks.append(stored)
        return
    found.fix(x)
    found.rest.append(x)


def _read_comparison(operation: str, a: Any, b: Any, found: Found) -> bool:
    """Whether a comparison is a window or an equality of documents, which is then added to `found`."""
    difference = difference_of(a, b)
    if difference is not None and (bounds := bounds_of(operation, difference)) is not None:
        found.bound(*bounds)
        return True
    for x, other, way in ((a, b, operation), (b, a, FLIPPED[operation])):
        n = number_of(other)
        whole = n is not None and float(n).is_integer()
        if isinstance(x, Term) and x.operation == "abs" and whole and way in ("lt", "le"):
            inner = linear_of(x.arguments[0])
            pair = inner and [bounds_of(way, inner.plus(Linear(number=-int(n))))]
            pair = pair and [*pair, bounds_of(FLIPPED[way], inner.plus(Linear(number=int(n))))]
            if pair and None not in pair:
                found.bound(*pair[0])
                found.bound(*pair[1])
                return True
    if operation == "eq":
        for x, other in ((a, b), (b, a)):
            if reads(x) <= {"b", "q_idx"} and "q_idx" in reads(x) and same(x, other, {"q_idx": "kv_idx"}):
                found.same.append(x)
                return True
    return False


def _read_prefix(x: Term, found: Found, call: Call) -> bool:
    """Whether a condition is (kv_idx <= q_idx) | (kv_idx < length), which is then added to `found`."""
    parts = [p for p in flat(x, "or", "logical_or") if reads(p) or call.values(p).any()]
    window, lengths = Found(), []
    for part in parts:
        if not isinstance(part, Term) or part.operation not in FLIPPED:
            return False
        if "q_idx" in part.reads:
            if window.high is not None or not _read_comparison(part.operation, *part.arguments, window) or window.same:
                return False
            continue
        x, operation = difference_of(*part.arguments), part.operation
        if x is not None and x.keys == -1:
            x, operation = x.times(-1), FLIPPED[operation]
        if x is None or x.keys != 1 or operation not in ("lt", "le"):
            return False
        if any(not reads(term) <= {"b"} for _, term in x.others):
            return False
        length = torch.tensor(-x.number + (operation == "le"), device=call.device).view(1, 1, 1, 1)
        for sign, term in x.others:
            values = call.values(term)
            if values.is_floating_point() or values.dtype == torch.bool:
                return False
            length = length - sign * values.long()
        lengths.append(length)
    if (window.low, window.high) != (None, 0) or not lengths:
        return False
    found.prefixes.append(torch.stack(torch.broadcast_tensors(*lengths)).amax(0))
    return True


def in_memory(x: Term, call: Call) -> Step | None:
    """tensor[b, h, q_idx, kv_idx], or with fewer of these indices, in any order: the step of a view on axes (batch,
    heads, rows, keys). None if x is another index."""
    tensor, *places = x.arguments
    names = [p.operation if isinstance(p, Term) and not p.arguments else None for p in places]
    if len(names) != tensor.dim() or len(set(names)) != len(names) or not set(names) <= set(ARGUMENTS):
        return None
    if tensor.device != call.device:
        raise BadArgument(f"{x}: the tensor is on {tensor.device}, but the call on {call.device}")
    for axis, name in enumerate(names):
        size = call[ARGUMENTS.index(name)]
        if tensor.shape[axis] < size:
            raise BadArgument(f"{x}: the tensor has {tensor.shape[axis]} places for {name}, the call {size}")
    order = tuple(names.index(name) for name in ARGUMENTS if name in names)
    sizes = tuple(size if name in names else None for name, size in zip(ARGUMENTS, call[:4], strict=True))
    return Step(_view, (tensor, order, sizes))


def _view(tensor: torch.Tensor, order: tuple[int, ...], sizes: tuple[int | None, ...]) -> torch.Tensor:
    """A view on the axes of ARGUMENTS. order: the axes of the tensor in that order; sizes: of these axes, None for an
    axis that the tensor does not have. Few operations, because every call makes them."""
    if order != tuple(sorted(order)):
        tensor = tensor.permute(order)
    for axis, size in enumerate(sizes):
        if size is None:
            tensor = tensor.unsqueeze(axis)
        elif tensor.shape[axis] != size:
            tensor = tensor.narrow(axis, 0, size)
    return tensor
