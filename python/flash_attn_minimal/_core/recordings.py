"""Recordings do on the host what CUDA graphs do on a GPU.

A program that repeats the same calls on the same arrays in host memory makes them once inside a Recording. Calling the
recording makes them again, one after the other inside the library, which saves the microseconds that Python needs for
each call. Only the contents of the arrays may have changed: lengths, tokens, pages.
"""

from __future__ import annotations

import ctypes as ct
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..errors import OutOfMemory, Unsupported
from .library import load, share_threads
from .structs import CPU, OPERATIONS, Call


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def current() -> Recording | None:
    """The recording that this thread makes, or None."""
    return _thread.recording


def run(lib: ct.CDLL, name: str, args: ct.Structure, stream: int | None, views: list[Any]) -> None:
    """Calls lib.fa_<name>(args, stream), and adds the call to this thread's recording if there is one. views: all
    arrays of the call, which they keep alive; they include all that it writes; some may be None. If the door of the
    first only describes calls, it gets this one instead."""
    if launch := views[0].door.launch:
        launch(name, args)
        return
    recording = _thread.recording
    if recording and views[0].device != CPU:
        raise Unsupported(f"a call on {views[0].place} is not recorded: a GPU has CUDA graphs for that")
    if views[0].door.openmp and views[0].device == CPU:
        share_threads(views[0].door.openmp)
    getattr(lib, f"fa_{name}")(args, stream)
    wrote(views)
    if recording:
        recording._calls.append((name, args))
        recording._kept.append(views)
        if views[0].door.wrote:
            recording._counted.append(views)


def wrote(views: Iterable[Any]) -> None:
    """To be called after the library has run a call on these Views (some may be None), on the stream of the first:
    counts the writes for frameworks that count them, and makes work on other streams wait for the call."""
    given = [view for view in views if view is not None]
    for view in given:
        if view.written and view.door.wrote:
            view.door.wrote([view.owner])
    if given and given[0].door.join:
        given[0].door.join(given)


class Scratch:
    """Memory for workspaces on the CPU; it grows when a call needs more."""

    place: tuple[Any, int, int] = None, 0, 0  # the buffer, its address and size: users of the address hold the buffer
    most = 64 << 20  # bytes that stay for the next call

    def grow(self, size: int) -> tuple[Any, int, int]:
        """A new place of this size."""
        try:
            buffer = np.empty(size, np.uint8)
        except (MemoryError, OverflowError, ValueError):
            raise OutOfMemory(f"no memory for a workspace of {size} bytes") from None
        place = buffer, buffer.ctypes.data, size
        if size <= self.most:
            self.place = place
        return place


class Recording:
    """Records the calls that its thread makes inside `with`: flash_attn_func, flash_attn_varlen_func,
    flash_attn_with_kvcache, backward, merge, quantize_fp8 and the functions of ops.py. They also run while they are
    recorded. The recording keeps every array that they read or write, and has its own workspace. A replay raises what
    the failing call would raise, with the call's number in the text. If the environment has since named a kernel or a
    number of threads that needs a larger workspace, the replay raises WorkspaceTooSmall.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], Any]] = []
        self._calls: list[tuple[str, ct.Structure]] = []  # the calls since the last part
        self._kept: list[Any] = []
        self._counted: list[list[Any]] = []  # the Views of calls whose frameworks count writes
        self.scratch = Scratch()
        self.scratch.most = sys.maxsize

    def __enter__(self) -> Recording:
        if _thread.recording:
            raise Unsupported("a recording inside a recording")
        _thread.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.recording = None
        self._close_calls()

    def function(self, function: Callable[[], Any]) -> None:
        """Adds a function that every replay calls at this point, after the calls recorded so far."""
        self._close_calls()
        self._parts.append(function)

    def keep(self, owner: Any) -> None:
        """Keeps an object alive as long as the recording."""
        self._kept.append(owner)

    def __call__(self) -> None:
        if _thread.recording:
            raise Unsupported("a replay is not recorded: record its calls, or replay outside the recording")
        for part in self._parts:
            part()
        for views in self._counted:
            wrote(views)

    def _close_calls(self) -> None:
        if not self._calls:
            return
        structs = [args for _, args in self._calls]
        numbers = [1 + OPERATIONS.index(name) for name, _ in self._calls]
        calls = (Call * len(structs))(
            *((number, 0, ct.addressof(args)) for number, args in zip(numbers, structs, strict=True))
        )
        self._kept.append(structs)
        self._calls = []
        run_calls, count = load().fa_run_calls, len(calls)
        self._parts.append(lambda: run_calls(calls, count, None, None, None))
