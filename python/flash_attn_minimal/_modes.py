"""What PyTorch may be doing around a call besides running it: tracing, transforming, recording, faking.

The library works on memory behind PyTorch's back. While PyTorch only runs what comes, nothing is lost; while it watches
(a trace, a mode, a transform, a tensor without memory), the call has to be an operator of PyTorch's own, or be refused.
PyTorch's answers cost 50 to 100 ns each; of those that are private, an absent one counts as "no".
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tensor: Any = ()  # torch.Tensor once PyTorch is there; isinstance() takes both


class _Operator(threading.local):
    runs = False  # whether this thread is inside one of our operators, which nobody watches


_operator = _Operator()


@contextmanager
def unwatched() -> Iterator[None]:
    """For the inside of an operator: what it does is no business of the modes around it."""
    before, _operator.runs = _operator.runs, True
    try:
        yield
    finally:
        _operator.runs = before


def active() -> bool:
    """Whether PyTorch does anything but run this thread's calls as they come. Replaced once PyTorch is there."""
    return _connect() and active()


def transforms() -> bool:
    """Whether grad, vmap, jvp, ... of torch.func are at work. Replaced likewise."""
    return False


def hidden() -> bool:
    """Whether a trace or dispatch mode is active: the part of `active` that a tensor itself does not show. Likewise."""
    return False


def _connect() -> bool:
    """Looks for PyTorch; False while nobody has imported it (to the end)."""
    global Tensor, active, transforms, hidden
    torch = sys.modules.get("torch")
    if not hasattr(torch, "export"):
        return False
    bits = torch._C
    compiling, forward_ad = torch.compiler.is_compiling, torch.autograd.forward_ad
    transforms = getattr(bits, "_are_functorch_transforms_active", _no)
    tracing = getattr(bits, "_is_tracing", _no)
    dispatch_modes = getattr(bits, "_len_torch_dispatch_stack", _no)
    function_mode = getattr(bits, "_is_torch_function_mode_enabled", _no)
    transforming, running = transforms, _operator

    def now_active() -> bool:
        return (
            compiling()
            or (
                tracing()
                or dispatch_modes() > 0
                or transforming()
                or (function_mode() and _overrides_functions(torch))
                or forward_ad._current_level >= 0
            )
            and not running.runs
        )

    def now_hidden() -> bool:
        return (tracing() or dispatch_modes() > 0) and not running.runs

    Tensor, active, hidden = torch.Tensor, now_active, now_hidden
    return True


def _no() -> bool:
    return False


def _overrides_functions(torch: Any) -> bool:
    """Whether a TorchFunctionMode is active besides `with torch.device(...)` and torch.set_default_device, which only
    say where new tensors go."""
    modes: Callable = getattr(torch.overrides, "_get_current_function_mode_stack", lambda: [None])
    return any(type(mode).__module__ != "torch.utils._device" for mode in modes())


def is_plain(array: Any) -> bool:
    """Whether a tensor is one of PyTorch's own classes and has memory, as all have inside an operator."""
    torch = sys.modules["torch"]
    return _operator.runs or (type(array) in (torch.Tensor, torch.nn.Parameter) and not array.is_meta)


def unreadable(kind: type) -> bool:
    """Whether tensors of this subclass answer operators themselves, as FakeTensor does."""
    return getattr(kind, "__torch_dispatch__", None) is not getattr(Tensor, "__torch_dispatch__", None)


def watcher() -> str | None:
    """The name of what a call must not be run behind, None when there is nothing. Modes that only look on are no
    reason: without an operator they miss a call, but its numbers are right."""
    torch = sys.modules["torch"]
    bits = torch._C
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if _operator.runs:
        return None
    if getattr(bits, "_is_tracing", _no)():
        return "torch.jit.trace"
    if transforms():
        return "a transform of torch.func"
    find, keys = getattr(bits, "_get_dispatch_mode", None), getattr(bits, "_TorchDispatchModeKey", None)
    for key, name in (("PROXY", "make_fx"), ("FAKE", "FakeTensorMode"), ("FUNCTIONAL", "functionalization")):
        if find and hasattr(keys, key) and find(getattr(keys, key)) is not None:
            return name
    return None


def caller() -> str:
    """The public function whose call this is, for messages."""
    frame = sys._getframe(1)
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").rpartition(".")
        name = frame.f_code.co_name
        if package.partition(".")[0] == __package__ and module[0].isalpha() and name[0].isalpha():
            return name
        frame = frame.f_back
    return "this function"


active()  # now, if PyTorch is there: torch.compile could not trace the looking
