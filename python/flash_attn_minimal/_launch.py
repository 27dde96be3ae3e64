"""Launching a filled struct, and the shortcut for calls like one before."""

from __future__ import annotations

import ctypes as ct
import struct
import threading
from collections.abc import Callable

from . import _arrays
from ._arrays import View
from ._library import (
    CPU,
    OK,
    WORKSPACE_TOO_SMALL,
    AttentionArgs,
    AttentionPlan,
    WorkspaceTooSmall,
    failure,
    load,
    load_packed_forward,
)
from ._pack import _ARGS_SIZE, _OPEN

_PLAN_SIZE = ct.sizeof(AttentionPlan)
_KEPT_SCRATCH = 64 << 20  # bytes of CPU scratch that a thread keeps for its next call


class _Scratch(threading.local):
    buffer = None
    address = size = 0


_scratch = _Scratch()


def _launch(args: AttentionArgs, views: list[View]) -> View | None:
    """Runs a forward call; see _with_workspace."""
    lib = load()
    return _with_workspace(
        args,
        views,
        lambda stream: lib.fa_attention_forward(args, stream),
        lambda plan: lib.fa_attention_query(args, plan),
    )


def _with_workspace(
    args: AttentionArgs, views: list[View], launch: Callable[[int | None], int], query: Callable[[AttentionPlan], int]
) -> View | None:
    """Runs a call described by args. Only when the library says that it needs workspace is the size asked for and the
    memory allocated. Returns the workspace of a call on a GPU."""
    qv = views[0]
    on_cpu = qv.device == CPU
    if on_cpu:
        args.workspace, args.workspace_bytes = _scratch.address, _scratch.size
    stream = None if on_cpu else qv.door.stream(views)
    scratch = None
    try:
        launch(stream)
    except WorkspaceTooSmall:
        plan = AttentionPlan()
        plan.struct_size = _PLAN_SIZE
        query(plan)
        size = plan.workspace_bytes
        if on_cpu:
            buffer = (ct.c_char * size)()
            args.workspace, args.workspace_bytes = ct.addressof(buffer), size
            if size <= _KEPT_SCRATCH:
                _scratch.buffer, _scratch.address, _scratch.size = buffer, args.workspace, size
        else:
            scratch = qv.door.empty(qv, (size,), "uint8")
            args.workspace, args.workspace_bytes = scratch.pointer, size
        launch(stream)
    return scratch


# ---- the shortcut: a call like one before, on other arrays ----
#
# Most calls differ from an earlier one in nothing but addresses. All that the long way checks and derives follows from
# the call's signature, so a call that worked leaves its argument struct behind, and the next one of the same signature
# fills in the addresses, allocates and launches. What is not plain, and what does not fit, takes the long way, which
# knows the error texts. A new option of flash_attn_func belongs in its test for plain calls, or in the signature.
#
# Host time of a small call on an H200 machine, PyTorch (CuPy), microseconds, medians of 749 rounds:
#
#     the long way   22.7 (22.6)
#     the shortcut   13.9 (13.6): signature and look-up 3.1, output 2.0 (2.9), library with its launch 5.8, the rest 3.0
#     with out=      12.0 (10.3)

_VARYING = ("q_data", "k_data", "v_data", "out_data", "lse", "workspace", "workspace_bytes")


def _packing() -> tuple[struct.Struct, list[slice]]:
    """AttentionArgs as a `struct` format, the varying fields as numbers and what lies between them as bytes; and where
    these bytes are."""
    pattern, gaps, end = "=", [], 0
    for name in _VARYING:
        field = getattr(AttentionArgs, name)
        pattern += f"{field.offset - end}sQ"
        gaps.append(slice(end, field.offset))
        end = field.offset + field.size
    return struct.Struct(pattern + f"{_ARGS_SIZE - end}s"), [*gaps, slice(end, _ARGS_SIZE)]


_PACKED_ARGS, _GAPS = _packing()
_pack_args = _PACKED_ARGS.pack
_MOST_REPEATS = 1024  # signatures kept, some 2 KB each; then the table starts afresh
_REPEATED_SCRATCH = 4096  # bytes; a call that needs more on the GPU has work enough to hide the long way
_repeats: dict[tuple, _Repeat | None] = {}  # None: seen once


def _signature(q, k, v, out, causal, softmax_scale, window_size, return_lse, num_threads) -> tuple | None:
    """All that decides about a call but the addresses, or None for a call that takes the long way. Types are as strict
    as they are because equal keys need not be equally legal (1 == 1.0), and an array may change under its own hash."""
    door = _arrays.common_door(q, k, v, out)
    if (
        door is None
        or not (causal is True or causal is False)
        or not (return_lse is True or return_lse is False)
        or not (softmax_scale is None or type(softmax_scale) is float)
        or not (window_size is _OPEN or (type(window_size) is tuple and [*map(type, window_size)] == [int, int]))
        or type(num_threads) is not int
    ):
        return None
    describe = door.describe
    about_q, about_k, about_v = describe(q), describe(k), describe(v)
    about_out = describe(out) if out is not None else ()
    if about_q is None or about_k is None or about_v is None or about_out is None:
        return None
    return (
        door, about_q, about_k, about_v, about_out, causal, softmax_scale, window_size, return_lse, num_threads
    )  # fmt: skip


class _Repeat:
    """What calls of one signature share. Never changed once made, and holds no array: threads use it side by side."""

    __slots__ = (
        "address",
        "make_out",
        "make_lse",
        "make_scratch",
        "fixed",
        "scratch_bytes",
        "on_cpu",
        "index",
        "stream",
        "forward",
    )

    def __init__(self, args: AttentionArgs, qv: View, out_view: View, lse_view: View | None, scratch: View | None):
        door, filled = qv.door, bytes(args)
        self.address = door.address
        self.make_out = door.maker(qv, out_view)
        self.make_lse = lse_view and door.maker(qv, lse_view)
        self.make_scratch = scratch and door.maker(qv, scratch)
        self.scratch_bytes = scratch.shape[0] if scratch else 0
        self.fixed = [filled[gap] for gap in _GAPS]
        self.on_cpu, self.index, self.stream = qv.device == CPU, qv.index, door.current_stream
        self.forward = load_packed_forward()

    def call(self, q, k, v, out):
        """Launches, and returns what flash_attn_func returns; None sends the caller the long way instead."""
        address = self.address
        try:
            at_q, at_k, at_v = address(q), address(k), address(v)
            result = out if out is not None else self.make_out(q)
            at_out = address(result)
        except RuntimeError:
            return None
        if out is not None and (at_out == at_q or at_out == at_k or at_out == at_v):
            return None
        lse, at_lse = None, 0
        if self.make_lse:
            lse = self.make_lse(q)
            at_lse = address(lse)
        if self.on_cpu:
            stream, at_scratch, scratch_bytes = None, _scratch.address, _scratch.size
        else:
            stream, at_scratch, scratch_bytes = self.stream(self.index), 0, self.scratch_bytes
            if scratch_bytes:  # from the caller's allocator, which knows about streams and graph captures
                scratch = self.make_scratch(q)
                at_scratch = address(scratch)
        head, q_strides, k_strides, v_strides, out_strides, options, nothing, tail = self.fixed
        args = _pack_args(
            head, at_q, q_strides, at_k, k_strides, at_v, v_strides, at_out, out_strides, at_lse,
            options, at_scratch, nothing, scratch_bytes, tail,
        )  # fmt: skip
        status = self.forward(args, stream)
        if status != OK:
            if status == WORKSPACE_TOO_SMALL:  # another kernel than last time, or this thread's first call
                return None
            raise failure(status)
        return result if lse is None else (result, lse)


def _remember(
    signature: tuple, args: AttentionArgs, qv: View, out_view: View, lse_view: View | None, scratch: View | None
) -> None:
    """For the next call of this signature; this one has been launched. Making a _Repeat costs some 3 us, so it waits
    for a signature's second call: a decoder's cache that grows has a new one at every step."""
    if scratch and scratch.shape[0] > _REPEATED_SCRATCH:
        return
    if len(_repeats) >= _MOST_REPEATS and signature not in _repeats:
        _repeats.clear()
    _repeats[signature] = _Repeat(args, qv, out_view, lse_view, scratch) if signature in _repeats else None
