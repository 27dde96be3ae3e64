"""The doors of arrays with __cuda_array_interface__, and of Numba's device arrays."""

from __future__ import annotations

import numpy as np

from ..errors import BadArgument
from .door import CUDA, NUMPY_DTYPES, ForeignDoor, View, dense_strides, element_strides
from .driver import device_of, synchronize


class CudaArrayDoor(ForeignDoor):
    _names = {f"{dtype.kind}{dtype.itemsize}": name for dtype, name in NUMPY_DTYPES.items()}

    def view(self, array, name):
        interface = array.__cuda_array_interface__
        pointer, read_only = interface["data"]
        code, shape = interface["typestr"], tuple(interface["shape"])
        itemsize = int(code[2:])
        dtype = self._names.get(code[1:]) or getattr(getattr(array, "dtype", None), "name", None)
        if code[0] == ">":
            raise BadArgument(f"{name} has typestr {code!r}: its byte order is not this machine's")
        strides = interface.get("strides")
        if strides is None:
            strides = dense_strides(shape)
        else:
            strides = element_strides(tuple(strides), itemsize, name)
        index = device_of(pointer) if pointer else 0
        return View(array, self, pointer or None, shape, strides, dtype or code, CUDA, index, not read_only)

    def stream(self, views):
        """The first array's stream, after waiting for the work queued on the streams of the other arrays."""
        first = _stream(views[0])
        for view in views[1:]:
            if (stream := _stream(view)) is not None and stream != first:
                synchronize(view.index, stream)
        return first

    def join(self, views):
        """Waits for the call if an array has another stream than the first, because its next use is queued there."""
        first = _stream(views[0])
        if any(stream is not None and stream != first for stream in map(_stream, views[1:])):
            synchronize(views[0].index, first)


def _stream(view: View) -> int | None:
    return view.owner.__cuda_array_interface__.get("stream")


class NumbaDoor(CudaArrayDoor):
    def __init__(self, kind: type, cuda):
        super().__init__(kind)
        self.name, self.cuda = "Numba", cuda

    def empty(self, like, shape, dtype):
        with self.cuda.gpus[like.index]:
            return self.view(self.cuda.device_array(shape, np.dtype(dtype)), "out")

    def full(self, like, shape, dtype, value):
        with self.cuda.gpus[like.index]:
            return self.view(self.cuda.to_device(np.full(shape, value, np.dtype(dtype))), "out")
