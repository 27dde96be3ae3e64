"""Checks of single arguments, with the texts of their errors: numbers, flags, names, and Views of arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import numpy as np

from .._arrays import words
from .._arrays.door import View
from .._arrays.words import pass_cast
from ..errors import BadArgument
from .structs import CPU, DTYPES

FLOATS = ("float32", "float16", "bfloat16")
OPEN = (-1, -1)  # window_size without a window


def same_place(name: str, view: View, first_name: str, first: View, dtype: str = "") -> None:
    """Raises unless an array is of the framework and on the device of `first`. dtype: the dtype that the message tells
    to use; '' is first's."""
    if view.door is not first.door:
        readable = view.device == CPU or first.device != CPU  # no single call makes a host's array of one on a GPU
        advice = words.advice(first.door.name, "array", name, first_name, dtype or f"{first_name}.dtype")
        raise BadArgument(
            f"{name} is a {view.door.name} array, but {first_name} is a {first.door.name} array: "
            f"use one of them for all{advice if readable else ''}"
        )
    if view.device != first.device or view.index != first.index:
        advice = words.advice(view.door.name, "move", name, first_name)
        raise BadArgument(f"{name} is on {view.place}, but {first_name} is on {first.place}{advice}")


def dtype(name: str, view: View) -> None:
    if view.dtype not in DTYPES:
        raise BadArgument(
            f"{name} is {view.dtype}: expected float32, float16 or bfloat16 (or float8_e4m3fn)"
            f"{pass_cast(view.door.name, name, 'float32', view.dtype)}"
        )


def shape(name: str, array: Any, fits: bool, expected: Any) -> None:
    """Raises unless the shape of an array fits."""
    if not fits:
        raise BadArgument(f"{name} has shape {tuple(array.shape)}: expected {expected}")


def last_axis(name: str, view: View) -> None:
    if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        advice, stride = words.advice(view.door.name, "contiguous", name), view.strides[-1]
        raise BadArgument(f"{name} has stride {stride} along its last axis: it must be contiguous (stride 1){advice}")


def contiguous(name: str, view: View) -> None:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected and 0 not in view.shape:
            advice = words.advice(view.door.name, "contiguous", name)
            raise BadArgument(f"{name} has strides {tuple(view.strides)}: it must be contiguous{advice}")
        expected *= size


def pair(first: str, a: Any, second: str, b: Any, why: str = "") -> None:
    """Raises if just one of two arguments that belong together is None."""
    if (a is None) != (b is None):
        missing, given = (first, second) if a is None else (second, first)
        raise BadArgument(f"{missing} is None and {given} is not{why}")


def floats(name: str, view: View, cast: bool = False) -> None:
    """Raises unless the dtype is one of FLOATS; with `cast` the text says how to cast the array."""
    if view.dtype not in FLOATS:
        advice = pass_cast(view.door.name, name, "float32", view.dtype) if cast else ""
        raise BadArgument(f"{name} is {view.dtype}: expected float32, float16 or bfloat16{advice}")


def writable(name: str, view: View, why: str = "") -> None:
    if not view.writable:
        raise BadArgument(f"{name} is a read-only {view.door.name} array{why}")


def values_like_keys(name: str, view: View, keys_name: str, keys: View) -> None:
    """Checks the shape of the values against that of the keys."""
    if tuple(view.shape[:-1]) != tuple(keys.shape[:-1]):
        shapes = f"{name} has shape {tuple(view.shape)}, but {keys_name} has {tuple(keys.shape)}"
        raise BadArgument(f"{shapes}: all but headdim must agree")
    if view.shape[-1] < 1:  # 0 would mean "the same as headdim" to the library
        raise BadArgument(f"{name} has shape {tuple(view.shape)}: headdim_v=0 is outside 1 .. 512")


def quoted(value: Any) -> str:
    """repr(value) for a message, shortened."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5000 digits has no repr
        text = f"<a {type(value).__name__} that cannot be printed>"
    return text if len(text) <= 500 else f"{text[:500]}..."


def flag(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return int(value)
    raise BadArgument(f"{name}={quoted(value)} is neither True nor False")


def wants_lse(return_lse: Any, return_softmax_lse: Any) -> int:
    """Whether a call returns lse. return_lse is the core's name and return_softmax_lse flash-attn's, of one option."""
    return flag("return_lse", return_lse) | flag("return_softmax_lse", return_softmax_lse)


LEAST_FLOAT, MOST_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def number(name: str, value: Any) -> float:
    """A number in the range of a C float. NaN and infinities pass: the library refuses them."""
    kind = value.dtype.kind if isinstance(value, (np.ndarray, np.generic)) else ""
    if kind in tuple("bSUO") or value is None or isinstance(value, (bool, str, bytes, bytearray)):
        advice = "; leave it out for its default" if value is None else ""
        if name == "dropout_p" and isinstance(value, bool):
            advice = f"; name the option that is meant, such as causal={value}: dropout_p comes first"
        raise BadArgument(f"{name}={quoted(value)} is not a number{advice}")
    try:
        number = float(value)
        beyond = MOST_FLOAT < abs(number) < math.inf
    except OverflowError:
        beyond = True
    except (TypeError, ValueError, RuntimeError):
        raise BadArgument(f"{name}={quoted(value)} is not a number") from None
    if beyond:
        raise BadArgument(f"{name}={quoted(value)} is beyond the numbers of a float32")
    return number


def integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        whole = isinstance(value, float) and value.is_integer()
        advice = f"; pass {int(value)}" if whole else "; leave it out for its default" if value is None else ""
        raise BadArgument(f"{name}={quoted(value)} is not an integer{advice}") from None
    if not low <= number <= high:
        raise BadArgument(f"{name}={quoted(number)} is outside {low} .. {high}")
    return number


def one_of(what: str, value: Any, names: Collection[str], expected: str = "") -> str:
    """The value, if it is one of the names."""
    if not isinstance(value, str) or value not in names:
        raise BadArgument(f"{what}={quoted(value)} is {expected or 'not one of ' + ', '.join(map(repr, names))}")
    return value


def dtype_name(what: str, value: Any, names: Collection[str], expected: str = "") -> str:
    """The name of a dtype, if it is one of the names. The value is a name or a dtype of NumPy, PyTorch, CuPy or JAX:
    np.float16, torch.bfloat16, ..."""
    name = value
    if type(value).__module__ == "torch":
        name = str(value).removeprefix("torch.")
    elif isinstance(value, (np.dtype, type)) or hasattr(value, "dtype"):  # jnp.bfloat16 has one, and is no type
        try:
            name = np.dtype(value).name
        except (TypeError, ValueError):  # a type that is no dtype
            pass
    return name if isinstance(name, str) and name in names else one_of(what, value, names, expected)


def window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        hint = f"; for the last {window_size} keys pass ({window_size}, 0)" if type(window_size) is int else ""
        raise BadArgument(
            f"window_size={quoted(window_size)} is not a pair (left, right) of integers, -1 for an open end{hint}"
        ) from None
    if left is None or right is None:
        raise BadArgument(f"window_size[{int(left is not None)}]=None is not an integer: -1 is an open end")
    low, high = -(2**63), 2**63 - 1
    return integer("window_size[0]", left, low, high), integer("window_size[1]", right, low, high)
