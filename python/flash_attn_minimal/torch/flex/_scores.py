"""Reads a score_mod: first scale and softcap, then the added terms (ALiBi, a bias) and the hidden scores."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ._found import Call, Found, refuse
from ._linear import PAIR, difference_of, linear_of, number_of
from ._live import Step
from ._masks import in_memory, read_condition, read_mask
from ._terms import Term, flat, reads


def read_score(x: Any, found: Found, call: Call) -> None:
    """Reads a score from its outermost operation inwards. In the score, scale and softcap come first, then what is
    added. A hidden score stays hidden, whatever is added to it."""
    while isinstance(x, Term) and x.arguments:
        if x.options:
            refuse(x, f"{x.operation} with {', '.join(x.options)} is not known here")
        inner = [a for a in x.arguments if "score" in reads(a)]
        if len(inner) != 1:
            refuse(x, "not a function of one score that recognise knows")
        if x.operation == "where":
            x = _read_where(x, found, call)
        elif x.operation in ("float", "double"):
            (x,) = inner
        elif x.operation in ("add", "sub"):
            a, b = x.arguments
            if inner[0] is a:
                _read_added(b, 1 if x.operation == "add" else -1, found, call)
            elif x.operation == "add":
                _read_added(a, 1, found, call)
            else:
                refuse(x, "a score that is subtracted")
            (x,) = inner
        else:
            found.factor, found.softcap = _scaled(x)
            found.fix(x, scales=True)
            return
    if not isinstance(x, Term) or x.operation != "score":
        refuse(x, "a score that does not depend on the score")


def _read_where(x: Term, found: Found, call: Call) -> Any:
    condition, yes, no = x.arguments
    if "score" in reads(condition):
        refuse(x, "a mask that depends on the score")
    kept, hidden = (yes, no) if "score" in reads(yes) else (no, yes)
    if number_of(hidden) != -torch.inf:
        refuse(x, f"hides scores with {hidden}: expected -inf")
    if kept is yes:
        read_mask(condition, found, call)
    else:
        for operand in flat(condition, "or", "logical_or"):  # not (a or b) is not a and not b
            read_condition(Term("not", (operand,)), found, call)
    return kept


def _scaled(x: Any) -> tuple[float, float]:
    """(factor, softcap) of a * tanh(b * score), or (factor, 0) of a * score."""
    outer, inside, softcap = 1.0, None, 0.0
    whole = x
    while isinstance(x, Term) and x.arguments:
        (inner,) = [a for a in x.arguments if "score" in reads(a)] or [None]
        others = [number_of(a) for a in x.arguments if a is not inner]
        if x.options or None in others:
            refuse(x, "not a scale, softcap, ALiBi or bias that recognise knows")
        if x.operation == "mul":
            outer *= others[0]
        elif x.operation == "truediv" and inner is x.arguments[0] and others[0]:
            outer /= others[0]
        elif x.operation == "neg":
            outer = -outer
        elif x.operation == "tanh" and inside is None:
            inside, outer = outer, 1.0
        elif x.operation not in ("float", "double"):
            refuse(x, "not a scale, softcap, ALiBi or bias that recognise knows")
        x = inner
    if inside is None:
        factor = outer
    else:  # softcap * tanh(factor * score / softcap)
        factor, softcap = inside * outer, inside
        if softcap <= 0:
            refuse(whole, f"a softcap of {softcap}: expected one above 0")
    if not (math.isfinite(factor) and math.isfinite(softcap)):
        refuse(whole, f"a factor of {factor} and a softcap of {softcap}")
    return factor, softcap


def _read_added(x: Any, sign: int, found: Found, call: Call) -> None:
    """Reads a term that is added to a score (sign=1) or subtracted from it (sign=-1)."""
    if isinstance(x, Term) and x.operation in ("add", "sub") and not x.options:
        difference = difference_of(*x.arguments) if x.operation == "sub" else None
        if difference is None or not difference.rows:
            a, b = x.arguments
            _read_added(a, sign, found, call)
            _read_added(b, sign if x.operation == "add" else -sign, found, call)
            return
    if not reads(x) & {"q_idx"}:
        values = call.steps(x)
        if not call.values(x).is_floating_point():
            values = Step(torch.Tensor.float, (values,))
        found.biases.append(values if sign > 0 else Step(operator.neg, (values,)))
    elif x.operation == "index" and x.arguments[0].is_floating_point() and (stored := in_memory(x, call)) is not None:
        found.biases.append(stored if sign > 0 else Step(operator.neg, (stored,)))
    elif not _read_alibi(x, sign, found, call):
        refuse(
            x, "not ALiBi, a bias in memory or one of b, h and kv_idx alone, which can be added to a score; "
            "flex_attention of PyTorch serves it"
        )  # fmt: skip


def _factors(x: Any) -> tuple[int, list[Any], list[Any]] | None:
    """x as (sign, factors of the numerator, factors of the denominator)."""
    if isinstance(x, Term) and not x.options and x.reads & PAIR:
        if x.operation == "neg":
            inner = _factors(x.arguments[0])
            return inner and (-inner[0], inner[1], inner[2])
        if x.operation in ("mul", "truediv"):
            one, other = map(_factors, x.arguments)
            if x.operation == "truediv":
                other = (other[0], other[2], other[1])
            return one[0] * other[0], one[1] + other[1], one[2] + other[2]
        if x.operation in ("float", "double"):
            return _factors(x.arguments[0])
    return 1, [x], []


def _read_alibi(x: Term, sign: int, found: Found, call: Call) -> bool:
    """Whether x is a slope, of b and h, times the distance of q_idx and kv_idx. The library subtracts such a
    product."""
    turned, above, below = _factors(x)
    distances = [a for a in above if reads(a) & PAIR]
    if len(distances) != 1 or any(reads(a) & PAIR for a in below) or found.slopes is not None:
        return False
    distance = distances[0]
    absolute = distance.operation == "abs"
    linear = linear_of(distance.arguments[0] if absolute else distance)
    if linear is None or linear.others or (linear.rows, linear.keys) not in ((1, -1), (-1, 1)):
        return False
    slopes: Any = torch.tensor(float(-sign * turned), device=call.device)
    for a in above:
        slopes = slopes if a is distance else Step(operator.mul, (slopes, call.steps(a)))
    for a in below:
        slopes = Step(operator.truediv, (slopes, call.steps(a)))
    found.slopes = Step(_per_head, (slopes, call.heads))
    found.fix(distance, scales=True)
    found.distance = (0 if absolute else linear.keys, linear.number * linear.keys)
    found.alibi = str(x)
    return True


def _per_head(slopes: torch.Tensor, heads: int) -> torch.Tensor:
    """Slopes on axes (batch, heads, 1, 1), or a single one, as (heads,) or (batch, heads)."""
    slopes = slopes.float().expand(*slopes.shape[-4:-3] or (1,), heads, 1, 1)[..., 0, 0]
    return (slopes[0] if slopes.shape[0] == 1 else slopes).contiguous()
