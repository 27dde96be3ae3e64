"""The doors (see _door.py) for arrays with __cuda_array_interface__ or DLPack whose framework has no door of its own,
and for Numba's arrays."""

from __future__ import annotations

import ctypes as ct

import numpy as np

from ._door import CPU, CUDA, NUMPY, Door, View, _device_of, _element_strides, _synchronize
from .errors import BadArgument, Unsupported


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

    def full(self, like, shape, dtype, value):
        view = self.empty(like, shape, dtype)
        view.owner[...] = value
        return view


class CudaArrayDoor(ForeignDoor):
    _names = {
        "f4": "float32",
        "f2": "float16",
        "f8": "float64",
        "b1": "bool",
        "u1": "uint8",
        "i1": "int8",
        "i4": "int32",
        "i8": "int64",
        "u8": "uint64",
    }

    def view(self, array, name):
        interface = array.__cuda_array_interface__
        pointer, read_only = interface["data"]
        code, shape = interface["typestr"], tuple(interface["shape"])
        itemsize = int(code[2:])
        dtype = (
            getattr(getattr(array, "dtype", None), "name", None)
            if code[1:] not in self._names
            else self._names[code[1:]]
        )
        if code[0] == ">":
            raise BadArgument(f"{name} has typestr {code!r}: its byte order is not this machine's")
        strides = interface.get("strides")
        if strides is None:
            strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
        else:
            strides = _element_strides(tuple(strides), itemsize, name)
        index = _device_of(pointer) if pointer else 0
        return View(array, self, pointer or None, shape, strides, dtype or code, CUDA, index, not read_only)

    def stream(self, views):
        """The first array's stream, after waiting for the work queued on the streams of the other arrays."""
        first = _stream(views[0])
        for view in views[1:]:
            if (stream := _stream(view)) is not None and stream != first:
                _synchronize(view.index, stream)
        return first

    def join(self, views):
        """Waits for the call if an array has another stream than the first, because its next use is queued there."""
        first = _stream(views[0])
        if any(stream is not None and stream != first for stream in map(_stream, views[1:])):
            _synchronize(views[0].index, first)


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
        legacy_default_stream = 1
        stream = legacy_default_stream if device == CUDA else None
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
        if tensor.strides:
            strides = tuple(tensor.strides[: tensor.ndim])
        else:
            strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
        dtype = self._dtypes.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        dtype = dtype or f"DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)"
        pointer = tensor.data + tensor.byte_offset if tensor.data else None
        view = View(
            (array, capsule),
            self,
            pointer,
            shape,
            strides,
            dtype,
            device,
            tensor.device_id if device == CUDA else 0,
            writable,
        )
        return view

    def join(self, views):
        """Waits for the call, which ran on the legacy default stream: DLPack cannot make a producer's stream wait."""
        if views[0].device == CUDA:
            _synchronize(views[0].index, None)

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
        bare = View(
            array, self, like.pointer, like.shape, like.strides, like.dtype, like.device, like.index, like.writable
        )
        return super().empty(bare, shape, dtype)

    def full(self, like, shape, dtype, value):
        view = self.empty(like, shape, dtype)
        view.door.result(view)[...] = value
        return view

    def result(self, view):
        return view.owner[0]
