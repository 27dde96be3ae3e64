"""A score_mod or mask_mod as an expression: the function is called once with symbols as its arguments. Nothing is
guessed from values. An operation that is not in the table below is refused by its name, and so is a branch on a
symbol."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from ...errors import Unsupported
from ._live import Derived, Step, derive, tensors_of

# Elementwise operations, which mean the same for one place and for a grid of places.
_KNOWN: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "neg": operator.neg, "abs": operator.abs,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "and": operator.and_, "or": operator.or_, "not": operator.invert, "xor": operator.xor, "where": torch.where,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or, "logical_not": torch.logical_not,
    "tanh": torch.tanh, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2,
    "sqrt": torch.sqrt, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor,
    "ceil": torch.ceil, "round": torch.round, "sign": torch.sign, "clamp": torch.clamp, "minimum": torch.minimum,
    "maximum": torch.maximum, "to": torch.Tensor.to, "float": torch.Tensor.float, "double": torch.Tensor.double,
    "int": torch.Tensor.int, "long": torch.Tensor.long, "bool": torch.Tensor.bool,
    "index": lambda tensor, *places: tensor[places],
}  # fmt: skip
_NAMES = {
    "subtract": "sub", "multiply": "mul", "div": "truediv", "divide": "truediv", "true_divide": "truediv",
    "floor_divide": "floordiv", "remainder": "mod", "negative": "neg", "absolute": "abs", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_not": "not", "invert": "not", "bitwise_xor": "xor", "getitem": "index",
    "clip": "clamp", "rdiv": "rtruediv",
}  # fmt: skip
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip


_RANDOM = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal")
    + ("multinomial", "dropout")
)


class Term:
    """A symbol (`operation` is its name, and it has no arguments), or an operation on terms, tensors and numbers."""

    def __init__(self, operation: str, arguments: tuple = (), options: dict | None = None, device: Any = None):
        self.operation, self.arguments, self.options, self.device = operation, arguments, options or {}, device
        inner = [x for x in tree_leaves((arguments, self.options)) if isinstance(x, Term)]
        self.reads: frozenset[str] = frozenset().union(*(x.reads for x in inner)) if arguments else {operation}
        if inner:
            self.device = inner[0].device

    def __str__(self) -> str:
        names = [str(x) if not isinstance(x, torch.Tensor) else _shown(x) for x in self.arguments]
        if not names:
            return self.operation
        if self.operation == "index":
            return f"{names[0]}[{', '.join(names[1:])}]"
        if self.operation in _SIGNS and len(names) == 2:
            return f"({names[0]} {_SIGNS[self.operation]} {names[1]})"
        return f"{self.operation}({', '.join(names)})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("new_ones", "new_zeros", "new_full", "new_tensor"):
            like = torch.empty(0, device=self.device)
            return lambda *args, **kwargs: getattr(like, name)(*args, **kwargs)
        return lambda *args, **kwargs: make(name, (self, *args), kwargs)

    def __getitem__(self, places: Any) -> Term:
        return make("index", (self, *(places if isinstance(places, tuple) else (places,))))

    def __bool__(self) -> bool:
        raise Unsupported(
            f"a Python `if`, `and`, `or` or `not` asks whether {self}, which differs from place to place: "
            "use torch.where, & and | and ~"
        )

    def _no_number(self, *_: Any) -> Any:
        raise Unsupported(f"{self} is used as a Python number, but differs from place to place")

    __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _no_number
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return make(function.__name__, args, kwargs)


def _operator(name: str, swapped: bool) -> Callable:
    def call(self: Term, *others: Any) -> Term:
        return make(name, (*others, self) if swapped else (self, *others))

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(Term, f"__{_name}__", _operator(_name, False))
    setattr(Term, f"__r{_name}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs"):
    setattr(Term, f"__{_name}__", _operator(_name, False))
Term.__invert__ = _operator("not", False)


def _shown(x: torch.Tensor) -> str:
    return str(x.item()) if x.dim() == 0 and x.device.type == "cpu" else f"tensor{list(x.shape)}"


def make(name: str, arguments: tuple, options: dict | None = None) -> Term:
    """The term of an operation that has this name in PyTorch or Python."""
    name = name.strip("_") if name.startswith("__") else name
    name = _NAMES.get(name, name)
    swapped = name[1:] if name[:1] == "r" and name[1:] in _SIGNS else ""
    if swapped and len(arguments) == 2:
        name, arguments = swapped, arguments[::-1]
    if name not in _KNOWN:
        raise Unsupported(f"{name}({', '.join(map(str, arguments))}) is no operation that is known here")
    if name == "index":
        return _index(*arguments)
    return Term(name, tuple(arguments), options)


def _index(tensor: Any, *places: Any) -> Term:
    """The term tensor[places]. tensor[a][b] becomes tensor[a, b], so that it is an element in the end."""
    places = tuple(p for place in places for p in (place if isinstance(place, (tuple, list)) else (place,)))
    if isinstance(tensor, Term):
        if tensor.operation != "index":
            raise Unsupported(f"{tensor}[{', '.join(map(str, places))}] is an index into no tensor")
        tensor, places = tensor.arguments[0], (*tensor.arguments[1:], *places)
    if any(place is None or isinstance(place, (slice, bool)) or place is Ellipsis for place in places):
        raise Unsupported(f"tensor{list(tensor.shape)} is indexed by {places}: expected a number for each axis")
    return Term("index", (tensor, *places))


class _Watch(TorchFunctionMode):
    """Intercepts tensor[symbol], which calls no method of the symbol, and records what captured tensors are turned
    into."""

    def __init__(self) -> None:
        super().__init__()
        self.derived: list[Derived] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if tree_any(lambda x: isinstance(x, Term), (args, kwargs)):
            if function is torch.Tensor.__getitem__:
                places = args[1] if isinstance(args[1], tuple) else (args[1],)
                return make("index", (args[0], *places))
            return make(function.__name__, args, kwargs)
        if getattr(function, "__name__", "") in _RANDOM:
            raise Unsupported(f"{function.__name__}() draws numbers, which would be the same for every place and call")
        result = function(*args, **kwargs)
        detached = function == torch.Tensor.data.__get__ or getattr(function, "__name__", "") == "detach"
        self.derived += derive(result, tree_leaves((args, kwargs)), detached)
        return result


def trace(function: Callable, names: tuple[str, ...], device: Any) -> tuple[Any, list[Derived]]:
    """Calls the function with symbols of these names. Returns its result, a Term, a tensor or a number, and the
    captured tensors from which it computed others."""
    watch = _Watch()
    with watch:
        return function(*(Term(name, device=device) for name in names)), watch.derived


def reads(x: Any) -> frozenset[str]:
    return x.reads if isinstance(x, Term) else frozenset()


def evaluate(x: Any, places: dict[str, torch.Tensor]) -> Any:
    """The value of a term when its symbols have these values, which broadcast against each other."""
    if not isinstance(x, Term):
        return x
    if not x.arguments:
        return places[x.operation]
    if x.operation == "index" and len(x.arguments) != 1 + x.arguments[0].dim():
        raise Unsupported(f"{x} is no element: its tensor has {x.arguments[0].dim()} axes")
    arguments, options = tree_map(
        lambda a: evaluate(a, places) if isinstance(a, Term) else a, (x.arguments, x.options)
    )  # fmt: skip
    return _function(x.operation)(*arguments, **options)


def _function(operation: str) -> Callable:
    """The function that computes the operation on values."""
    if operation.startswith("logical_"):
        return lambda *arguments: _KNOWN[operation](*map(torch.as_tensor, arguments))
    return _element if operation == "index" else _KNOWN[operation]


def _element(tensor: torch.Tensor, *places: Any) -> torch.Tensor:
    return tensor[tuple(a.to(tensor.device) if isinstance(a, torch.Tensor) else a for a in places)]


def steps_of(x: Any, places: dict[str, torch.Tensor]) -> Any:
    """The steps that evaluate a term at every call. Parts that depend on no captured tensor are computed now."""
    if not isinstance(x, Term):
        return x
    if not tensors_of(x):
        return evaluate(x, places)
    arguments, options = tree_map(
        lambda a: steps_of(a, places) if isinstance(a, Term) else a, (x.arguments, x.options)
    )  # fmt: skip
    return Step(_function(x.operation), arguments, options)


def same(a: Any, b: Any, renamed: dict[str, str]) -> bool:
    """Whether a equals b after the symbols of a are renamed."""
    if isinstance(a, Term) and isinstance(b, Term):
        if not a.arguments or not b.arguments:
            return not a.arguments and not b.arguments and renamed.get(a.operation, a.operation) == b.operation
        return (
            a.operation == b.operation
            and len(a.arguments) == len(b.arguments)
            and a.options.keys() == b.options.keys()
            and all(same(x, y, renamed) for x, y in zip(a.arguments, b.arguments, strict=True))
            and all(same(a.options[n], b.options[n], renamed) for n in a.options)
        )
    if isinstance(a, Term) or isinstance(b, Term):
        return False
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _about(a) == _about(b))
    return type(a) is type(b) and a == b


def _about(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_neg()


def flat(x: Any, *operations: str) -> Iterator[Any]:
    """The operands of a chain of one associative operation, which may go by any of these names."""
    if isinstance(x, Term) and x.operation in operations and not x.options:
        for argument in x.arguments:
            yield from flat(argument, *operations)
    else:
        yield x
