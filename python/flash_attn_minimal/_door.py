"""What a door is and the View that it makes of an array; NumPy's door; the CUDA driver, for doors without streams."""

from __future__ import annotations

import ctypes as ct
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._library import CPU, DEVICES, BadArgument, CudaError, OutOfMemory


class View:
    """One array as the library sees it. `owner` keeps the memory alive for as long as the view lives."""

    __slots__ = ("owner", "door", "pointer", "shape", "strides", "dtype", "device", "index", "writable", "written")

    def __init__(self, owner, door, pointer, shape, strides, dtype, device, index, writable):
        self.owner = owner
        self.door = door
        self.pointer = pointer  # address of the first element; None or anything for an empty array
        self.shape = shape
        self.strides = strides  # in elements
        self.dtype = dtype  # "float32", "bfloat16", ... whatever the framework's own name is
        self.device = device  # CPU or CUDA
        self.index = index  # CUDA device number; 0 on the CPU
        self.writable = writable
        self.written = False  # whether the call writes to it

    @property
    def place(self) -> str:
        """`cpu` or `cuda:0`, for messages."""
        return DEVICES[self.device] if self.device == CPU else f"{DEVICES[self.device]}:{self.index}"


class Door:
    """Interface of all doors; one instance serves all arrays of one framework.

    The lower half is for _repeat.py's shortcut for repeated calls; a door whose `plain` is None has no shortcut."""

    name: str

    def view(self, array: Any, name: str) -> View:
        """Reads an array; `name` is the argument's, for messages."""
        raise NotImplementedError

    def empty(self, like: View, shape: tuple[int, ...], dtype: str) -> View:
        """New uninitialised memory beside `like`."""
        raise NotImplementedError

    def full(self, like: View, shape: tuple[int, ...], dtype: str, value: float) -> View:
        """The same, filled."""
        raise NotImplementedError

    def copy(self, view: View, shape: tuple[int, ...], dtype: str, name: str) -> View | None:
        """A dense array beside a view, with what stands in it: broadcast to `shape`, which is the view's but for axes
        of stride 0, and for a last axis of 1. None where the door does not know how."""
        return None

    def check_seen(self) -> None:
        """Raises where the framework has to see that one of its arrays is about to be written, and cannot. `empty` and
        `full` look by themselves."""

    def stream(self, views: list[View]) -> int | None:
        """The CUDA stream on which the caller's work on these arrays is queued; None is the legacy default stream."""
        return None

    def result(self, view: View) -> Any:
        """What the caller gets for an output."""
        return view.owner

    # Of a framework that counts the writes to an array: counts one for each of these, which the library has written.
    wrote: Callable[[Sequence[Any]], None] | None = None
    # Of a framework whose arrays come with streams: after a call on the stream of the first of these Views, makes what
    # is queued on the others' streams later wait for it.
    join: Callable[[list[View]], None] | None = None
    launch: Callable[[str, Any], None] | None = None  # of a door whose calls are described, and made later
    scratch: Callable[[Any, Callable], None]  # of such a door: finds the workspace of a call, by the library's query

    plain: type | None = None  # the framework's array class itself; subclasses take the long way
    address: Callable[[Any], int]  # of the first element; a RuntimeError when there is none
    facts: Callable[[Any], tuple]  # what `view` reads of one array but the address, for `describe`

    def describe(self, arrays: tuple, gradients: bool = False) -> tuple | None:
        """Everything that `view` reads of these arrays (or None) but the address, hashable: arrays with equal
        descriptions pass, or fail, the same checks. None where one has no shortcut, or the framework watches this
        thread's calls; or records them, unless it is a call that has gradients. No reference to an array is kept in
        it."""
        kind = self.plain
        if kind is None or not all(x is None or type(x) is kind for x in arrays):
            return None
        facts = self.facts
        return tuple([None if x is None else facts(x) for x in arrays])

    def same(self, arrays: tuple, about: tuple, gradients: bool = False) -> Callable[[tuple], bool]:
        """A test whether other arrays have this description, which is that of `arrays`, none of them None. It may say
        no where `describe` says yes."""
        describe = self.describe
        return lambda others: describe(others, gradients) == about

    def maker(self, like: View, result: View, fill: float | None = None) -> Callable[[Any], Any]:
        """A function that makes one more array like `result`, uninitialised or filled, from an array described like
        `like`."""
        raise NotImplementedError

    def current_stream(self, index: int) -> int | None:
        """The stream on which the caller's work on this CUDA device is queued."""
        return None


# ---- NumPy, the one framework that is always there ----

_NUMPY_NAMES = "float32 float16 float64 bool uint8 int8 int32 int64 uint64"
_NUMPY_DTYPES = {np.dtype(t): t for t in _NUMPY_NAMES.split()}


def _numpy_dtype_name(dtype: Any, name: str) -> str:
    found = _NUMPY_DTYPES.get(dtype)
    if found is None:
        if not dtype.itemsize:
            raise BadArgument(f"{name} has dtype {dtype}, whose elements have no bytes")
        if not dtype.isnative:
            raise BadArgument(
                f"{name} has dtype {dtype.str!r}: its byte order is not this machine's; "
                f"pass {name}.astype({name}.dtype.newbyteorder('='))"
            )
        found = str(dtype.name)  # ml_dtypes' bfloat16 and float8 are known by theirs
    return found


def _element_strides(strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    if not itemsize or any(stride % itemsize for stride in strides):
        raise BadArgument(
            f"{name} has strides of {strides} bytes: not multiples of its element size of {itemsize} bytes"
        )
    return tuple([stride // itemsize for stride in strides])


def _once(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of one entry along each axis that `shape` has one of."""
    return tuple([slice(1) if size == 1 else slice(None) for size in shape])


def _numpy_address() -> Callable[[np.ndarray], int]:
    """The address of an array's first element. `array.ctypes.data` takes a microsecond. An array object begins with
    what every Python object has, and then comes this address; where that does not hold, `ctypes.data` it is."""
    head, read, probe = object.__basicsize__, ct.c_size_t.from_address, np.empty(1)
    if sys.implementation.name == "cpython" and read(id(probe) + head).value == probe.ctypes.data:
        return lambda array: read(id(array) + head).value
    return operator.attrgetter("ctypes.data")


class NumpyDoor(Door):
    name = "NumPy"
    plain = np.ndarray
    address = staticmethod(_numpy_address())
    facts = operator.attrgetter("dtype", "shape", "strides", "flags.num")  # flags: aligned and writable among them

    def maker(self, like, result, fill=None):
        shape, dtype = result.shape, result.owner.dtype
        return (lambda array: np.empty(shape, dtype)) if fill is None else (lambda array: np.full(shape, fill, dtype))

    def view(self, array, name):
        flags = array.flags
        if not flags.aligned:
            raise BadArgument(
                f"{name} is not aligned to its element size of {array.itemsize} bytes; pass {name}.copy()"
            )
        dtype = array.dtype
        dtype_name = _NUMPY_DTYPES.get(dtype) or _numpy_dtype_name(dtype, name)
        itemsize = dtype.itemsize
        strides = tuple([stride // itemsize for stride in array.strides])  # aligned: each is a multiple
        pointer = array.ctypes.data
        return View(array, self, pointer, array.shape, strides, dtype_name, CPU, 0, flags.writeable)

    def copy(self, view, shape, dtype, name):
        array = view.owner[_once(shape)]
        return self.view(
            np.ascontiguousarray(np.broadcast_to(array, shape), None if dtype == view.dtype else dtype), name
        )

    def empty(self, like, shape, dtype):
        try:
            array = np.empty(shape, like.owner.dtype if dtype == like.dtype else dtype)
        except (MemoryError, ValueError) as error:  # more than there is, or than NumPy counts
            raise OutOfMemory(f"no memory for an array of shape {tuple(shape)}, {dtype}: {error}") from None
        return self.view(array, "out")

    def full(self, like, shape, dtype, value):
        view = self.empty(like, shape, dtype)
        view.owner.fill(value)
        return view


NUMPY = NumpyDoor()


# ---- the CUDA driver, for the doors whose framework does not speak of streams ----


@functools.cache
def _driver() -> ct.CDLL:
    """libcuda, which the caller's framework has loaded already; the shared library itself does not link it."""
    lib = ct.CDLL("libcuda.so.1")
    lib.cuDevicePrimaryCtxRetain.argtypes = [ct.POINTER(ct.c_void_p), ct.c_int]
    lib.cuCtxPushCurrent_v2.argtypes = [ct.c_void_p]
    lib.cuCtxPopCurrent_v2.argtypes = [ct.POINTER(ct.c_void_p)]
    lib.cuDevicePrimaryCtxRelease_v2.argtypes = [ct.c_int]
    lib.cuStreamSynchronize.argtypes = [ct.c_void_p]
    lib.cuPointerGetAttribute.argtypes = [ct.c_void_p, ct.c_int, ct.c_uint64]
    return lib


def _check_driver(status: int, what: str) -> None:
    if status:
        raise CudaError(f"{what} returned CUDA driver error {status}")


def _synchronize(index: int, stream: int | None) -> None:
    """Waits for a stream of a device, in the device's primary context (the one every framework uses)."""
    driver, context = _driver(), ct.c_void_p()
    _check_driver(driver.cuDevicePrimaryCtxRetain(ct.byref(context), index), "cuDevicePrimaryCtxRetain")
    try:
        _check_driver(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            _check_driver(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        finally:
            driver.cuCtxPopCurrent_v2(ct.byref(ct.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(index)


def _device_of(pointer: int) -> int:
    """The CUDA device that owns an address."""
    ordinal, device_ordinal_attribute = ct.c_int(), 9
    status = _driver().cuPointerGetAttribute(ct.addressof(ordinal), device_ordinal_attribute, pointer)
    _check_driver(status, "cuPointerGetAttribute")
    return ordinal.value
