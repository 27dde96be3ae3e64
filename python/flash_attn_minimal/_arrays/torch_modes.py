"""Whether PyTorch does more with a call than run it: traces, transforms, records or fakes it.

The library reads and writes memory without PyTorch's knowledge. That is right as long as PyTorch only executes calls.
Under a trace, a mode or a transform, and with tensors that have no memory, the call has to be an operator registered
with PyTorch, or is refused. Each function of PyTorch that is called here takes 50 to 100 ns. Private functions may be
missing from a release of PyTorch; a missing one counts as "no".
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import Unsupported

Tensor: Any = ()  # torch.Tensor once PyTorch is imported; isinstance(x, ()) is False


class _Operator(threading.local):
    runs = False  # whether this thread is inside one of this package's operators, where no mode watches


_operator = _Operator()


@contextmanager
def unwatched() -> Iterator[None]:
    """Around the body of an operator: PyTorch's modes have seen the operator, and do not see what its body does."""
    before, _operator.runs = _operator.runs, True
    try:
        yield
    finally:
        _operator.runs = before


def _no(*_: Any) -> bool:
    return False


# PyTorch's own functions, once PyTorch is imported.
compiling: Callable[[], bool] = _no  # while torch.compile traces a function, not while compiled code runs
tracing: Callable[[], bool] = _no  # torch.jit.trace
dispatch_modes: Callable[[], int] = _no
function_mode: Callable[[], bool] = _no
transforms: Callable[[], bool] = _no  # grad, vmap, jvp, ... of torch.func
grad_enabled: Callable[[], bool] = _no
inference: Callable[[], bool] = _no  # torch.inference_mode
batched: Callable[[Any], bool] = _no  # a tensor of torch.autograd.grad(is_grads_batched=True)
deterministic_algorithms: Callable[[], bool] = _no  # torch.use_deterministic_algorithms, with warn_only too
forward_ad: Any = None  # torch.autograd.forward_ad; its _current_level is -1 outside forward-mode differentiation


def active() -> bool:
    """Whether PyTorch does more with this thread's calls than run them."""
    if Tensor == () and not _connect():
        return False
    return sys.modules["torch"].compiler.is_compiling() or (
        not _operator.runs
        and (tracing() or dispatch_modes() > 0 or transforms() or overridden() or forward_ad._current_level >= 0)
    )


def _connect() -> bool:
    """Fetches PyTorch's functions. False while PyTorch is not imported, or its import has not finished."""
    global Tensor, compiling, tracing, dispatch_modes, function_mode, transforms, forward_ad
    global grad_enabled, inference, batched, deterministic_algorithms
    torch = sys.modules.get("torch")
    if not all(hasattr(torch, last) for last in ("export", "compiler")):
        return False
    if torch.compiler.is_compiling():  # what changes in the middle of a trace cannot be part of it
        raise Unsupported(
            "flash_attn_minimal was imported before PyTorch, and torch.compile meets its first call: "
            "import torch first, or flash_attn_minimal.torch before the compiled function runs"
        )
    compiling = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
    forward_ad = torch.autograd.forward_ad
    tracing = getattr(torch._C, "_is_tracing", _no)
    dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", _no)
    function_mode = getattr(torch._C, "_is_torch_function_mode_enabled", _no)
    transforms = getattr(torch._C, "_are_functorch_transforms_active", _no)
    grad_enabled, inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
    batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", _no)
    deterministic_algorithms = torch.are_deterministic_algorithms_enabled
    Tensor = torch.Tensor
    return True


def overridden() -> bool:
    """Whether a TorchFunctionMode is active, other than those of `with torch.device(...)` and torch.set_default_device,
    which only decide where new tensors go."""
    if not function_mode():
        return False
    modes: Callable = getattr(sys.modules["torch"].overrides, "_get_current_function_mode_stack", lambda: [None])
    return any(type(mode).__module__ != "torch.utils._device" for mode in modes())


def mapped() -> bool:
    """Whether vmap is among the transforms of torch.func that are active."""
    if not transforms():
        return False
    functorch = sys.modules["torch"]._C._functorch
    return any(level.key() == functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ())


def uncompiled(function: Callable) -> Callable:
    """Marks a function that PyTorch calls from its own code, such as the body of an operator. If torch.compile cannot
    compile a function as a whole, it compiles the Python functions that run below it; it leaves out this one, and what
    this one calls."""
    frames = getattr(getattr(sys.modules["torch"]._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def records() -> bool:
    """Whether PyTorch records calls on tensors that require a gradient. In inference mode it does not, whatever
    torch.enable_grad says."""
    return grad_enabled() and (compiling() or not inference())  # torch.compile cannot trace inference()


def deterministic(array: Any) -> bool:
    """Whether torch.use_deterministic_algorithms requires a backward pass of this tensor to give the same bits every
    time. As in PyTorch's own operators, the setting is read when the backward pass runs."""
    active()  # loads PyTorch's functions, if this is the first tensor
    return isinstance(array, Tensor) and deterministic_algorithms()


def is_plain(array: Any) -> bool:
    """Whether a tensor is of one of PyTorch's own classes and has memory. Inside an operator every tensor counts as
    plain."""
    torch = sys.modules["torch"]
    return _operator.runs or (type(array) in (torch.Tensor, torch.nn.Parameter) and not array.is_meta)


def must_see(*arrays: Any) -> bool:
    """Whether PyTorch must see a call on these arrays: a mode is active, or a tensor requires a gradient or is not a
    plain one."""
    if active():
        return any(isinstance(x, Tensor) for x in arrays)
    tensors = [x for x in arrays if isinstance(x, Tensor)]
    if not tensors:
        return False
    graded = records()
    return any(graded and x.requires_grad or not is_plain(x) for x in tensors)


def watcher() -> str | None:
    """The name of the mode or transform under which only an operator may be called, or None. Modes that only observe do
    not count: they miss a call that is not an operator, but its results are right."""
    torch = sys.modules["torch"]
    bits = torch._C
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if _operator.runs:
        return None
    if tracing():
        return "torch.jit.trace"
    if transforms():
        return "a transform of torch.func"
    find, keys = getattr(bits, "_get_dispatch_mode", None), getattr(bits, "_TorchDispatchModeKey", None)
    for key, name in (("PROXY", "make_fx"), ("FAKE", "FakeTensorMode"), ("FUNCTIONAL", "functionalization")):
        if find and hasattr(keys, key) and find(getattr(keys, key)) is not None:
            return name
    return None


def caller() -> str:
    """The name of the public function that was called, for messages."""
    frame = sys._getframe(1)
    while frame is not None:
        package, *modules = frame.f_globals.get("__name__", "").split(".")
        if package == "flash_attn_minimal" and all(x[0].isalpha() for x in (*modules, frame.f_code.co_name)):
            return frame.f_code.co_name
        frame = frame.f_back
    return "this function"


active()  # fetches PyTorch's functions now if it is imported: torch.compile could not trace _connect()
