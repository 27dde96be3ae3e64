"""Launches filled structs with the workspace that they need."""

from __future__ import annotations

import ctypes as ct
import threading
from collections.abc import Callable

from .._arrays import View
from ..errors import OutOfMemory, WorkspaceTooSmall
from . import recordings
from .structs import CPU, AttentionArgs, AttentionPlan, new

_KEPT_SCRATCH = 64 << 20  # bytes of CPU scratch that a thread keeps for its next call


class _Scratch(recordings.Scratch, threading.local):
    pass


_scratch = _Scratch()


def _with_workspace(
    args: AttentionArgs, views: list[View], launch: Callable[[int | None], int], query: Callable[[AttentionPlan], int]
) -> View | None:
    """Runs a call described by args. The call is tried first with the memory at hand; only if the library says that it
    needs more workspace is the size queried and the memory allocated. Returns the workspace of a call on a GPU."""
    qv = views[0]
    if qv.door.launch:
        qv.door.scratch(args, query)
        launch(None)
        return None
    on_cpu, recording = qv.device == CPU, recordings.current()
    kept = recording.scratch if recording else _scratch
    if on_cpu:
        # `held` keeps the buffer: a finalizer or signal handler in this thread may make calls that replace the scratch.
        held, args.workspace, args.workspace_bytes = kept.place
    stream = None if on_cpu else qv.door.stream(views)
    scratch = None
    try:
        launch(stream)
    except WorkspaceTooSmall:
        plan = new(AttentionPlan)
        query(plan)
        size = plan.workspace_bytes
        if on_cpu:
            try:
                buffer = (ct.c_char * size)()
            except (MemoryError, OverflowError, ValueError):
                raise OutOfMemory(f"no memory for a workspace of {size} bytes") from None
            args.workspace, args.workspace_bytes = ct.addressof(buffer), size
            if recording:
                recording.keep(buffer)
            if recording or size <= _KEPT_SCRATCH:
                kept.place = buffer, args.workspace, size
        else:
            scratch = qv.door.empty(qv, (size,), "uint8")
            args.workspace, args.workspace_bytes = scratch.pointer, size
        launch(stream)
    return scratch
