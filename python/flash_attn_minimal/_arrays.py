"""The doors: how arrays of NumPy, PyTorch, CuPy, JAX, Numba and anything with DLPack or __cuda_array_interface__ come
in and go out.

A door reads an array into a `View` (pointer, shape, strides in elements, dtype, device), allocates outputs of the
caller's own type through the caller's own framework, and names the stream on which the caller's work is queued. No
framework is ever imported: if a caller passes an array, its framework is already in `sys.modules`, the only place where
doors look.

    door        device     stream
    NumPy       CPU        -
    PyTorch     CPU, CUDA  torch.cuda.current_stream of the tensor's device
    CuPy        CUDA       cupy.cuda.get_current_stream of the array's device
    JAX         CPU, CUDA  the legacy default stream; inputs are waited for before the launch, the result after it
    Numba       CUDA       the array's own stream, else the default stream
    CUDA array  CUDA       the `stream` entry of __cuda_array_interface__, else the default stream. Where the arrays of
                           a call (`out` included) have different streams, they are synchronized before and after it
    DLPack      CPU, CUDA  the legacy default stream, for which the producer is told to make its work ready; the call is
                           waited for
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _modes
from ._door import CPU, CUDA, NUMPY, Door, View, _element_strides, _numpy_dtype_name, _once, _synchronize
from ._foreign import CudaArrayDoor, DLPackDoor, NumbaDoor
from ._words import pass_array
from .errors import BadArgument, Unsupported

# ---- PyTorch ----


class TorchDoor(Door):
    name = "PyTorch"

    def __init__(self, torch):
        self.torch = torch
        names = "float32 float16 bfloat16 float64 bool uint8 int8 int32 int64 uint64 float8_e4m3fn"
        self.dtypes = {getattr(torch, t): t for t in names.split() if hasattr(torch, t)}
        self.natives = {t: dtype for dtype, t in self.dtypes.items()}
        self.plain, self.address, self.strided = torch.Tensor, torch.Tensor.data_ptr, torch.strided
        self.tracing, self.dispatch_modes, self.function_mode = (
            _modes.tracing, _modes.dispatch_modes, _modes.function_mode,
        )  # fmt: skip
        self.forward_ad, self.records, self.transforms = (
            torch.autograd.forward_ad, _modes.records, _modes.transforms,
        )  # fmt: skip
        self.parameter = torch.nn.Parameter
        self.wrote = _version_counter(torch)
        # Takes 0.1 us; current_stream() builds a Stream object first. Only builds with CUDA have it.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.current_stream = raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    def describe(self, arrays, gradients=False):
        if (
            self.dispatch_modes()
            or self.tracing()  # looking at shapes would add to the graph
            or (self.function_mode() and _modes.overridden())
            or self.forward_ad._current_level >= 0
            or _modes.compiling()
        ):
            return None
        plain, parameter = self.plain, self.parameter
        about, graded = [], False
        try:
            for x in arrays:
                if x is None:
                    about.append(None)
                elif (type(x) is not plain and type(x) is not parameter) or x.is_neg():
                    return None
                else:
                    wants = x.requires_grad
                    graded = graded or wants
                    about += type(x), x.dtype, x.shape, x.stride(), x.device, wants
        except RuntimeError:  # a layout without strides; one that has strides but is not strided has no address
            return None
        recorded = graded and self.records()
        if recorded and (not gradients or self.transforms()):
            return None
        about.append(recorded)
        return tuple(about)

    def same(self, arrays, about, gradients=False):
        """Tests all tensors by one call of what torch.compile uses to decide whether its code serves a call: types,
        dtypes, devices, sizes, strides, requires_grad, and the state of PyTorch's dispatcher."""
        if len(set(map(id, arrays))) < len(arrays) or not _guards_hold(self.torch):  # guards want distinct tensors
            return super().same(arrays, about, gradients)
        guards = self.torch._C._dynamo.guards.TensorGuards
        check = guards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        # The guards test inference mode themselves.
        function_mode, forward_ad, grad_enabled = self.function_mode, self.forward_ad, _modes.grad_enabled
        inference = _modes.inference()
        dispatch_modes = self.dispatch_modes  # the guards miss a mode in the threads of a GPU's backward pass
        recorded, graded = about[-1], any([x.requires_grad for x in arrays])

        def test(others):
            return (
                check(*others)
                and not dispatch_modes()
                and not (graded and (grad_enabled() and not inference) is not recorded)
                and not (function_mode() and _modes.overridden())
                and forward_ad._current_level < 0
            )

        return test

    def maker(self, like, result, fill=None):
        shape, strides, dtype, device = result.shape, result.strides, result.owner.dtype, result.owner.device
        if fill is not None:
            full = self.torch.full
            return lambda array: full(shape, fill, dtype=dtype, device=device)
        empty_like, empty_strided = self.torch.empty_like, self.torch.empty_strided
        if (shape, strides, result.dtype) == (like.shape, like.strides, like.dtype):
            return empty_like  # 4.1 us for memory on a GPU where empty_strided took 4.7 and new_empty 5.6
        return lambda array: empty_strided(shape, strides, dtype=dtype, device=device)

    def view(self, array, name):
        if array.requires_grad and self.records():
            raise Unsupported(
                f"{name} requires a gradient, which this function does not have: "
                f"call under torch.no_grad(), or pass {name}.detach()"
            )
        if array.is_cuda:
            device, index = CUDA, array.get_device()
        elif array.is_cpu:
            device, index = CPU, 0
        else:
            raise Unsupported(
                f"{_modes.caller()}: {name} is on device {array.device}: only cpu and cuda are served"
                f"{'' if array.is_meta else f'; pass {name}.cpu()'}"
            )
        if array.layout is not self.strided:
            raise BadArgument(f"{name} has layout {array.layout}: only torch.strided is served; pass {name}.to_dense()")
        if array.is_neg():
            raise BadArgument(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
        dtype = self.dtypes.get(array.dtype) or str(array.dtype).removeprefix("torch.")
        try:
            pointer = array.data_ptr() or None
        except RuntimeError:
            kind = _modes.watcher() or "PyTorch's making"
            raise Unsupported(
                f"{_modes.caller()}: {name} is a tensor of {kind}, which has no memory of its own to read"
            ) from None
        return View(array, self, pointer, array.shape, array.stride(), dtype, device, index, True)

    def check_seen(self):
        if (self.tracing() or self.dispatch_modes()) and (watcher := _modes.watcher()):
            name = _modes.caller()
            hint = "; that of flash_attn_minimal.integrations.torch is" if name == "flash_attn_with_kvcache" else ""
            raise Unsupported(f"{name} is not served under {watcher}: PyTorch would not see what it does{hint}")

    def copy(self, view, shape, dtype, name):
        if self.tracing() or self.dispatch_modes():
            self.check_seen()
        array = view.owner[_once(shape)].to(self.natives[dtype])
        return self.view(array.expand(shape).contiguous(), name)

    def empty(self, like, shape, dtype):
        if self.tracing() or self.dispatch_modes():
            self.check_seen()
        return self._new(like.owner.new_empty(shape, dtype=self.natives[dtype]))

    def full(self, like, shape, dtype, value):
        if self.tracing() or self.dispatch_modes():
            self.check_seen()
        return self._new(like.owner.new_full(shape, value, dtype=self.natives[dtype]))

    def _new(self, array):
        view = self.view(array, "out")
        view.written = True  # every replay of a recording writes to it
        return view

    def stream(self, views):
        first = views[0]
        return self.current_stream(first.index) if first.device == CUDA else None


@functools.cache
def _guards_hold(torch: Any) -> bool:
    """Whether TensorGuards, a private class of PyTorch, exists and tells apart what must be told apart."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        return False
    try:
        x = torch.zeros(2, 2, device="cpu")
        check = guards.TensorGuards(x, x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = (
            x.t(), x[:1], x[:, :1], x[0], x[None], x.double(), x.bool(), x.to_sparse(), x.to("meta"),
            torch._neg_view(x), x.clone().requires_grad_(), torch.nn.Parameter(x, requires_grad=False),
        )  # fmt: skip
        return check(x, x.clone()) and not any([check(x, other) for other in others])
    except (RuntimeError, TypeError):
        return False


def _version_counter(torch: Any) -> Callable[[Sequence[Any]], None]:
    """A function that raises the version counters of tensors, as PyTorch's own in-place operations do, so that autograd
    notices when a saved tensor has been overwritten. Tensors made in inference mode have no counter."""
    increment = torch.autograd.graph.increment_version
    try:
        increment([])
    except (TypeError, RuntimeError):  # a release in which it takes one tensor, which must have a counter

        def each(arrays):
            for array in arrays:
                if not array.is_inference():
                    increment(array)

        return each
    return getattr(torch._C, "_increment_version", increment)  # the function that it calls: 0.1 us instead of 0.3


class TorchSubclassDoor(TorchDoor):
    """Tensors such as FakeTensor, which answer operators themselves and may have no memory to read."""

    plain = None

    def view(self, array, name):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise Unsupported(f"{_modes.caller()} is not served for {kind}, which {name} is: it has no memory to read")


# ---- CuPy ----


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
        strides = _element_strides(array.strides, dtype.itemsize, name)
        return View(
            array, self, memory.ptr, array.shape, strides, _numpy_dtype_name(dtype, name), CUDA, memory.device_id, True
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
        array = view.owner[_once(shape)]
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


# ---- JAX ----


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

    def copy(self, view, shape, dtype, name):
        array = self.jax.numpy.broadcast_to(view.owner[_once(shape)], shape)
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
        _synchronize(view.index, None)
        return view.owner


# ---- which door an array takes ----

_doors: dict[type, Door] = {
    np.ndarray: NUMPY
}  # a type's door never changes, so threads may race to write the same entry
_single_doors: dict[str, Door] = {}


def _framework_door(module: str, make) -> Door:
    return _single_doors.setdefault(module, make(sys.modules[module]))


def _loaded(module: str, attribute: str) -> Any:
    """`module.attribute` if somebody has imported the module (to the end), else None."""
    return getattr(sys.modules.get(module), attribute, None)


def _find_door(array: Any, name: str, first: tuple[str, View] | None, dtype: str) -> Door:
    kind = type(array)
    if isinstance(array, np.ma.MaskedArray):
        raise BadArgument(
            f"{name} is a masked array, whose mask would be ignored: pass {name}.data, and the keys to skip as mask="
        )
    if isinstance(array, np.ndarray):
        return NUMPY
    _modes.active()  # loads PyTorch's functions, if this is the first tensor
    if isinstance(array, _modes.Tensor) and _modes.unreadable(kind):
        return TorchSubclassDoor(sys.modules["torch"])
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
    ):  # tried before __cuda_array_interface__, because DLPack knows the device and bfloat16
        return DLPackDoor(kind)
    if hasattr(array, "__cuda_array_interface__"):
        return CudaArrayDoor(kind)
    raise BadArgument(
        f"{name}{_value(array)} is {_kind(array)}: expected an array of NumPy, PyTorch, CuPy, JAX or Numba, "
        f"or one with __cuda_array_interface__ or DLPack{_advice(array, name, first, dtype)}"
    )


def _kind(value: Any) -> str:
    """`a list`, `an int`, `a pandas.core.series.Series`, `None`."""
    if value is None:
        return "None"
    kind = type(value)
    named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if named[0] in 'aeiou' else 'a'} {named}"


def _value(value: Any) -> str:
    """`=0.5`, of single values and short texts."""
    short = isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) < 99)
    return f"={value!r}" if short and not isinstance(value, np.generic) else ""


def _advice(array: Any, name: str, first: tuple[str, View] | None, dtype: str) -> str:
    """Advice for plain Python numbers or lists of them: the call that makes an array. Only the factors of float8 may be
    single numbers."""
    numbers = (list, tuple, int, float, np.generic) if name.endswith("descale") else (list, tuple)
    if isinstance(array, bool) or not isinstance(array, numbers):
        return ""
    if first is None:
        return pass_array("NumPy", name, "", dtype)
    first_name, beside = first
    return pass_array(beside.door.name, name, first_name, dtype or f"{first_name}.dtype")


def view(array: Any, name: str, first: tuple[str, View] | None = None, dtype: str = "float32") -> View:
    """The array as the library sees it. The other arguments serve messages: name: the argument's; first: the name and
    the View of an earlier array; dtype: the dtype that it should have, '' for that of `first`."""
    door = _doors.get(type(array))
    if door is None:
        door = _doors.setdefault(type(array), _find_door(array, name, first, dtype))
    return door.view(array, name)
