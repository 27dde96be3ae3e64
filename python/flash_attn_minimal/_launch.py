"""Launching a filled struct, and the shortcut for calls like one before."""

from __future__ import annotations

import ctypes as ct
import struct
import threading
from collections.abc import Callable
from typing import Any

from . import _arrays, _modes, _record
from ._arrays import View
from ._library import (
    CPU,
    OK,
    WORKSPACE_TOO_SMALL,
    AttentionArgs,
    AttentionPlan,
    OutOfMemory,
    WorkspaceTooSmall,
    failure,
    load_packed_forward,
)
from ._pack import _ARGS_SIZE, _OPEN
from ._query import PLAN_SIZE

_KEPT_SCRATCH = 64 << 20  # bytes of CPU scratch that a thread keeps for its next call


class _Scratch(_record.Scratch, threading.local):
    pass


_scratch = _Scratch()


def _with_workspace(
    args: AttentionArgs, views: list[View], launch: Callable[[int | None], int], query: Callable[[AttentionPlan], int]
) -> View | None:
    """Runs a call described by args. Only when the library says that it needs workspace is the size asked for and the
    memory allocated. Returns the workspace of a call on a GPU."""
    qv = views[0]
    on_cpu, recording = qv.device == CPU, _record.current()
    kept = recording.scratch if recording else _scratch
    if on_cpu:
        args.workspace, args.workspace_bytes = kept.address, kept.size
    stream = None if on_cpu else qv.door.stream(views)
    scratch = None
    try:
        launch(stream)
    except WorkspaceTooSmall:
        plan = AttentionPlan()
        plan.struct_size = PLAN_SIZE
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
                kept.buffer, kept.address, kept.size = buffer, args.workspace, size
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
# knows the error texts. A new option of flash_attn_func belongs in _signature: in its test for plain calls, or in its
# result.
#
# Host time of a small call on an H200 machine, PyTorch (CuPy), microseconds, medians of one process:
#
#     the shortcut   12.2 (12.8): signature and look-up 2.4 (1.5), output 1.7 (2.2), library and launch 5, the rest 3
#     with out=      10.3 (9.8)

_VARYING = ("q_data", "k_data", "v_data", "out_data", "lse", "workspace", "workspace_bytes")


def _packing(offsets: list[int], size: int) -> tuple[struct.Struct, list[slice]]:
    """`size` bytes as a `struct` format, the 8-byte fields at the offsets as numbers and what lies between them as
    bytes; and where these bytes are."""
    pattern, gaps, end = "=", [], 0
    for offset in offsets:
        pattern += f"{offset - end}sQ"
        gaps.append(slice(end, offset))
        end = offset + 8
    return struct.Struct(pattern + f"{size - end}s"), [*gaps, slice(end, size)]


_PACKED_ARGS, _GAPS = _packing([getattr(AttentionArgs, name).offset for name in _VARYING], _ARGS_SIZE)
_pack_args = _PACKED_ARGS.pack
_MOST_REPEATS = 1024  # signatures kept, some 2 KB each; then the table starts afresh
_REPEATED_SCRATCH = 4096  # bytes; a call that needs more on the GPU has work enough to hide the long way
_repeats: dict[tuple, Callable | None] = {}  # None: seen once


def _signature(q, k, v, out, return_lse, options: tuple) -> tuple | None:
    """All that decides about a call but the addresses, or None for a call that takes the long way. Types are as strict
    as they are because equal keys need not be equally legal (1 == 1.0), and an array may change under its own hash."""
    (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        bias, mask, sinks, top_left, dropout_seed, dropout_offset, kernel, allow_tf32, num_threads,
        q_descale, k_descale, v_descale, out_dtype, fast_accum,
    ) = options  # fmt: skip
    try:
        plain = not _modes.compiling() and (
            alibi_slopes is bias is mask is sinks is dropout_seed is kernel is q_descale is out_dtype is None
            and k_descale is v_descale is None
            and deterministic is top_left is allow_tf32 is fast_accum is False
            and dropout_p == softcap == dropout_offset == 0
        )
    except (TypeError, ValueError):  # traced values and arrays of several numbers are neither true nor false
        return None
    if not plain:
        return None
    kind = type(q)
    door = _arrays._doors.get(kind)
    if (
        door is None
        or not (door.plain is kind is type(k) is type(v) and (out is None or type(out) is kind))
        or not (causal is True or causal is False)
        or not (return_lse is True or return_lse is False)
        or not (softmax_scale is None or type(softmax_scale) is float)
        or not (window_size is _OPEN or (type(window_size) is tuple and [*map(type, window_size)] == [int, int]))
        or type(num_threads) is not int
    ):
        return None
    about = door.describe(q, k, v, out)
    return about and (door, about, causal, softmax_scale, window_size, return_lse, num_threads)


def _repeat(
    args: AttentionArgs, qv: View, out_view: View, lse_view: View | None, scratch: View | None
) -> Callable[[Any, Any, Any, Any], Any]:
    """The same call on other arrays: a function of q, k, v and out. What it holds never changes and is no array, so
    threads use it side by side."""
    door, on_cpu, index = qv.door, qv.device == CPU, qv.index
    address, current_stream, forward = door.address, door.current_stream, load_packed_forward()
    make_out = door.maker(qv, out_view)
    make_lse = lse_view and door.maker(qv, lse_view)
    make_scratch = scratch and door.maker(qv, scratch)
    scratch_bytes = scratch.shape[0] if scratch else 0
    filled = bytes(args)
    head, q_strides, k_strides, v_strides, out_strides, options, nothing, tail = [filled[gap] for gap in _GAPS]

    def call(q, k, v, out):
        try:
            at_q, at_k, at_v = address(q), address(k), address(v)
            if out is None:
                result = make_out(q)
                at_out = address(result)
            else:
                result, at_out = out, address(out)
                if at_out == at_q or at_out == at_k or at_out == at_v:
                    return None
            at_lse = at_scratch = stream = None
            if make_lse:
                lse = make_lse(q)
                at_lse = address(lse)
        except RuntimeError:
            return None
        size = scratch_bytes
        if on_cpu:
            at_scratch, size = _scratch.address, _scratch.size
        else:
            stream = current_stream(index)
            if size:  # from the caller's allocator, which knows about streams and graph captures
                scratch = make_scratch(q)
                at_scratch = address(scratch)
        status = forward(
            _pack_args(
                head, at_q, q_strides, at_k, k_strides, at_v, v_strides, at_out, out_strides, at_lse or 0,
                options, at_scratch or 0, nothing, size, tail,
            ),
            stream,
        )  # fmt: skip
        if status != OK:
            if status == WORKSPACE_TOO_SMALL:  # another kernel than last time, or this thread's first call
                return None
            raise failure(status)
        return (result, lse) if make_lse else result

    return call


def _remember(
    signature: tuple,
    args: AttentionArgs,
    qv: View,
    out_view: View,
    lse_view: View | None,
    scratch: View | None,
) -> None:
    """For the next call of this signature; this one has been launched. Making a repeat costs some 3 us, so it waits
    for a signature's second call: a decoder's cache that grows has a new one at every step."""
    if scratch and scratch.shape[0] > _REPEATED_SCRATCH:
        return
    if len(_repeats) >= _MOST_REPEATS and signature not in _repeats:
        _repeats.clear()
    _repeats[signature] = _repeat(args, qv, out_view, lse_view, scratch) if signature in _repeats else None
