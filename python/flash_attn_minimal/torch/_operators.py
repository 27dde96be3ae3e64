"""Attention as operators of PyTorch (torch.library), which traces and graphs hold without looking inside: what they
take, their backward pass, and transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _arrays
from .._arrays import torch_modes, words
from .._core.checks import flag, integer, number, window
from .._core.options import FLOAT8, OPTION_ARRAYS, AttentionOptions, Options, hints_of
from ..errors import BadArgument, Unsupported
from ._inputs import dense_rows

ARRAYS = ("q", "k", "v", *OPTION_ARRAYS, "cu_seqlens_q", "cu_seqlens_k")
_BEFORE = ("dout", "dlse", "out", "lse", "want_dbias", "want_dsinks")  # in an operator's backward, before ARRAYS
_DTYPES = {name: dtype for name, (_, dtype) in OPTION_ARRAYS.items()} | dict.fromkeys(ARRAYS[-2:], "int32")
# A CUDA graph cannot hold a call with this tag.
OUTSIDE_CUDA_GRAPHS = tuple(getattr(torch.Tag, tag) for tag in ("cudagraph_unsafe",) if hasattr(torch.Tag, tag))


# ---- the arguments ----


def _signed(name: str, value: int) -> int:
    """A 64-bit unsigned number as PyTorch's operators take it: the signed number of the same bits."""
    number = integer(name, value, 0, 2**64 - 1)
    return number - 2**64 if number >= 2**63 else number


_SIGNED = ("dropout_seed", "dropout_offset")


def numbers_of(hints: dict[str, str]) -> dict[str, str]:
    """The types in PyTorch's schema language of arguments with these annotations. A window is two numbers, because vmap
    would map over a pair."""
    found: dict[str, str] = {}
    for name, hint in hints.items():
        if name == "window_size":
            found |= {"window_left": "int", "window_right": "int"}
        else:
            found[name] = hint.replace(" | None", "?")
    return found


def pack(given: dict[str, Any], kinds: dict[str, str]) -> list:
    """The numbers among the arguments `given`, as an operator takes them, in the order of `kinds`."""
    given["window_left"], given["window_right"] = window(given["window_size"])
    for name, kind in kinds.items():
        if name in _SIGNED and given[name] is not None:
            given[name] = _signed(name, given[name])
        elif kind.startswith("float") and given[name] is not None:
            given[name] = number(name, given[name])
        elif kind == "bool":
            given[name] = bool(flag(name, given[name]))
        elif kind == "int" and (isinstance(given[name], bool) or not isinstance(given[name], (int, torch.SymInt))):
            given[name] = integer(name, given[name], -(2**31), 2**31 - 1)
    return [given[name] for name in kinds]


_NO_NUMBERS = (*OPTION_ARRAYS, *FLOAT8)
# The options that the operators take as numbers, in order.
NUMBERS = numbers_of({name: hint for name, hint in hints_of(AttentionOptions).items() if name not in _NO_NUMBERS})


def packed(options: Options) -> list:
    return pack(options._asdict(), NUMBERS)


def unpacked(arrays: tuple, numbers: tuple) -> Options:
    """The Options that an operator's arguments stand for: the inverse of packed."""
    given = dict(zip(NUMBERS, numbers, strict=True))
    given |= {name: given[name] % 2**64 for name in _SIGNED if given[name] is not None}
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    return Options(**given, **dict(zip(OPTION_ARRAYS, arrays, strict=True)))


def check_arrays(given: dict) -> None:
    """Raises unless all arrays of a call are tensors, or if one that cannot have a gradient requires one."""
    for name in ("alibi_slopes", "mask"):
        if isinstance(given[name], torch.Tensor) and given[name].requires_grad and torch_modes.records():
            raise Unsupported(f"{name} requires a gradient, which attention does not have: pass {name}.detach()")
    for name, array in given.items():
        if name in ARRAYS and array is not None and not isinstance(array, torch.Tensor):
            first = next(x for x in ARRAYS if isinstance(given[x], torch.Tensor))
            advice = words.advice("PyTorch", "array", name, first, _DTYPES.get(name) or f"{first}.dtype")
            raise BadArgument(f"{name} is {_arrays._kind(array)}, but {first} is a PyTorch tensor{advice}")


def refuse_tangents(tensors: dict[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported(f"{name} has a tangent: {_NO_JVP}")


_NO_JVP = "forward-mode differentiation (jvp, jacfwd) of attention is not served, reverse mode (grad, jacrev) is"


def refuse_double(*_):
    raise Unsupported("double backward (create_graph=True, torch.func.hessian) of attention is not served")


def refuse_jvp(*_):
    raise Unsupported(_NO_JVP)


# ---- an operator and its backward pass ----


class Operators:
    """flash_attn_minimal::<name>, which returns out and lse, and flash_attn_minimal::<name>_backward, which returns dq,
    dk, dv, dbias and dsinks. The last two have the dtype of their inputs and are empty where not wanted.

    The first takes the tensors `first`, ARRAYS, the arguments `more`, and numbers (see `packed`). The second takes
    `first`; dout, dlse, out, lse, want_dbias, want_dsinks; and the rest as the first."""

    def __init__(
        self, name: str, more: str, forward: Callable, backward: Callable, fake: Callable,
        first: tuple[str, ...] = (), tags: tuple = (), choose: Callable | None = None,
    ):  # fmt: skip
        """forward, backward, fake: their functions. choose(dout, dlse, out): returns the function for a backward pass;
        None: always the operator."""
        leading = "".join(f"Tensor {array}, " for array in first)
        arrays = ", ".join(f"Tensor{'' if array in ('q', 'k', 'v') else '?'} {array}" for array in ARRAYS)
        inputs = ", ".join([arrays, more, *(f"{kind} {number}" for number, kind in NUMBERS.items())])
        given = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool want_dbias, bool want_dsinks"
        self.first, one, two = len(first), f"flash_attn_minimal::{name}", f"flash_attn_minimal::{name}_backward"
        torch.library.define(one, f"({leading}{inputs}) -> (Tensor, Tensor)", tags=tags)
        torch.library.define(two, f"({leading}{given}, {inputs}) -> ({', '.join(['Tensor'] * 5)})", tags=tags)
        for operator, function in ((one, forward), (two, backward)):
            torch.library.impl(operator, ("cpu", "cuda"), function)
        torch.library.register_fake(one, fake)
        torch.library.register_fake(two, self._fake_backward)
        torch.library.register_autograd(one, self.gradients, setup_context=self.setup_context)
        torch.library.register_autograd(two, refuse_double)
        self.forward = getattr(torch.ops.flash_attn_minimal, name).default
        self.backward = getattr(torch.ops.flash_attn_minimal, f"{name}_backward").default
        self.choose = choose or (lambda *_: self.backward)

    def setup_context(self, ctx, inputs, output):
        saved = self.first + len(ARRAYS)
        ctx.save_for_backward(*inputs[:saved], *output)
        ctx.rest = inputs[saved:]
        ctx.set_materialize_grads(False)

    def gradients(self, ctx, dout, dlse):
        *arrays, out, lse = ctx.saved_tensors
        first, arrays = arrays[: self.first], arrays[self.first :]
        if dout is None and dlse is None:
            return (None,) * (self.first + len(arrays) + len(ctx.rest))
        dout = torch.zeros_like(out) if dout is None else dout
        want_dbias, want_dsinks = (ctx.needs_input_grad[self.first + ARRAYS.index(x)] for x in ("bias", "sinks"))
        run = self.choose(dout, dlse, out)
        dq, dk, dv, dbias, dsinks = run(*first, dout, dlse, out, lse, want_dbias, want_dsinks, *arrays, *ctx.rest)
        dbias, dsinks = dbias if want_dbias else None, dsinks if want_dsinks else None
        found = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
        return (*[None] * self.first, *[found.get(name) for name in ARRAYS], *[None] * len(ctx.rest))

    def _fake_backward(self, *arguments):
        given = dict(zip((*_BEFORE, *ARRAYS), arguments[self.first :], strict=False))

        def like(name: str, wanted: bool = True) -> torch.Tensor:
            x = given[name if wanted else "dout"]
            return x.new_empty(x.shape if wanted else 0)

        return *map(like, ("q", "k", "v")), like("bias", given["want_dbias"]), like("sinks", given["want_dsinks"])


def check_together(arrays: tuple) -> None:
    """Raises unless q, k, v, ... are on one device, and q, k and v of one dtype: in a trace nothing else does."""
    q = arrays[0]
    for name, x in zip(ARRAYS, arrays, strict=False):
        if name in ("k", "v") and x.dtype != q.dtype:
            raise BadArgument(f"q is {q.dtype}, but {name} is {x.dtype}: they must be the same")
        if x is not None and x.device != q.device:
            raise BadArgument(f"{name} is on {x.device}, but q is on {q.device}")


# ---- transforms of torch.func ----
#
# vmap makes one call of all entries: it joins the mapped axis and the batch. An entry is a call of its own where its
# numbers depend on its place in the batch (dropout), or where there is no batch axis to join (varlen, sinks and their
# gradient, bias's gradient).


class Transformed:
    """Two functions like a pair of operators, `forward` and `backward`, that transforms of torch.func take. Without
    `fold` each entry of a vmap is a call of its own."""

    def __init__(self, operators: Operators, fold: Callable[..., tuple | None] = lambda *_: None):
        def map_forward(info, dims, *arguments):
            size = _size(info)
            folded = fold(size, dims, arguments)
            if folded:
                return _unfold(size, attention.apply(*folded)), (0, 0)
            return _one_by_one(attention.apply, size, dims, arguments), (0, 0)

        def map_backward(info, dims, *arguments):
            size, wanted = _size(info), arguments[operators.first + 4 : operators.first + 6]
            folded = None if any(wanted) else fold(size, dims[len(_BEFORE) :], arguments[len(_BEFORE) :])
            if folded is None:
                return _one_by_one(gradients.apply, size, dims, arguments), (0,) * 5
            given = zip(arguments[:4], dims[:4], strict=True)
            dout, dlse, out, lse = (x if x is None else _folded(size, x, dim) for x, dim in given)
            *grads, dbias, dsinks = gradients.apply(dout, dlse, out, lse.contiguous(), False, False, *folded)
            return (*_unfold(size, grads), dbias, dsinks), (0, 0, 0, None, None)

        class attention(torch.autograd.Function):  # noqa: N801
            forward = staticmethod(lambda *arguments: operators.forward(*arguments))
            setup_context = staticmethod(operators.setup_context)
            backward = staticmethod(operators.gradients)
            vmap = staticmethod(map_forward)
            jvp = staticmethod(refuse_jvp)

        class gradients(torch.autograd.Function):  # noqa: N801
            forward = staticmethod(lambda *arguments: operators.backward(*arguments))
            setup_context = staticmethod(lambda ctx, inputs, output: None)
            backward = staticmethod(refuse_double)
            vmap = staticmethod(map_backward)
            jvp = staticmethod(refuse_jvp)

        self.forward, self.backward, self.map_forward, self.map_backward = (
            attention.apply, gradients.apply, map_forward, map_backward,
        )  # fmt: skip


def _size(info) -> int:
    if info.batch_size == 0:
        raise Unsupported("torch.vmap over an axis of length 0 is not served by attention")
    return info.batch_size


def _entries(size: int, x, dim: int | None):
    """(size, ...): a view, of stride 0 where x is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _folded(size: int, x, dim: int | None):
    """Joins the mapped axis and the batch: (size * batch, ...)."""
    return dense_rows(_entries(size, x, dim).flatten(0, 1))[0]


def _folded_broadcast(size: int, x, dim: int | None, batch: int, rank: int):
    """_folded for an array that broadcasts to `rank` axes, the batch first; x itself where all entries share it."""
    if x is None or (dim is None and (x.dim() < rank or x.shape[0] == 1)):
        return x
    x = _entries(size, x, dim)
    x = x.reshape(size, *(1,) * (rank + 1 - x.dim()), *x.shape[1:])
    return dense_rows(x.expand(size, batch, *x.shape[2:]).flatten(0, 1))[0]


def fold(size: int, dims: tuple, arguments: tuple) -> tuple | None:
    """The arguments of the operator attention for all entries at once, or None where each needs its own call."""
    given, axes = dict(zip(ARRAYS, arguments, strict=False)), dict(zip(ARRAYS, dims, strict=False))
    dropout_p = arguments[len(ARRAYS) + 2 + [*NUMBERS].index("dropout_p")]
    if given["cu_seqlens_q"] is not None or dropout_p or axes["sinks"] is not None:
        return None
    given |= {name: _folded(size, given[name], axes[name]) for name in ("q", "k", "v")}
    batch, slopes = given["q"].shape[0] // size, given["alibi_slopes"]
    if axes["alibi_slopes"] is None and slopes is not None and slopes.dim() == 2 and slopes.shape[0] == batch == 1:
        given["alibi_slopes"] = slopes[0]
    for name in (name for name in OPTION_ARRAYS if name != "sinks"):
        rank = len(OPTION_ARRAYS[name][0].split(", "))
        given[name] = _folded_broadcast(size, given[name], axes[name], batch, rank)
    return (*given.values(), *arguments[len(ARRAYS) :])


def _unfold(size: int, results: tuple) -> tuple:
    return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)


def _one_by_one(call, size: int, dims: tuple, arguments: tuple) -> tuple:
    def entry(i: int) -> list:
        given = zip(arguments, dims, strict=True)
        return [x if dim is None else dense_rows(x.select(dim, i))[0] for x, dim in given]

    results = [call(*entry(i)) for i in range(size)]
    return tuple(torch.stack(x) for x in zip(*results, strict=True))
