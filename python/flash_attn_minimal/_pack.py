"""From arrays to the C structs: a call's further arrays, checked, and addresses and strides put into a struct."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any

from . import _arrays
from ._arrays import View
from ._checks import _check_last_axis, _check_same_place
from ._library import BadArgument


def _put_tensor(args: ct.Structure, name: str, view: View) -> None:
    """The address and strides of a (batch, rows, heads, dim) or (rows, heads, dim) array."""
    strides = view.strides if len(view.shape) == 4 else (0, *view.strides)
    _put_strides(args, name, view.pointer, strides, ("batch", "row", "head"))


def _put_strides(
    args: ct.Structure, name: str, address: int | None, strides: Sequence[int], axes: Sequence[str]
) -> None:
    """Into the fields of one array in a struct: <name>_data and <name>_<axis>_stride."""
    setattr(args, f"{name}_data", address)
    for axis, stride in zip(axes, strides, strict=False):
        setattr(args, f"{name}_{axis}_stride", stride)


def _put_dense(args: ct.Structure, name: str, shape: Sequence[int]) -> None:
    """The strides of an array of this shape as the call would allocate it, for a query: there is no address."""
    *batch, rows, heads, dim = shape
    _put_strides(args, name, None, (dim * heads * max(rows, 1), dim * heads, dim), ("batch", "row", "head"))


def _option(views: list[View], name: str, array: Any, dtypes: tuple[str, ...]) -> View:
    """One more input array, of one of these dtypes, from where q comes from."""
    view = _arrays.view(array, name)
    _check_same_place(name, view, "q", views[0])
    if view.dtype not in dtypes:
        raise BadArgument(f"{name} is {view.dtype}: expected {' or '.join(dict.fromkeys(dtypes))}")
    views.append(view)
    return view


def _destination(name: str, array: Any, inputs: dict[str, View], shape: tuple[int, ...], dtype: str) -> View:
    """An array given to be written: of this shape and dtype, from where the inputs come from, and none of them."""
    first_name, first = next(iter(inputs.items()))
    view = _arrays.view(array, name)
    view.door.check_seen()
    _check_same_place(name, view, first_name, first)
    if tuple(view.shape) != shape or view.dtype != dtype:
        raise BadArgument(f"{name} is {view.dtype} {tuple(view.shape)}: expected {dtype} {shape}")
    _check_last_axis(name, view)
    if not view.writable:
        raise BadArgument(f"{name} is a read-only {view.door.name} array")
    for other_name, other in inputs.items():
        if view.pointer == other.pointer and view.pointer and 0 not in shape:
            raise BadArgument(
                f"{name} starts at the same address as {other_name}: it would be overwritten while it is read"
            )
    return view


def _results(out: Any, out_view: View, lse_view: View | None) -> Any:
    """What a call returns: `out` itself where it was given, and lse where it was asked for."""
    result = out if out is not None else out_view.door.result(out_view)
    return result if lse_view is None else (result, lse_view.door.result(lse_view))


def _broadcast(name: str, view: View, full: tuple[int, ...], axes: str, least: int = 1) -> list[int]:
    """The strides of an array that broadcasts to `full`, the shape of these axes, and has `least` axes of its own; 0
    repeats an axis."""
    shape, strides = tuple(view.shape), tuple(view.strides)
    fits = all(have in (1, want) for have, want in zip(shape[::-1], full[::-1], strict=False))
    if not (least <= len(shape) <= len(full) and fits):
        raise BadArgument(f"{name} has shape {shape}, which does not broadcast to ({axes}) = {full}")
    moves = [stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    return [0] * (len(full) - len(shape)) + moves
