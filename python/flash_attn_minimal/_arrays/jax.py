"""The door of JAX's arrays."""

from __future__ import annotations

import numpy as np

from ..errors import Unsupported
from .door import CPU, CUDA, Door, View, dense_strides, numpy_dtype_name, once
from .driver import synchronize
from .numpy import NUMPY


class JaxDoor(Door):
    """JAX arrays never change and JAX's streams are private, so this door waits: for the inputs before the launch, and
    for the result before returning. Outputs are new arrays that nobody else sees while they are being written."""

    name = "JAX"

    def __init__(self, jax):
        self.jax = jax

    def view(self, array, name):
        if isinstance(array, self.jax.core.Tracer):
            raise Unsupported(f"{name} is a JAX tracer: call outside jax.jit, grad and vmap")
        devices = list(array.devices())
        if len(devices) != 1:
            raise Unsupported(
                f"{name} is spread over {len(devices)} devices: call in jax.jit, or pass an array on one device, "
                f"such as jax.device_put({name}, jax.devices()[0])"
            )
        dtype = numpy_dtype_name(array.dtype, name)
        if devices[0].platform == "cpu":
            host = np.asarray(array)  # no copy on this platform
            strides = tuple([stride // host.itemsize for stride in host.strides])
            return View(array, self, host.ctypes.data, host.shape, strides, dtype, CPU, 0, False)
        if devices[0].platform not in ("gpu", "cuda"):
            raise Unsupported(f"{name} is on platform {devices[0].platform}: only cpu and cuda are served")
        array.block_until_ready()
        pointer, index = array.unsafe_buffer_pointer() if array.size else None, devices[0].local_hardware_id
        return View(array, self, pointer, array.shape, dense_strides(array.shape), dtype, CUDA, index, False)

    def copy(self, view, shape, dtype, name):
        array = self.jax.numpy.broadcast_to(view.owner[once(shape)], shape)
        return self.view(array if dtype == view.dtype else array.astype(dtype), name)

    def empty(self, like, shape, dtype):
        return self.full(like, shape, dtype, 0)

    def full(self, like, shape, dtype, value):
        dtype = like.owner.dtype if dtype == like.dtype else np.dtype(dtype)
        if like.device == CPU:
            host = np.full(shape, value, dtype)
            view = NUMPY.view(host, "out")
            view.owner, view.door = (host, list(like.owner.devices())[0]), self
            return view
        return self.view(self.jax.numpy.full(shape, value, dtype, device=list(like.owner.devices())[0]), "out")

    def result(self, view):
        if view.device == CPU:
            host, device = view.owner
            return self.jax.device_put(host, device)
        synchronize(view.index, None)
        return view.owner
