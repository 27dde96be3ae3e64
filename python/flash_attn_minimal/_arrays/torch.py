"""The door of PyTorch's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BadArgument, Unsupported
from . import torch_modes
from .door import CPU, CUDA, Door, View, once


class TorchDoor(Door):
    name = "PyTorch"
    openmp = "libtorch_cpu.so"

    def __init__(self, torch):
        self.torch = torch
        names = "float32 float16 bfloat16 float64 bool uint8 int8 int32 int64 uint64 float8_e4m3fn"
        self.dtypes = {getattr(torch, t): t for t in names.split() if hasattr(torch, t)}
        self.natives = {t: dtype for dtype, t in self.dtypes.items()}
        self.plain, self.address, self.strided = torch.Tensor, torch.Tensor.data_ptr, torch.strided
        self.parameter = torch.nn.Parameter
        self.wrote = _version_counter(torch)
        # Takes 0.1 us; current_stream() builds a Stream object first. Only builds with CUDA have it.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.current_stream = raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    def describe(self, arrays, gradients=False):
        if (
            torch_modes.dispatch_modes()
            or torch_modes.tracing()  # looking at shapes would add to the graph
            or (torch_modes.function_mode() and torch_modes.overridden())
            or torch_modes.forward_ad._current_level >= 0
            or torch_modes.compiling()
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
        recorded = graded and torch_modes.records()
        if recorded and (not gradients or torch_modes.transforms()):
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
        function_mode, grad_enabled = torch_modes.function_mode, torch_modes.grad_enabled
        forward_ad, inference = torch_modes.forward_ad, torch_modes.inference()
        dispatch_modes = torch_modes.dispatch_modes  # the guards miss a mode in the threads of a GPU's backward pass
        recorded, graded = about[-1], any([x.requires_grad for x in arrays])

        def test(others):
            return (
                check(*others)
                and not dispatch_modes()
                and not (graded and (grad_enabled() and not inference) is not recorded)
                and not (function_mode() and torch_modes.overridden())
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
        if array.requires_grad and torch_modes.records():
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
                f"{torch_modes.caller()}: {name} is on device {array.device}: only cpu and cuda are served"
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
            kind = torch_modes.watcher() or "PyTorch's making"
            raise Unsupported(
                f"{torch_modes.caller()}: {name} is a tensor of {kind}, which has no memory of its own to read"
            ) from None
        return View(array, self, pointer, array.shape, array.stride(), dtype, device, index, True)

    def check_seen(self):
        if (torch_modes.tracing() or torch_modes.dispatch_modes()) and (watcher := torch_modes.watcher()):
            name = torch_modes.caller()
            hint = "; that of flash_attn_minimal.torch is" if name == "flash_attn_with_kvcache" else ""
            raise Unsupported(f"{name} is not served under {watcher}: PyTorch would not see what it does{hint}")

    def copy(self, view, shape, dtype, name):
        self.check_seen()
        array = view.owner[once(shape)].to(self.natives[dtype])
        return self.view(array.expand(shape).contiguous(), name)

    def empty(self, like, shape, dtype):
        self.check_seen()
        return self._new(like.owner.new_empty(shape, dtype=self.natives[dtype]))

    def full(self, like, shape, dtype, value):
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
        raise Unsupported(f"{torch_modes.caller()} is not served for {kind}, which {name} is: it has no memory to read")
