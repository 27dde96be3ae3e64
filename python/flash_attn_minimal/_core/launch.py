"""Launches filled structs with the workspace that they need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from .._arrays import View
from ..errors import WorkspaceTooSmall
from . import recordings
from .library import load, query_name
from .structs import CPU, AttentionPlan, new


class _Scratch(recordings.Scratch, threading.local):
    pass


_scratch = _Scratch()


def query_of(name: str) -> Callable[[Any, AttentionPlan], int]:
    """The library's query about a call of fa_<name>: a function of its struct and a plan."""
    return getattr(load(), query_name(name))


def launch_with_workspace(name: str, struct: Any, args: Any, views: list[View], written: Iterable[View | None]) -> Any:
    """Calls fa_<name>(struct). The call is tried first with the memory at hand; only if the library says that it needs
    more workspace is the size queried and the memory allocated. Returns the workspace of a call on a GPU, else None.
    args: the struct, perhaps in `struct`, that gets the workspace; written: the arrays besides `views` that the call
    writes."""
    lib, qv, arrays = load(), views[0], [*views, *written]
    if qv.door.launch:
        qv.door.scratch(args, lambda plan: query_of(name)(struct, plan))
        recordings.run(lib, name, struct, None, arrays)
        return None
    on_cpu, recording = qv.device == CPU, recordings.current()
    kept = recording.scratch if recording else _scratch
    if on_cpu:
        # `held` keeps the buffer: a finalizer or signal handler in this thread may make calls that replace the scratch.
        held, args.workspace, args.workspace_bytes = kept.place
    stream = None if on_cpu else qv.door.stream(views)
    scratch = None
    try:
        recordings.run(lib, name, struct, stream, arrays)
    except WorkspaceTooSmall:
        plan = new(AttentionPlan)
        query_of(name)(struct, plan)
        size = plan.workspace_bytes
        if on_cpu:
            held, args.workspace, args.workspace_bytes = kept.grow(size)
            if recording:
                recording.keep(held)
        else:
            scratch = qv.door.empty(qv, (size,), "uint8")
            args.workspace, args.workspace_bytes = scratch.pointer, size
        recordings.run(lib, name, struct, stream, arrays)
    return scratch
