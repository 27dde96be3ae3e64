"""The door of CuPy's arrays."""

from __future__ import annotations

import operator

from .door import CUDA, Door, View, element_strides, numpy_dtype_name, once


class CupyDoor(Door):
    name = "CuPy"
    address = operator.attrgetter("data.ptr")
    facts = operator.attrgetter("dtype", "shape", "strides", "data.device_id")

    def __init__(self, cupy):
        self.cupy = cupy
        self.plain = cupy.ndarray
        self.current_device = cupy.cuda.runtime.getDevice

    def view(self, array, name):
        memory = array.data
        dtype = array.dtype
        strides = element_strides(array.strides, dtype.itemsize, name)
        return View(
            array, self, memory.ptr, array.shape, strides, numpy_dtype_name(dtype, name), CUDA, memory.device_id, True
        )

    def maker(self, like, result, fill=None):
        index, shape, dtype = result.index, result.shape, result.owner.dtype
        if fill is None:
            return lambda array: self._new(index, shape, dtype)

        def filled(array):
            new = self._new(index, shape, dtype)
            with self.cupy.cuda.Device(index):
                new.fill(fill)
            return new

        return filled

    def _new(self, index, shape, dtype):
        if self.current_device() == index:
            return self.plain(shape, dtype)
        with self.cupy.cuda.Device(index):
            return self.plain(shape, dtype)

    def current_stream(self, index):
        if self.current_device() == index:
            return self.cupy.cuda.get_current_stream().ptr or None
        with self.cupy.cuda.Device(index):
            return self.cupy.cuda.get_current_stream().ptr or None

    def copy(self, view, shape, dtype, name):
        array = view.owner[once(shape)]
        with self.cupy.cuda.Device(view.index):
            array = self.cupy.ascontiguousarray(self.cupy.broadcast_to(array, shape))
            return self.view(array if dtype == view.dtype else array.astype(dtype), name)

    def empty(self, like, shape, dtype):
        return self.view(self._new(like.index, shape, like.owner.dtype if dtype == like.dtype else dtype), "out")

    def full(self, like, shape, dtype, value):
        view = self.empty(like, shape, dtype)
        with self.cupy.cuda.Device(like.index):
            view.owner.fill(value)
        return view

    def stream(self, views):
        return self.current_stream(views[0].index)
