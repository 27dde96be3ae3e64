"""Recordings: what a CUDA graph is to a GPU, on the host.

A program that repeats the same calls on the same NumPy arrays makes them once inside a Recording. Calling the recording
makes them again, one behind the other in the library, which costs microseconds less a call than Python does. Only what
is in the arrays may have changed: lengths, tokens, pages.
"""

from __future__ import annotations

import ctypes as ct
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ._library import CPU, OPERATIONS, Call, Unsupported, load


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def current() -> Recording | None:
    """What this thread records into."""
    return _thread.recording


def run(lib: ct.CDLL, name: str, args: ct.Structure, stream: int | None, views: list[Any]) -> None:
    """lib.fa_<name>(args, stream); part of the recording where this thread has one. The Views, some of which may be
    None, keep the memory alive, and all that the call writes is among them. Where their door describes calls, this one
    is described."""
    if launch := views[0].door.launch:
        launch(name, args)
        return
    recording = _thread.recording
    if recording and views[0].device != CPU:
        raise Unsupported(f"a call on {views[0].place} is not recorded: a GPU has CUDA graphs for that")
    getattr(lib, f"fa_{name}")(args, stream)
    wrote(views)
    if recording:
        recording._calls.append((name, args))
        recording._kept.append(views)
        if views[0].door.wrote:
            recording._counted.append(views)


def wrote(views: Iterable[Any]) -> None:
    """After a call on these Views (or None) that the library has made, on the stream of the first: tells frameworks
    that count writes, and orders the call before what is queued on other streams."""
    given = [view for view in views if view is not None]
    for view in given:
        if view.written and view.door.wrote:
            view.door.wrote([view.owner])
    if given and given[0].door.join:
        given[0].door.join(given)


class Scratch:
    """Memory for workspaces on the CPU; it grows when a call needs more."""

    place: tuple[Any, int, int] = None, 0, 0  # the buffer, its address and size: who uses the address holds the buffer


class Recording:
    """Records what its thread does inside `with`: flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache,
    backward, merge, quantize_fp8 and the functions of ops.py. They run while they are recorded. The recording keeps
    every array that they read and write, and has a workspace of its own. A replay raises what the failing call would
    raise; the text has the call's number. Where the environment has since named a kernel, or a number of threads, that
    needs a larger workspace, the replay raises WorkspaceTooSmall.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], Any]] = []
        self._calls: list[tuple[str, ct.Structure]] = []  # those behind the last part
        self._kept: list[Any] = []
        self._counted: list[list[Any]] = []  # the Views of calls whose frameworks count writes
        self.scratch = Scratch()

    def __enter__(self) -> Recording:
        if _thread.recording:
            raise Unsupported("a recording inside a recording")
        _thread.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.recording = None
        self._close_calls()

    def function(self, function: Callable[[], Any]) -> None:
        """A function to be called in every replay at this place, behind the calls so far."""
        self._close_calls()
        self._parts.append(function)

    def keep(self, owner: Any) -> None:
        """`owner` lives as long as the recording."""
        self._kept.append(owner)

    def __call__(self) -> None:
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
        self._parts.append(lambda: run_calls(calls, count, None, None))
