"""Workspaces of exactly the size that a query returns, between guards, in place of those that the Python layer gives.

Inside `workspaces(place)` calls of the thread are not repeated from a prepared call, and the library's functions get a
workspace that is made here. `Guards.check` checks it when the work is done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_attn_minimal._core import repeats
from flash_attn_minimal._core.library import load
from flash_attn_minimal._core.structs import AttentionPlan, new
from flash_attn_minimal.distributed import _rank_call, _structs
from flash_attn_minimal.transformer import _library as _transformer

from ..arrays import ALIGNMENT, GUARD, poison
from ..judge import Wrong

# The functions that take a workspace, their queries, and the field that points to the struct with the workspace.
FUNCTIONS = {
    "fa_attention_forward": ("fa_attention_query", None),
    "fa_attention_backward": ("fa_attention_backward_query", "forward"),
    "fa_kvcache_attention": ("fa_kvcache_query", "attention"),
    "fa_w4_linear": ("fa_w4_linear_query", None),
    "fa_w4_linear_chain": ("fa_w4_linear_chain_query", None),
}


class Guards:
    """The workspaces of the calls of one step."""

    def __init__(self, place: Any):
        self.place, self.kept = place, []

    def workspace(self, name: str, size: int) -> int:
        """Makes `size` bytes of NaN between guards, and returns their address."""
        end = GUARD + size
        whole = poison(-(-(end + GUARD) // ALIGNMENT) * ALIGNMENT, size)
        memory = self.place.upload(whole)
        self.kept.append((name, memory, whole, end, size))
        return self.place.address(memory) + GUARD

    def check(self) -> None:
        """Raises Wrong if a byte around a workspace has changed. The work must be done."""
        for name, memory, whole, end, size in self.kept:
            after = self.place.download(memory)
            changed = np.flatnonzero(after != whole)
            changed = changed[(changed < GUARD) | (changed >= end)]
            if len(changed):
                at = int(changed[0])
                where = f"{GUARD - at} bytes before" if at < GUARD else f"{at - end} bytes behind"
                raise Wrong(f"{name}: {len(changed)} bytes changed around its workspace of {size}, the first {where}")


class _Thread(threading.local):
    guards: Guards | None = None


_thread = _Thread()
_lock = threading.Lock()


def _call(name: str, args: Any, stream: Any) -> Any:
    guards, real = _thread.guards, _real[name]
    if guards is None:
        return real(args, stream)
    query, field = FUNCTIONS[name]
    inner, plan = getattr(args, field).contents if field else args, new(AttentionPlan)
    getattr(load(), query)(args, plan)
    size, before = plan.workspace_bytes, (inner.workspace, inner.workspace_bytes)
    inner.workspace, inner.workspace_bytes = guards.workspace(name, size) if size else None, size
    try:
        return real(args, stream)
    finally:
        inner.workspace, inner.workspace_bytes = before


_real: dict[str, Any] = {}


def install() -> None:
    """Wraps the library's functions, once in a process. Outside of `workspaces` the wrappers only pass calls on. A call
    over ranks whose workspace is smaller than the library is told raises Wrong, instead of writing past its end."""
    with _lock:
        if _real:
            return
        lib = load()
        _transformer.load(), _structs.load()  # these declare the types of its functions
        for name in FUNCTIONS:
            _real[name] = getattr(lib, name)
            wrapper = lambda args, stream, name=name: _call(name, args, stream)  # noqa: E731
            wrapper.argtypes = _real[name].argtypes  # type: ignore[attr-defined]
            setattr(lib, name, wrapper)
        find, workspace = repeats.Repeats.find, _rank_call.RankCall._workspace

        def found(self, *given, **options):
            return (None, None) if _thread.guards else find(self, *given, **options)

        def checked(self, group, size, array):
            kept, address, told = workspace(self, group, size, array)
            there = 0 if kept is None else int(np.prod(kept.shape))
            if there < told or told < size:
                text = f"fa_distributed_{self.name} needs {size} bytes of workspace, is told of {told}, and has {there}"
                raise Wrong(text)
            return kept, address, told

        repeats.Repeats.find, _rank_call.RankCall._workspace = found, checked  # type: ignore[method-assign]


@contextlib.contextmanager
def workspaces(place: Any) -> Iterator[Guards]:
    install()
    guards = _thread.guards = Guards(place)
    try:
        yield guards
    finally:
        _thread.guards = None
