"""The doors: how arrays of NumPy, PyTorch, CuPy, JAX, Numba and anything with DLPack or __cuda_array_interface__ come
in and go out.

A door reads an array into a `View` (pointer, shape, strides in elements, dtype, device), allocates outputs of the
caller's own type through the caller's own framework, and names the stream that the caller's work is queued on. No
framework is ever imported: an array that reached us proves that its framework is in `sys.modules` already, and that is
the only place where we look.

    door        device     stream
    NumPy       CPU        -
    PyTorch     CPU, CUDA  torch.cuda.current_stream of the tensor's device
    CuPy        CUDA       cupy.cuda.get_current_stream of the array's device
    JAX         CPU, CUDA  the legacy default stream; inputs are waited for before the launch, the result after it
    Numba       CUDA       the array's own stream, else the default stream
    CUDA array  CUDA       the `stream` entry of __cuda_array_interface__, else the default stream
    DLPack      CPU, CUDA  the legacy default stream, which the producer was told to make wait for its own work
"""

from __future__ import annotations

import ctypes as ct
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ._library import CPU, CUDA, DEVICES, BadArgument, CudaError, Unsupported


class View:
    """One array as the library sees it. `owner` keeps the memory alive for as long as the view lives."""

    __slots__ = ("owner", "door", "pointer", "shape", "strides", "dtype", "device", "index", "writable")

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

    @property
    def place(self) -> str:
        """`cpu` or `cuda:0`, for messages."""
        return DEVICES[self.device] if self.device == CPU else f"{DEVICES[self.device]}:{self.index}"


class Door:
    """Interface of all doors; one instance serves all arrays of one framework.

    The lower half is for _launch.py's shortcut for repeated calls; a door whose `plain` is None has no shortcut."""

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

    def stream(self, views: list[View]) -> int | None:
        """The CUDA stream on which the caller's work on these arrays is queued; None is the legacy default stream."""
        return None

    def result(self, view: View) -> Any:
        """What the caller gets for an output."""
        return view.owner

    plain: type | None = None  # the framework's array class itself; subclasses take the long way
    address: Callable[[Any], int]  # of the first element; a RuntimeError when there is none

    def describe(self, q: Any, k: Any, v: Any, out: Any) -> tuple | None:
        """Everything that `view` reads of arrays of the plain class (out may be None) but the address, hashable: arrays
        with equal descriptions pass, or fail, the same checks. None: such arrays have no shortcut. No reference to an
        array is kept in it."""
        return None

    def facts(self, array: Any) -> tuple | None:
        """The same of one array."""
        return None

    def maker(self, like: View, result: View) -> Callable[[Any], Any]:
        """A function that makes one more array like `result`, uninitialised, from an array described like `like`."""
        raise NotImplementedError

    def current_stream(self, index: int) -> int | None:
        """The stream on which the caller's work on this CUDA device is queued."""
        return None


# ---- NumPy ----

_NUMPY_DTYPES = {np.dtype(t): t for t in ("float32", "float16", "float64", "bool", "uint8", "int8", "int32", "int64")}


def _numpy_dtype_name(dtype: Any, name: str) -> str:
    found = _NUMPY_DTYPES.get(dtype)
    if found is None:  # ml_dtypes' bfloat16 and float8 are known by their names
        if not dtype.isnative:
            raise BadArgument(f"{name} has dtype {dtype.str!r}: its byte order is not this machine's")
        found = str(dtype.name)
    return found


def _element_strides(strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise BadArgument(
            f"{name} has strides of {strides} bytes: not multiples of its element size of {itemsize} bytes"
        )
    return tuple([stride // itemsize for stride in strides])


class NumpyDoor(Door):
    name = "NumPy"
    plain = np.ndarray
    address = operator.attrgetter("ctypes.data")
    _facts = operator.attrgetter("dtype", "shape", "strides", "flags.num")  # flags: aligned and writable among them
    facts = property(operator.attrgetter("_facts"))

    def describe(self, q, k, v, out):
        facts = self._facts
        return facts(q), facts(k), facts(v), None if out is None else facts(out)

    def maker(self, like, result):
        shape, dtype = result.shape, result.owner.dtype
        return lambda array: np.empty(shape, dtype)

    def view(self, array, name):
        flags = array.flags
        if not flags.aligned:
            raise BadArgument(f"{name} is not aligned to its element size of {array.itemsize} bytes")
        dtype = array.dtype
        dtype_name = _NUMPY_DTYPES.get(dtype) or _numpy_dtype_name(dtype, name)
        itemsize = dtype.itemsize
        strides = tuple([stride // itemsize for stride in array.strides])  # aligned: each is a multiple
        pointer = array.ctypes.data
        return View(array, self, pointer, array.shape, strides, dtype_name, CPU, 0, flags.writeable)

    def empty(self, like, shape, dtype):
        array = np.empty(shape, like.owner.dtype if dtype == like.dtype else dtype)
        return self.view(array, "out")

    def full(self, like, shape, dtype, value):
        view = self.empty(like, shape, dtype)
        view.owner.fill(value)
        return view


# ---- PyTorch ----


class TorchDoor(Door):
    name = "PyTorch"

    def __init__(self, torch):
        self.torch = torch
        names = "float32 float16 bfloat16 float64 bool uint8 int8 int32 int64 float8_e4m3fn"
        self.dtypes = {getattr(torch, t): t for t in names.split() if hasattr(torch, t)}
        self.natives = {t: dtype for dtype, t in self.dtypes.items()}
        self.plain, self.address = torch.Tensor, torch.Tensor.data_ptr
        # 0.1 us; current_stream() builds a Stream object first. Only builds with CUDA have it.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.current_stream = raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    def describe(self, q, k, v, out):  # written out: a call for each tensor costs as much as three of its attributes
        try:
            if q.requires_grad or k.requires_grad or v.requires_grad or q.is_neg() or k.is_neg() or v.is_neg():
                return None
            if out is None:
                about_out = None
            elif out.requires_grad or out.is_neg():
                return None
            else:
                about_out = out.dtype, out.shape, out.stride(), out.device
            return (
                q.dtype, q.shape, q.stride(), q.device, k.dtype, k.shape, k.stride(), k.device,
                v.dtype, v.shape, v.stride(), v.device, about_out,
            )  # fmt: skip
        except RuntimeError:  # no strides; a layout that has them and is not strided has no address
            return None

    def facts(self, array):
        try:
            if array.requires_grad or array.is_neg():
                return None
            return array.dtype, array.shape, array.stride(), array.device
        except RuntimeError:  # as in describe
            return None

    def maker(self, like, result):
        shape, strides, dtype, device = result.shape, result.strides, result.owner.dtype, result.owner.device
        empty_like, empty_strided = self.torch.empty_like, self.torch.empty_strided
        if (shape, strides, result.dtype) == (like.shape, like.strides, like.dtype):
            return empty_like  # 4.1 us for memory on a GPU where empty_strided took 4.7 and new_empty 5.6
        return lambda array: empty_strided(shape, strides, dtype=dtype, device=device)

    def view(self, array, name):
        torch = self.torch
        if array.requires_grad and torch.is_grad_enabled():
            raise Unsupported(
                f"{name} requires a gradient, which this function does not have: "
                f"call under torch.no_grad(), or pass {name}.detach()"
            )
        if array.is_cuda:
            device, index = CUDA, array.get_device()
        elif array.is_cpu:
            device, index = CPU, 0
        else:
            raise Unsupported(f"{name} is on device {array.device}: only cpu and cuda are served")
        if array.layout is not torch.strided:
            raise BadArgument(f"{name} has layout {array.layout}: only torch.strided is served")
        if array.is_neg():
            raise BadArgument(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
        dtype = self.dtypes.get(array.dtype) or str(array.dtype).removeprefix("torch.")
        return View(array, self, array.data_ptr() or None, array.shape, array.stride(), dtype, device, index, True)

    def empty(self, like, shape, dtype):
        return self.view(like.owner.new_empty(shape, dtype=self.natives[dtype]), "out")

    def full(self, like, shape, dtype, value):
        return self.view(like.owner.new_full(shape, value, dtype=self.natives[dtype]), "out")

    def stream(self, views):
        first = views[0]
        return self.current_stream(first.index) if first.device == CUDA else None


# ---- CuPy ----


class CupyDoor(Door):
    name = "CuPy"
    address = operator.attrgetter("data.ptr")
    _facts = operator.attrgetter("dtype", "shape", "strides", "data.device_id")
    facts = property(operator.attrgetter("_facts"))

    def __init__(self, cupy):
        self.cupy = cupy
        self.plain = cupy.ndarray
        self.current_device = cupy.cuda.runtime.getDevice

    def view(self, array, name):
        memory = array.data
        dtype = array.dtype
        strides = _element_strides(array.strides, dtype.itemsize, name)
        return View(
            array, self, memory.ptr, array.shape, strides, _numpy_dtype_name(dtype, name), CUDA, memory.device_id, True
        )

    def describe(self, q, k, v, out):
        facts = self._facts
        return facts(q), facts(k), facts(v), None if out is None else facts(out)

    def maker(self, like, result):
        index, shape, dtype = result.index, result.shape, result.owner.dtype
        return lambda array: self._new(index, shape, dtype)

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

    def empty(self, like, shape, dtype):
        return self.view(self._new(like.index, shape, like.owner.dtype if dtype == like.dtype else dtype), "out")

    def full(self, like, shape, dtype, value):
        view = self.empty(like, shape, dtype)
        with self.cupy.cuda.Device(like.index):
            view.owner.fill(value)
        return view

    def stream(self, views):
        return self.current_stream(views[0].index)


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


# ---- JAX ----


class JaxDoor(Door):
    """JAX arrays never change after they exist and its streams are its own, so this door waits: for the inputs before
    the launch, and for the result before returning. Outputs are fresh arrays that nobody else has seen while they are
    being written."""

    name = "JAX"

    def __init__(self, jax):
        self.jax = jax

    def view(self, array, name):
        if isinstance(array, self.jax.core.Tracer):
            raise Unsupported(f"{name} is a JAX tracer: call outside jax.jit, grad and vmap")
        devices = list(array.devices())
        if len(devices) != 1:
            raise Unsupported(f"{name} is spread over {len(devices)} devices: pass an array on one device")
        dtype = _numpy_dtype_name(array.dtype, name)
        if devices[0].platform == "cpu":
            host = np.asarray(array)  # no copy on this platform
            strides = tuple([stride // host.itemsize for stride in host.strides])
            return View(array, self, host.ctypes.data, host.shape, strides, dtype, CPU, 0, False)
        if devices[0].platform not in ("gpu", "cuda"):
            raise Unsupported(f"{name} is on platform {devices[0].platform}: only cpu and cuda are served")
        array.block_until_ready()
        pointer, index = array.unsafe_buffer_pointer() if array.size else None, devices[0].local_hardware_id
        strides = tuple(int(np.prod(array.shape[axis + 1 :], dtype=np.int64)) for axis in range(array.ndim))
        return View(array, self, pointer, array.shape, strides, dtype, CUDA, index, False)

    def empty(self, like, shape, dtype):
        return self.full(like, shape, dtype, 0)

    def full(self, like, shape, dtype, value):
        dtype = like.owner.dtype if dtype == like.dtype else np.dtype(dtype)
        if like.device == CPU:
            host = np.full(shape, value, dtype)
            view = _NUMPY.view(host, "out")
            view.owner, view.door = (host, list(like.owner.devices())[0]), self
            return view
        return self.view(self.jax.numpy.full(shape, value, dtype, device=list(like.owner.devices())[0]), "out")

    def result(self, view):
        if view.device == CPU:
            host, device = view.owner
            return self.jax.device_put(host, device)
        _synchronize(view.index, None)
        return view.owner


# ---- anything with __cuda_array_interface__ or DLPack ----


class ForeignDoor(Door):
    """Arrays of a type we know nothing else about. Outputs come from the type's array-API namespace when it has one."""

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
        """The first array's stream; the work queued on the others' streams is waited for."""
        streams = [view.owner.__cuda_array_interface__.get("stream") for view in views]
        for view, stream in zip(views, streams, strict=True):
            if stream is not None and stream != streams[0]:
                _synchronize(view.index, stream)
        return streams[0]


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
    """The capsule is borrowed: it stays unconsumed inside the view, and frees itself with it."""

    _devices = {1: CPU, 3: CPU, 2: CUDA, 13: CUDA}  # host, pinned host, CUDA, CUDA managed
    _dtypes = {
        (2, 32): "float32",
        (2, 16): "float16",
        (4, 16): "bfloat16",
        (2, 64): "float64",
        (6, 8): "bool",
        (1, 8): "uint8",
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

    def empty(self, like, shape, dtype):
        array, _ = like.owner
        if like.device == CPU and not hasattr(array, "__array_namespace__"):
            try:  # bfloat16 is NumPy's only where ml_dtypes has been imported
                host = np.empty(shape, dtype)
            except TypeError:
                raise Unsupported(
                    f"{self.name} does not say how to make a {dtype} array, nor does NumPy without ml_dtypes: pass out="
                ) from None
            return _NUMPY.view(host, "out")
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


# ---- which door an array takes ----

_NUMPY = NumpyDoor()
_doors: dict[type, Door] = {
    np.ndarray: _NUMPY
}  # a type's door never changes, so threads may race to write the same entry
_single_doors: dict[str, Door] = {}


def _framework_door(module: str, make) -> Door:
    return _single_doors.setdefault(module, make(sys.modules[module]))


def _loaded(module: str, attribute: str) -> Any:
    """`module.attribute` when the module has been imported (to the end) by somebody, else None."""
    return getattr(sys.modules.get(module), attribute, None)


def _find_door(array: Any, name: str) -> Door:
    kind = type(array)
    if isinstance(array, np.ma.MaskedArray):
        raise BadArgument(
            f"{name} is a masked array, whose mask would be ignored: pass {name}.data, and the keys to skip as mask="
        )
    if isinstance(array, np.ndarray):
        return _NUMPY
    for module, attribute, make in (
        ("torch", "Tensor", TorchDoor),
        ("cupy", "ndarray", CupyDoor),
        ("jax", "Array", JaxDoor),
    ):
        base = _loaded(module, attribute)
        if isinstance(base, type) and isinstance(array, base):
            return _framework_door(module, make)
    if kind.__module__.startswith("numba") and hasattr(array, "__cuda_array_interface__"):
        return NumbaDoor(kind, sys.modules["numba.cuda"])
    if hasattr(array, "__dlpack__") and hasattr(
        array, "__dlpack_device__"
    ):  # knows its device and bfloat16, so it goes first
        return DLPackDoor(kind)
    if hasattr(array, "__cuda_array_interface__"):
        return CudaArrayDoor(kind)
    raise BadArgument(
        f"{name} is a {kind.__module__}.{kind.__qualname__}: expected an array of NumPy, PyTorch, CuPy, JAX or Numba, "
        "or one with __cuda_array_interface__ or DLPack"
    )


def view(array: Any, name: str) -> View:
    """The array as the library sees it; `name` is the argument's, for messages."""
    door = _doors.get(type(array))
    if door is None:
        door = _doors.setdefault(type(array), _find_door(array, name))
    return door.view(array, name)
