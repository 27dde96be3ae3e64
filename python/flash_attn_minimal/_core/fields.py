"""From arrays to the C structs: checks a call's further arrays, and puts addresses and strides into a struct."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any

from .. import _arrays
from .._arrays import View
from .._arrays.words import pass_cast
from ..errors import BadArgument, Unsupported
from . import checks, recordings


def _put_tensor(args: ct.Structure, name: str, view: View) -> None:
    """Puts the address and strides of a (batch, rows, heads, dim) or (rows, heads, dim) array into a struct."""
    strides = view.strides if len(view.shape) == 4 else (0, *view.strides)
    _put_strides(args, name, view.pointer, strides, ("batch", "row", "head"))


def _put_strides(
    args: ct.Structure, name: str, address: int | None, strides: Sequence[int], axes: Sequence[str]
) -> None:
    """Fills the fields of one array in a struct: <name>_data and <name>_<axis>_stride."""
    setattr(args, f"{name}_data", address)
    for axis, stride in zip(axes, strides, strict=False):
        setattr(args, f"{name}_{axis}_stride", stride)


def _put_dense(args: ct.Structure, name: str, shape: Sequence[int]) -> None:
    """Puts the strides that the call would give a new array of this shape into the struct of a query; no address."""
    *batch, rows, heads, dim = shape
    _put_strides(args, name, None, (dim * heads * max(rows, 1), dim * heads, dim), ("batch", "row", "head"))


def _option(views: list[View], name: str, array: Any, dtypes: tuple[str, ...]) -> View:
    """Checks one more input array, of one of these dtypes, from q's framework and device, and adds it to views."""
    first, wanted = views[0], "float32" if "float32" in dtypes else dtypes[-1]
    dtype = "q.dtype" if wanted == first.dtype else wanted
    view = _arrays.view(array, name, ("q", first), dtype)
    checks.same_place(name, view, "q", first, dtype)
    if view.dtype not in dtypes:
        expected = " or ".join(dict.fromkeys(dtypes))
        raise BadArgument(f"{name} is {view.dtype}: expected {expected}{_pass_instead(name, view, dtypes, dtype)}")
    views.append(view)
    return view


def _pass_instead(name: str, view: View, dtypes: tuple[str, ...], dtype: str) -> str:
    """Advice for an array of another dtype than these."""
    if "bool" in dtypes:
        if "float" not in view.dtype or name != "mask":
            return f"; pass {name} != 0"
        return f"; if it is 0 where a key is hidden, pass {name} != 0; to add it to the scores, pass it as bias={name}"
    if name == "bias" and view.dtype == "bool":
        return f"; if it says which keys a row attends to, pass mask={name}"
    if name == "tree_mask" and "int" not in view.dtype:
        return ": a word for each row, whose bit j is draft j"
    return pass_cast(view.door.name, name, dtype, view.dtype)


def _columns(views: list[View], name: str, view: View, seqlen_k: int) -> View:
    """A copy of a bias or mask whose columns are not contiguous, or of which one stands for all keys. It has all
    seqlen_k columns, and one entry along every other axis that is broadcast."""
    moves = zip(view.shape[:-1], view.strides[:-1], strict=True)
    shape = *(size if stride else min(size, 1) for size, stride in moves), seqlen_k
    return _copied(views, name, view, shape, view.dtype)


def _copied(views: list[View], name: str, view: View, shape: tuple[int, ...], dtype: str) -> View:
    """A copy in the caller's framework and on its device, added to views after the view itself."""
    is_now = f"{name} is {view.dtype}, shape {tuple(view.shape)}, strides {tuple(view.strides)}"
    wanted = f"{dtype} of shape {shape}, contiguous"
    if recordings.current() is not None:
        raise Unsupported(f"{is_now}, and would be copied: a recorded call reads arrays where they are; pass {wanted}")
    copied = view.door.copy(view, shape, dtype, name)
    if copied is None:
        raise BadArgument(f"{is_now}: of {view.door.name} arrays {wanted}, is expected")
    views.append(copied)
    return copied


def _empty(like: View, shape: tuple[int, ...], dtype: str) -> View:
    """A new array beside `like`, of a dtype that its framework may not have."""
    if dtype == like.dtype:
        return like.door.empty(like, shape, dtype)
    missing = (TypeError, KeyError, AttributeError)
    try:
        return like.door.empty(like, shape, dtype)
    except missing:
        pass
    try:
        import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 and float8 once this is imported

        return like.door.empty(like, shape, dtype)
    except ImportError:
        needs = f"needs the ml_dtypes package (pip install ml_dtypes) for {dtype}"
    except missing:
        needs = f"has no dtype {dtype}"
    raise Unsupported(f"{like.door.name} {needs}") from None


def _destination(name: str, array: Any, inputs: dict[str, View], shape: tuple[int, ...], dtype: str) -> View:
    """Checks an array that is to be written: of this shape and dtype, from the framework and device of the inputs, and
    not one of the inputs."""
    first_name, first = next(iter(inputs.items()))
    view = _arrays.view(array, name)
    view.door.check_seen()
    checks.same_place(name, view, first_name, first)
    if tuple(view.shape) != shape or view.dtype != dtype:
        raise BadArgument(f"{name} is {view.dtype} {tuple(view.shape)}: expected {dtype} {shape}")
    checks.last_axis(name, view)
    checks.writable(name, view)
    for other_name, other in inputs.items():
        if view.pointer == other.pointer and view.pointer and 0 not in shape:
            raise BadArgument(
                f"{name} starts at the same address as {other_name}: it would be overwritten while it is read"
            )
    first.door.stream([first, view])  # waits for the stream of `view`, if it has another one
    view.written = True
    return view


def _results(out: Any, out_view: View, lse_view: View | None) -> Any:
    """The return value of a call: the given `out` itself or the new one, with lse if there is a view of it."""
    result = out if out is not None else out_view.door.result(out_view)
    return result if lse_view is None else (result, lse_view.door.result(lse_view))


def _fitted(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """Advice: the index that makes a bias or mask broadcast to `full`, (batch, nheads, seqlen_q, seqlen_k)."""

    def fits(changed: tuple[int, ...]) -> bool:
        return all(have in (1, want) for have, want in zip(changed[::-1], full[::-1], strict=False))

    batch, nheads, _, columns = full
    rank = len(shape)
    if not 0 < rank <= 4 or 0 in full:
        return ""
    if rank == 2 and shape == (batch, columns):
        return f"; if it is (batch, seqlen_k), pass {name}[:, None, None, :]"
    if rank == 3 and shape[0] == batch and fits((batch, 1, *shape[1:])):
        return f"; pass {name}[:, None]"
    if shape == (nheads,):
        return f"; if it is a number for each head, pass {name}[:, None, None]"
    if shape[-1] > columns and fits((*shape[:-1], columns)):
        return f"; for its first columns pass {name}[..., :{columns}]"
    if rank > 1 and fits((*shape[:-2], shape[-1], shape[-2])):
        return f"; if its rows are the keys, pass {name}.swapaxes(-1, -2)"
    return ""


def _broadcast(name: str, view: View, full: tuple[int, ...], axes: str, least: int = 1) -> list[int]:
    """The strides of an array that broadcasts to the shape `full` of these axes, 0 for broadcast axes. It must have at
    least `least` axes."""
    shape, strides = tuple(view.shape), tuple(view.strides)
    fits = all(have in (1, want) for have, want in zip(shape[::-1], full[::-1], strict=False))
    if not (least <= len(shape) <= len(full) and fits):
        raise BadArgument(
            f"{name} has shape {shape}, which does not broadcast to ({axes}) = {full}"
            f"{_fitted(name, shape, full) if name in ('bias', 'mask') else ''}"
        )
    moves = [stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    return [0] * (len(full) - len(shape)) + moves
