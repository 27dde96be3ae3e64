"""torch.nn.attention.flex_attention for the functions that the kernels know.

The kernels have no place for code of the caller's. A score_mod or mask_mod is read as an expression (_terms.py), and
recognised by its algebra: bounds on kv_idx - q_idx are windows, equal documents are packed sequences, a slope times a
distance is ALiBi, c * tanh(score / c) is a softcap, and so on. What is not certainly one of these is refused, with the
part that was not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..._library import BadArgument, Unsupported
from ._form import Form, documents, is_finite, prefix
from ._terms import Term, evaluate, flat, reads, same, trace

_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
_PAIR = frozenset(("q_idx", "kv_idx"))


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """flex_attention of torch.nn.attention.flex_attention: its arguments, layout, meaning and gradients.

    Arguments:
        query: (batch, heads, seqlen_q, headdim); key, value: (batch, heads_k, seqlen_k, .); headdims up to 512.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score. See recognise.
        block_mask: a mask_mod(b, h, q_idx, kv_idx) -> bool; a BlockMask, whose mask_mod is taken and whose blocks are
            compared with it, which reads as many places as making it did; or what recognise returned for both
            functions, which costs nothing, and is the only one of these in compiled code.
        scale: None means headdim ** -0.5.
        enable_gqa: heads may be a multiple of heads_k.
        return_lse, return_aux: as there; of AuxRequest lse alone.
        kernel_options: taken, and not needed.

    Gradients: of query, key and value, and of a captured tensor that is added to the scores as it is.

    Raises: Unsupported (a NotImplementedError), which quotes the part of a function that no kernel knows; BadArgument.
    """
    if getattr(return_aux, "max_scores", False):
        raise Unsupported("return_aux.max_scores: the greatest score of each row is not among the results here")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or x.is_nested:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) and not x.is_nested else type(x).__name__
            raise BadArgument(f"{name} is {shape}: expected (batch, heads, seqlen, headdim)")
    if isinstance(block_mask, Form):
        if score_mod is not None:
            raise BadArgument("score_mod is given beside a Form: recognise(score_mod, mask_mod, ...) takes both")
        form = block_mask
    else:
        if torch.compiler.is_compiling() and not (score_mod is None and block_mask is None):
            raise Unsupported(
                "a score_mod or block_mask in compiled code: call recognise(score_mod, mask_mod, ...) before, "
                "and pass the Form that it returns as block_mask"
            )
        sizes = *query.shape[:3], key.shape[2]
        plain = score_mod is None and block_mask is None
        form = Form(*sizes) if plain else recognise(score_mod, block_mask, *sizes, query.device)
    found = form(query, key, value, scale, enable_gqa, bool(return_lse) or return_aux is not None)
    if return_aux is None:
        return found
    from torch.nn.attention.flex_attention import AuxOutput

    return found[0], AuxOutput(lse=found[1] if return_aux.lse else None, max_scores=None)


def recognise(
    score_mod: Callable | None,
    mask_mod: Any,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: Any = "cpu",
) -> Form:
    """What attention with these functions is in this library: a Form, for flex_attention's block_mask, or to be called.
    As create_block_mask, it is for many calls, and reads captured tensors, which on a GPU waits.

    Recognised are, in mask_mod and as torch.where(..., score, -inf) in score_mod, joined by &:

        kv_idx <= q_idx, q_idx - kv_idx <= n, (q_idx - kv_idx).abs() <= n, ...   causal, windows (seqlen_q and seqlen_k
                                                                                 may be captured, for bottom-right)
        ids[q_idx] == ids[kv_idx], ids[b, q_idx] == ..., q_idx // n == kv_idx // n     documents, each in one piece
        (kv_idx <= q_idx) | (kv_idx < n), | (kv_idx < lengths[b])                prefix-LM, alone
        anything of b, h and kv_idx, as kv_idx < lengths[b]                      padding
        mask[b, h, q_idx, kv_idx], with any of these                             a mask in memory

    and in score_mod, where softcap comes first:

        score * c, c * tanh(score / c)                                           scale, softcap
        score + slopes[h] * (kv_idx - q_idx), with causal, or -(...).abs()       ALiBi; slopes: anything of b and h
        score + bias[b, h, q_idx, kv_idx], with any of these                     bias; anything of b, h and kv_idx

    Documents go with windows, softcap and ALiBi, not with padding, a mask or a bias.

    Arguments:
        score_mod, mask_mod: functions as flex_attention takes them, or None; mask_mod may be a BlockMask.
        batch, heads, seqlen_q, seqlen_k: of the calls; heads are the query's.
        device: of the calls' tensors.
    """
    device = torch.device(device)
    call = _Call(batch, heads, seqlen_q, seqlen_k, device)
    found = _Found()
    if score_mod is not None:
        with _named("score_mod"):
            _read_score(_traced(score_mod, ("score", *_ARGUMENTS), device), found, call)
    if mask_mod is not None:
        blocks = mask_mod if hasattr(mask_mod, "mask_mod") else None
        with _named("mask_mod"):
            mask = _traced(mask_mod if blocks is None else blocks.mask_mod, _ARGUMENTS, device)
            if blocks is not None:
                _check_blocks(blocks, mask, call)
            _read_mask(mask, found, call)
    return _form(found, call)


@contextmanager
def _named(function: str) -> Iterator[None]:
    try:
        yield
    except Unsupported as error:
        raise Unsupported(f"{function}: {error}") from None


def _traced(function: Any, names: tuple[str, ...], device: torch.device) -> Any:
    if not callable(function):
        raise BadArgument(f"a {type(function).__name__} is given as score_mod or mask_mod: expected a function")
    found = trace(function, names, device)
    if not isinstance(found, (Term, torch.Tensor, bool, int, float)):
        raise BadArgument(f"{function} returned a {type(found).__name__}: expected a score, or a bool")
    return found


class _Call(NamedTuple):
    batch: int
    heads: int
    rows: int
    keys: int
    device: torch.device

    def places(self, names: frozenset[str] = frozenset(_ARGUMENTS)) -> dict[str, torch.Tensor]:
        """Values of these symbols, on axes (batch, heads, rows, keys)."""
        sizes = dict(zip(_ARGUMENTS, self[:4], strict=True))
        return {
            name: torch.arange(sizes[name], device=self.device).view([-1 if name == x else 1 for x in _ARGUMENTS])
            for name in names
        }

    def values(self, x: Any) -> torch.Tensor:
        """A term's values, on axes (batch, heads, rows, keys); axes that it does not read have length 1."""
        found = torch.as_tensor(evaluate(x, self.places(reads(x))), device=self.device)
        return found.view(1, 1, 1, 1) if found.dim() == 0 else found


class _Found:
    """What the functions were found to say, before it is known which options say it."""

    def __init__(self) -> None:
        self.low: int | None = None  # least kv_idx - q_idx
        self.high: int | None = None
        self.same: list[Term] = []  # of q_idx, and what must be equal for kv_idx
        self.prefixes: list[Any] = []  # lengths
        self.masks: list[torch.Tensor] = []
        self.factor, self.softcap = 1.0, 0.0
        self.slopes: torch.Tensor | None = None
        self.distance: tuple[int, int] | None = None  # (sign, n): sign * |...| is kv_idx - q_idx + n; sign 0: abs of it
        self.alibi = ""  # the text
        self.biases: list[torch.Tensor] = []

    def bound(self, low: int | None, high: int | None) -> None:
        if low is not None:
            self.low = low if self.low is None else max(self.low, low)
        if high is not None:
            self.high = high if self.high is None else min(self.high, high)


# ---- linear expressions ----


class _Linear(NamedTuple):
    """rows * q_idx + keys * kv_idx + number + the sum of others, which are (factor, term without q_idx and kv_idx); all
    numbers are integers."""

    rows: int = 0
    keys: int = 0
    number: int = 0
    others: tuple[tuple[int, Any], ...] = ()

    def times(self, n: int) -> _Linear:
        others = tuple((sign * n, x) for sign, x in self.others)
        return _Linear(self.rows * n, self.keys * n, self.number * n, others)

    def plus(self, x: _Linear) -> _Linear:
        return _Linear(self.rows + x.rows, self.keys + x.keys, self.number + x.number, self.others + x.others)


def _number(x: Any) -> float | None:
    """The number that x is everywhere, or None."""
    if isinstance(x, Term) and x.reads:
        return None
    x = evaluate(x, {})
    if isinstance(x, torch.Tensor):
        if x.dim():
            return None
        if x.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"{x.item()} requires a gradient, which only a bias gets: detach it")
        x = x.item()
    return x if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _linear(x: Any) -> _Linear | None:
    number = _number(x)
    if number is not None:
        return _Linear(number=int(number)) if float(number).is_integer() else None
    if not isinstance(x, Term):
        return None
    if x.operation == "q_idx":
        return _Linear(rows=1)
    if x.operation == "kv_idx":
        return _Linear(keys=1)
    if not x.reads & _PAIR:
        return None if "score" in x.reads else _Linear(others=((1, x),))
    parts = [_linear(a) for a in x.arguments]
    if x.options or None in parts:
        return None
    if x.operation == "neg":
        return parts[0].times(-1)
    if x.operation in ("add", "sub"):
        return parts[0].plus(parts[1].times(1 if x.operation == "add" else -1))
    if x.operation == "mul":
        for one, other in (parts, parts[::-1]):
            if one == _Linear(number=one.number):
                return other.times(one.number)
    return None


_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
_INVERTED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _bounds(operation: str, x: _Linear) -> tuple[int | None, int | None] | None:
    """Bounds of kv_idx - q_idx where `x operation 0`, or None where they are none."""
    if x.others or (x.rows, x.keys) not in ((1, -1), (-1, 1)):
        return None
    if x.keys < 0:
        x, operation = x.times(-1), _FLIPPED[operation]
    return {
        "le": (None, -x.number),
        "lt": (None, -x.number - 1),
        "ge": (-x.number, None),
        "gt": (-x.number + 1, None),
        "eq": (-x.number, -x.number),
    }[operation]


def _difference(a: Any, b: Any) -> _Linear | None:
    one, other = _linear(a), _linear(b)
    return None if one is None or other is None else one.plus(other.times(-1))


# ---- masks ----


def _refuse(x: Any, why: str) -> None:
    raise Unsupported(f"{x}: {why}")


_UNKNOWN = (
    "not a window, documents, a prefix, padding or a mask in memory, which recognise knows; "
    "flex_attention of PyTorch serves it"
)


def _read_mask(mask: Any, found: _Found, call: _Call) -> None:
    for x in flat(mask, "and", "logical_and"):
        _read_condition(x, found, call)


def _read_condition(x: Any, found: _Found, call: _Call) -> None:
    if "score" in reads(x):
        _refuse(x, "a mask that depends on the score")
    if not isinstance(x, Term) or not x.reads & {"q_idx"}:
        values = call.values(x)
        if values.dtype != torch.bool:
            _refuse(x, f"a mask of {values.dtype}: expected bool")
        if values.numel() > 1 or not values.item():
            found.masks.append(values)
        return
    if x.operation in ("not", "logical_not"):
        (inner,) = x.arguments
        if isinstance(inner, Term) and inner.operation in _INVERTED:
            x = Term(_INVERTED[inner.operation], inner.arguments)
    if x.operation in _FLIPPED and _read_comparison(x.operation, *x.arguments, found):
        return
    if x.operation in ("or", "logical_or") and _read_prefix(x, found, call):
        return
    if x.operation == "index" and (stored := _stored(x, call)) is not None and stored.dtype == torch.bool:
        found.masks.append(stored)
        return
    _refuse(x, _UNKNOWN)


def _read_comparison(operation: str, a: Any, b: Any, found: _Found) -> bool:
    """Whether a comparison is a window or equal documents."""
    difference = _difference(a, b)
    if difference is not None and (bounds := _bounds(operation, difference)) is not None:
        found.bound(*bounds)
        return True
    for x, other, way in ((a, b, operation), (b, a, _FLIPPED[operation])):
        n = _number(other)
        whole = n is not None and float(n).is_integer()
        if isinstance(x, Term) and x.operation == "abs" and whole and way in ("lt", "le"):
            inner = _linear(x.arguments[0])
            pair = inner and [_bounds(way, inner.plus(_Linear(number=-int(n))))]
            pair = pair and [*pair, _bounds(_FLIPPED[way], inner.plus(_Linear(number=int(n))))]
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


def _read_prefix(x: Term, found: _Found, call: _Call) -> bool:
    """Whether it is (kv_idx <= q_idx) | (kv_idx < length)."""
    parts = [p for p in flat(x, "or", "logical_or") if reads(p) or call.values(p).any()]
    window, lengths = _Found(), []
    for part in parts:
        if not isinstance(part, Term) or part.operation not in _FLIPPED:
            return False
        if "q_idx" in part.reads:
            if window.high is not None or not _read_comparison(part.operation, *part.arguments, window) or window.same:
                return False
            continue
        x, operation = _difference(*part.arguments), part.operation
        if x is not None and x.keys == -1:
            x, operation = x.times(-1), _FLIPPED[operation]
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


def _stored(x: Term, call: _Call) -> torch.Tensor | None:
    """tensor[b, h, q_idx, kv_idx] or with fewer of them, in any order, as a view on axes (batch, heads, rows, keys);
    None where x is another index. Places are those of the call."""
    tensor, *places = x.arguments
    names = [p.operation if isinstance(p, Term) and not p.arguments else None for p in places]
    if len(names) != tensor.dim() or len(set(names)) != len(names) or not set(names) <= set(_ARGUMENTS):
        return None
    if tensor.device != call.device:
        raise BadArgument(f"{x}: the tensor is on {tensor.device}, but the call on {call.device}")
    order = [names.index(name) for name in _ARGUMENTS if name in names]
    tensor = tensor.permute(order)
    for axis, (name, size) in enumerate(zip(_ARGUMENTS, call[:4], strict=True)):
        if name not in names:
            tensor = tensor.unsqueeze(axis)
        elif tensor.shape[axis] < size:
            raise BadArgument(f"{x}: the tensor has {tensor.shape[axis]} places for {name}, the call {size}")
        else:
            tensor = tensor.narrow(axis, 0, size)
    return tensor


# ---- scores ----


def _read_score(x: Any, found: _Found, call: _Call) -> None:
    """Reads a score from its outermost operation inwards. Scaling and softcap come first, then what is added; a hidden
    score stays hidden, whatever is added."""
    while isinstance(x, Term) and x.arguments:
        if x.options:
            _refuse(x, f"{x.operation} with {', '.join(x.options)} is not known here")
        inner = [a for a in x.arguments if "score" in reads(a)]
        if len(inner) != 1:
            _refuse(x, "not a function of one score that recognise knows")
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
                _refuse(x, "a score that is subtracted")
            (x,) = inner
        else:
            found.factor, found.softcap = _scaled(x)
            return
    if not isinstance(x, Term) or x.operation != "score":
        _refuse(x, "a score that does not depend on the score")


def _read_where(x: Term, found: _Found, call: _Call) -> Any:
    condition, yes, no = x.arguments
    if "score" in reads(condition):
        _refuse(x, "a mask that depends on the score")
    kept, hidden = (yes, no) if "score" in reads(yes) else (no, yes)
    if _number(hidden) != -torch.inf:
        _refuse(x, f"hides scores with {hidden}: expected -inf")
    if kept is yes:
        _read_mask(condition, found, call)
    else:
        for operand in flat(condition, "or", "logical_or"):  # not (a or b) is not a and not b
            _read_condition(Term("not", (operand,)), found, call)
    return kept


def _scaled(x: Any) -> tuple[float, float]:
    """(factor, softcap) of a * tanh(b * score), or (factor, 0) of a * score."""
    outer, inside, softcap = 1.0, None, 0.0
    whole = x
    while isinstance(x, Term) and x.arguments:
        (inner,) = [a for a in x.arguments if "score" in reads(a)] or [None]
        others = [_number(a) for a in x.arguments if a is not inner]
        if x.options or None in others:
            _refuse(x, "not a scale, softcap, ALiBi or bias that recognise knows")
        if x.operation == "mul":
            outer *= others[0]
        elif x.operation == "truediv" and inner is x.arguments[0] and others[0]:
            outer /= others[0]
        elif x.operation == "neg":
            outer = -outer
        elif x.operation == "tanh" and inside is None:
            inside, outer = outer, 1.0
        elif x.operation not in ("float", "double"):
            _refuse(x, "not a scale, softcap, ALiBi or bias that recognise knows")
        x = inner
    if inside is None:
        factor = outer
    else:  # softcap * tanh(factor * score / softcap)
        factor, softcap = inside * outer, inside
        if softcap <= 0:
            _refuse(whole, f"a softcap of {softcap}: expected one above 0")
    if not is_finite(factor, softcap):
        _refuse(whole, f"a factor of {factor} and a softcap of {softcap}")
    return factor, softcap


def _read_added(x: Any, sign: int, found: _Found, call: _Call) -> None:
    """What is added to a score, or subtracted."""
    if isinstance(x, Term) and x.operation in ("add", "sub") and not x.options:
        difference = _difference(*x.arguments) if x.operation == "sub" else None
        if difference is None or not difference.rows:
            a, b = x.arguments
            _read_added(a, sign, found, call)
            _read_added(b, sign if x.operation == "add" else -sign, found, call)
            return
    if not reads(x) & {"q_idx"}:
        values = call.values(x)
        if not values.is_floating_point():
            values = values.float()
        found.biases.append(values if sign > 0 else -values)
    elif x.operation == "index" and (stored := _stored(x, call)) is not None and stored.is_floating_point():
        found.biases.append(stored if sign > 0 else -stored)
    elif not _read_alibi(x, sign, found, call):
        _refuse(
            x, "not ALiBi, a bias in memory or one of b, h and kv_idx alone, which can be added to a score; "
            "flex_attention of PyTorch serves it"
        )  # fmt: skip


def _factors(x: Any) -> tuple[int, list[Any], list[Any]] | None:
    """x as a sign, factors above and factors below the line."""
    if isinstance(x, Term) and not x.options and x.reads & _PAIR:
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


def _read_alibi(x: Term, sign: int, found: _Found, call: _Call) -> bool:
    """Whether x is a slope of b and h times the distance of q_idx and kv_idx. The library subtracts such a product."""
    turned, above, below = _factors(x)
    distances = [a for a in above if reads(a) & _PAIR]
    if len(distances) != 1 or any(reads(a) & _PAIR for a in below) or found.slopes is not None:
        return False
    distance = distances[0]
    absolute = distance.operation == "abs"
    linear = _linear(distance.arguments[0] if absolute else distance)
    if linear is None or linear.others or (linear.rows, linear.keys) not in ((1, -1), (-1, 1)):
        return False
    slopes: Any = torch.tensor(float(-sign * turned), device=call.device)
    for a in above:
        slopes = slopes if a is distance else slopes * call.values(a)
    for a in below:
        slopes = slopes / call.values(a)
    slopes = slopes.float().expand(*slopes.shape[-4:-3] or (1,), call.heads, 1, 1)[..., 0, 0]
    found.slopes = (slopes[0] if slopes.shape[0] == 1 else slopes).contiguous()
    found.distance = (0 if absolute else linear.keys, linear.number * linear.keys)
    found.alibi = str(x)
    return True


# ---- from what was found to a form ----


def _form(found: _Found, call: _Call) -> Form:
    rows, keys = call.rows, call.keys
    form = Form(call.batch, call.heads, rows, keys, factor=found.factor, softcap=found.softcap)
    if found.same or found.prefixes:
        form = _packed(form, found, call)
    slopes = None
    ends = [0] if rows == keys else [0, keys - rows]  # the key that row 0 stands at
    if found.slopes is not None:
        slopes = found.slopes
        sign, place = found.distance
        # kv_idx - q_idx + place is the distance, or its negative, of a row that stands at q_idx - place.
        ends = [end for end in ends if end == -place]
        if not ends:
            _refuse(
                found.alibi, f"distances from q_idx + {-place}: rows stand at q_idx, or at q_idx + seqlen_k - seqlen_q"
            )
        if sign:
            below = found.high is not None and found.high <= -place
            above = found.low is not None and found.low >= -place
            if not below and not above:
                _refuse(found.alibi, "a signed distance needs a causal mask, or abs() of it")
            slopes = slopes * (-sign if below else sign)
    for end in ends:
        left = -1 if found.low is None else end - found.low
        right = -1 if found.high is None else found.high - end
        if (found.low is None or left >= 0) and (found.high is None or right >= 0):
            break
    else:
        _refuse(
            f"kv_idx - q_idx in {found.low} .. {found.high}",
            "a window must hold the key that its row stands at, q_idx or q_idx + seqlen_k - seqlen_q",
        )
    return replace(
        form, window=(left, right), from_end=end != 0, alibi_slopes=slopes, bias=_bias(found, call),
        mask=_mask(found, call),
    )  # fmt: skip


def _bias(found: _Found, call: _Call) -> torch.Tensor | None:
    if not found.biases:
        return None
    bias = found.biases[0]
    for other in found.biases[1:]:
        bias = bias + other
    return _with_keys(bias, call)


def _mask(found: _Found, call: _Call) -> torch.Tensor | None:
    if not found.masks:
        return None
    mask = found.masks[0]
    for other in found.masks[1:]:
        mask = mask & other
    return _with_keys(mask, call)


def _with_keys(x: torch.Tensor, call: _Call) -> torch.Tensor:
    x = x.expand(*x.shape[:3], call.keys)
    return x if x.stride(-1) == 1 or call.keys <= 1 else x.contiguous()


def _packed(form: Form, found: _Found, call: _Call) -> Form:
    """The form with documents or a prefix."""
    what = "documents" if found.same else "a prefix"
    if call.rows != call.keys:
        raise Unsupported(f"{what} with seqlen_q={call.rows} and seqlen_k={call.keys}: they must be the same")
    if found.masks or found.biases:
        raise Unsupported(f"{what} beside {'padding or a mask' if found.masks else 'a bias'} in memory are not served")
    if found.same:
        if found.prefixes:
            raise Unsupported("documents beside a prefix are not served")
        ids = [call.values(x)[:, 0, :, 0].expand(call.batch, -1) for x in found.same]
        if any((x != x).any() for x in ids):
            _refuse(found.same[0], "a document that is NaN, which is not equal to itself")
        runs = documents(torch.stack([x.unique(return_inverse=True)[1] for x in ids]))
        if runs is None:
            _refuse(found.same[0], "a document that is not in one piece")
        return replace(form, documents=runs)
    if len(found.prefixes) > 1 or (found.low, found.high) != (None, None):
        raise Unsupported("a prefix beside another prefix or a window is not served")
    lengths = found.prefixes[0].view(-1).expand(call.batch)
    return replace(form, prefix=prefix(lengths, call.rows))


def _check_blocks(blocks: Any, mask: Any, call: _Call) -> None:
    """Raises unless a BlockMask's blocks say what its mask_mod does. Blocks that it leaves out are hidden, and full
    ones visible, whatever mask_mod says."""
    if tuple(blocks.seq_lengths) != (call.rows, call.keys):
        raise BadArgument(
            f"block_mask is of {tuple(blocks.seq_lengths)}, but the call of {(call.rows, call.keys)} places"
        )
    of = tuple(blocks.kv_num_blocks.shape[:2])
    if of[0] not in (1, call.batch) or of[1] not in (1, call.heads):
        raise BadArgument(f"block_mask is of (batch, heads) = {of}, but the call of {(call.batch, call.heads)}")
    size_q, size_k = blocks.BLOCK_SIZE
    columns = -(-call.keys // size_k)
    listed = []
    for numbers, places in (
        (blocks.kv_num_blocks, blocks.kv_indices),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        if numbers is None:
            listed.append(torch.zeros_like(listed[0]))
            continue
        counted = torch.arange(places.shape[-1], device=places.device) < numbers[..., None]
        spots = torch.where(counted, places, columns).long()
        dense = torch.zeros(*places.shape[:-1], columns + 1, dtype=torch.int32, device=places.device)
        listed.append(dense.scatter_add_(-1, spots, torch.ones_like(spots, dtype=torch.int32))[..., :columns])
    partial, full = listed
    wrong = (partial + full > 1).any()
    places = call.places(reads(mask))
    for block in range(-(-call.rows // size_q)):
        row = slice(block * size_q, min((block + 1) * size_q, call.rows))
        some = places | ({"q_idx": places["q_idx"][:, :, row]} if "q_idx" in places else {})
        seen = torch.as_tensor(evaluate(mask, some), device=call.device)
        seen = seen.view(1, 1, 1, 1) if seen.dim() == 0 else seen
        seen = seen.bool().expand(-1, -1, -1, call.keys)
        rest = columns * size_k - call.keys
        some_seen = F.pad(seen.any(2), (0, rest), value=False).unflatten(-1, (columns, size_k)).any(-1)
        all_seen = F.pad(seen.all(2), (0, rest), value=True).unflatten(-1, (columns, size_k)).all(-1)
        wrong = wrong | (some_seen & (partial[:, :, block] + full[:, :, block] == 0)).any()
        wrong = wrong | (~all_seen & (full[:, :, block] > 0)).any()
    if wrong:
        raise Unsupported("the blocks of block_mask are not those of this function: make it with create_block_mask")
