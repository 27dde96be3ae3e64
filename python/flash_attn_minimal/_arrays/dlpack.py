"""The door of arrays with DLPack."""

from __future__ import annotations

import copy
import ctypes as ct

import numpy as np

from ..errors import BadArgument, Unsupported
from .door import CPU, CUDA, ForeignDoor, View, dense_strides
from .driver import synchronize
from .numpy import NUMPY


class _DLTensor(ct.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ct.c_void_p),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("ndim", ct.c_int32),
        ("code", ct.c_uint8),
        ("bits", ct.c_uint8),
        ("lanes", ct.c_uint16),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("byte_offset", ct.c_uint64),
    ]


class _DLManagedTensorVersioned(ct.Structure):
    _fields_ = [
        ("major", ct.c_uint32),
        ("minor", ct.c_uint32),
        ("manager_ctx", ct.c_void_p),
        ("deleter", ct.c_void_p),
        ("flags", ct.c_uint64),
        ("tensor", _DLTensor),
    ]


_capsule_name = ct.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ct.c_char_p, [ct.py_object]
_capsule_pointer = ct.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ct.c_void_p, [ct.py_object, ct.c_char_p]


class DLPackDoor(ForeignDoor):
    """The view keeps the DLPack capsule without consuming it: when the view goes, the capsule frees the memory."""

    _devices = {1: CPU, 3: CPU, 2: CUDA, 13: CUDA}  # host, pinned host, CUDA, CUDA managed
    _dtypes = {
        (2, 32): "float32",
        (2, 16): "float16",
        (4, 16): "bfloat16",
        (2, 64): "float64",
        (6, 8): "bool",
        (1, 8): "uint8",
        (1, 64): "uint64",
    }
    _dtypes |= {(0, 8): "int8", (0, 32): "int32", (0, 64): "int64", (10, 8): "float8_e4m3fn"}

    def view(self, array, name):
        kind = int(array.__dlpack_device__()[0])
        if kind not in self._devices:
            raise Unsupported(
                f"{name} is on DLPack device type {kind}: only host memory (1, 3) and CUDA (2, 13) are served"
            )
        device = self._devices[kind]
        stream = 1 if device == CUDA else None  # the legacy default stream
        try:
            capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = array.__dlpack__(stream=stream)
        title = _capsule_name(capsule)
        if title == b"dltensor_versioned":
            managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, title))
            tensor, writable = managed.tensor, not managed.flags & 1
        elif title == b"dltensor":
            tensor, writable = _DLTensor.from_address(_capsule_pointer(capsule, title)), True
        else:
            raise BadArgument(f"{name}.__dlpack__() returned a capsule named {title!r}, not a fresh dltensor")
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense_strides(shape)
        dtype = self._dtypes.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        dtype = dtype or f"DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)"
        pointer = tensor.data + tensor.byte_offset if tensor.data else None
        index = tensor.device_id if device == CUDA else 0
        return View((array, capsule), self, pointer, shape, strides, dtype, device, index, writable)

    def join(self, views):
        """Waits for the call, which ran on the legacy default stream: DLPack cannot make a producer's stream wait."""
        if views[0].device == CUDA:
            synchronize(views[0].index, None)

    def empty(self, like, shape, dtype):
        array, _ = like.owner
        if like.device == CPU and not hasattr(array, "__array_namespace__"):
            try:  # NumPy has bfloat16 only where ml_dtypes has been imported
                host = np.empty(shape, dtype)
            except TypeError:
                raise Unsupported(
                    f"{self.name} does not say how to make a {dtype} array, nor does NumPy without ml_dtypes: pass out="
                ) from None
            return NUMPY.view(host, "out")
        bare = copy.copy(like)
        bare.owner = array
        return super().empty(bare, shape, dtype)

    def result(self, view):
        return view.owner[0]
