"""Door, the interface through which arrays come in and go out, and View, which it makes of an array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import BadArgument, Unsupported

CPU, CUDA = 1, 2  # fa_device of flash_attn.h
DEVICES = {CPU: "cpu", CUDA: "cuda"}


class View:
    """One array as the library sees it. `owner` keeps the memory alive for as long as the view lives."""

    __slots__ = ("owner", "door", "pointer", "shape", "strides", "dtype", "device", "index", "writable", "written")

    def __init__(self, owner, door, pointer, shape, strides, dtype, device, index, writable):
        self.owner = owner
        self.door = door
        self.pointer = pointer  # address of the first element; None or anything for an empty array
        self.shape = shape
        self.strides = strides  # in elements
        self.dtype = dtype  # "float32", "bfloat16", ... also where the framework has another name for it
        self.device = device  # CPU or CUDA
        self.index = index  # CUDA device number; 0 on the CPU
        self.writable = writable
        self.written = False  # whether the call writes to it

    def __repr__(self) -> str:  # for messages about an array where a number belongs
        return f"<{self.door.name} array {self.dtype} {tuple(self.shape)}>"

    @property
    def place(self) -> str:
        """`cpu` or `cuda:0`, for messages."""
        return DEVICES[self.device] if self.device == CPU else f"{DEVICES[self.device]}:{self.index}"


class Door:
    """The interface of all doors; one instance serves all arrays of one framework.

    The attributes and methods from `plain` on serve the shortcut of _core/repeats.py; a door whose `plain` is None has
    no shortcut."""

    name: str

    def view(self, array: Any, name: str) -> View:
        """Reads an array; `name` is the argument's, for messages."""
        raise NotImplementedError

    def empty(self, like: View, shape: tuple[int, ...], dtype: str) -> View:
        """New uninitialised memory of like's framework and device."""
        raise NotImplementedError

    def full(self, like: View, shape: tuple[int, ...], dtype: str, value: float) -> View:
        """New memory like that of `empty`, filled with a value."""
        view = self.empty(like, shape, dtype)
        view.door.result(view)[...] = value
        return view

    def copy(self, view: View, shape: tuple[int, ...], dtype: str, name: str) -> View | None:
        """A dense copy of a view's array, on the same device. `shape` is the view's, except where axes of stride 0 and
        a last axis of 1 are broadcast. None if the door cannot copy."""
        return None

    def check_seen(self) -> None:
        """Raises where the framework would have to see that one of its arrays is about to be written, and cannot see
        it. `empty` and `full` check this themselves."""

    def stream(self, views: list[View]) -> int | None:
        """The CUDA stream on which the caller's work on these arrays is queued; None is the legacy default stream."""
        return None

    def result(self, view: View) -> Any:
        """The array that the caller gets for an output."""
        return view.owner

    # For a framework that counts the writes to an array: counts one write for each of these, which the library made.
    wrote: Callable[[Sequence[Any]], None] | None = None
    # For a framework whose arrays carry streams: after a call on the stream of the first of these Views, makes later
    # work on the streams of the other Views wait for the call.
    join: Callable[[list[View]], None] | None = None
    openmp = ""  # a loaded library that is linked to the framework's OpenMP runtime, if its operations run on that
    launch: Callable[[str, Any], None] | None = None  # for a door whose calls are described now and made later
    scratch: Callable[[Any, Callable], None]  # for such a door: finds a call's workspace, by the library's query

    plain: type | None = None  # the framework's array class itself; subclasses have no shortcut
    address: Callable[[Any], int]  # returns the first element's address; raises RuntimeError if there is none
    facts: Callable[[Any], tuple]  # what `view` reads of one array, without the address, for `describe`

    def describe(self, arrays: tuple, gradients: bool = False) -> tuple | None:
        """All that `view` reads of these arrays (some may be None) except the addresses, hashable: arrays with equal
        descriptions pass or fail the same checks. It holds no reference to an array. None if an array has no shortcut,
        if the framework watches this thread's calls, or if it records the call and the function has no gradients."""
        kind = self.plain
        if kind is None or not all(x is None or type(x) is kind for x in arrays):
            return None
        facts = self.facts
        return tuple([None if x is None else facts(x) for x in arrays])

    def same(self, arrays: tuple, about: tuple, gradients: bool = False) -> Callable[[tuple], bool]:
        """A test whether other arrays have the description `about`, which is that of `arrays`, none of which is None.
        It may say no where `describe` would agree."""
        describe = self.describe
        return lambda others: describe(others, gradients) == about

    def maker(self, like: View, result: View, fill: float | None = None) -> Callable[[Any], Any]:
        """A function that makes another array like `result`, uninitialised or filled, from an array that is described
        like `like`."""
        raise NotImplementedError

    def current_stream(self, index: int) -> int | None:
        """The stream on which the caller's work on this CUDA device is queued."""
        return None


class ForeignDoor(Door):
    """Arrays of a type without a door of its own. Outputs come from the type's array-API namespace if it has one."""

    def __init__(self, kind: type):
        self.name = f"{kind.__module__}.{kind.__qualname__}"

    def empty(self, like, shape, dtype):
        namespace = getattr(like.owner, "__array_namespace__", None)
        if namespace is None:
            raise Unsupported(
                f"{self.name} arrays on {like.place} do not say how to make another (no __array_namespace__): "
                "pass out=, without return_lse and with a kernel that needs no workspace"
            )
        xp = namespace()
        native = like.owner.dtype if dtype == like.dtype else getattr(xp, dtype)
        return self.view(xp.empty(shape, dtype=native, device=like.owner.device), "out")


_NUMPY_NAMES = "float32 float16 float64 bool uint8 int8 int32 int64 uint64"
NUMPY_DTYPES = {np.dtype(t): t for t in _NUMPY_NAMES.split()}


def numpy_dtype_name(dtype: Any, name: str) -> str:
    found = NUMPY_DTYPES.get(dtype)
    if found is None:
        if not dtype.itemsize:
            raise BadArgument(f"{name} has dtype {dtype}, whose elements have no bytes")
        if not dtype.isnative:
            raise BadArgument(
                f"{name} has dtype {dtype.str!r}: its byte order is not this machine's; "
                f"pass {name}.astype({name}.dtype.newbyteorder('='))"
            )
        found = str(dtype.name)  # such as ml_dtypes' bfloat16 and float8 types
    return found


def element_strides(strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    if not itemsize or any(stride % itemsize for stride in strides):
        raise BadArgument(
            f"{name} has strides of {strides} bytes: not multiples of its element size of {itemsize} bytes"
        )
    return tuple([stride // itemsize for stride in strides])


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def once(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index that takes one entry along each axis whose size in `shape` is 1."""
    return tuple([slice(1) if size == 1 else slice(None) for size in shape])
