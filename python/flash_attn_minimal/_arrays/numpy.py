"""The door of NumPy's arrays."""

from __future__ import annotations

import ctypes as ct
import operator
import sys
from collections.abc import Callable

import numpy as np

from ..errors import BadArgument, OutOfMemory
from .door import CPU, NUMPY_DTYPES, Door, View, numpy_dtype_name, once


def _numpy_address() -> Callable[[np.ndarray], int]:
    """A function that returns the address of an array's first element. `array.ctypes.data` takes a microsecond. In
    CPython the address follows the header that every object has, and is read there, if that gives the right answer."""
    head, read, probe = object.__basicsize__, ct.c_size_t.from_address, np.empty(1)
    if sys.implementation.name == "cpython" and read(id(probe) + head).value == probe.ctypes.data:
        return lambda array: read(id(array) + head).value
    return operator.attrgetter("ctypes.data")


class NumpyDoor(Door):
    name = "NumPy"
    plain = np.ndarray
    address = staticmethod(_numpy_address())
    facts = operator.attrgetter("dtype", "shape", "strides", "flags.num")  # flags include aligned and writable

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
        dtype_name = NUMPY_DTYPES.get(dtype) or numpy_dtype_name(dtype, name)
        itemsize = dtype.itemsize
        strides = tuple([stride // itemsize for stride in array.strides])  # aligned: each is a multiple
        pointer = array.ctypes.data
        return View(array, self, pointer, array.shape, strides, dtype_name, CPU, 0, flags.writeable)

    def copy(self, view, shape, dtype, name):
        array = view.owner[once(shape)]
        return self.view(
            np.ascontiguousarray(np.broadcast_to(array, shape), None if dtype == view.dtype else dtype), name
        )

    def empty(self, like, shape, dtype):
        try:
            array = np.empty(shape, like.owner.dtype if dtype == like.dtype else dtype)
        except (MemoryError, ValueError) as error:  # ValueError: more elements than NumPy can count
            raise OutOfMemory(f"no memory for an array of shape {tuple(shape)}, {dtype}: {error}") from None
        return self.view(array, "out")


NUMPY = NumpyDoor()
