"""The shortcut for calls like one before.

Most calls differ from an earlier one in nothing but addresses. All that the long way checks and derives follows from
the call's signature, so a call that worked leaves its structs behind, and the next one of the same signature fills in
the addresses, allocates and launches. What is not plain, and what does not fit, takes the long way, which knows the
error texts.

Host time of a small call on an H200 machine, PyTorch (CuPy), microseconds, medians of one process: 12.2 (12.8), with
out= 10.3 (9.8) (docs/benchmarks/h200/overhead.md). The long way takes some 25 more.
"""

from __future__ import annotations

import ctypes as ct
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

from . import _arrays, _modes
from ._arrays import View
from ._checks import _OPEN
from ._launch import _scratch
from ._library import CPU, OK, WORKSPACE_TOO_SMALL, failure, load_packed

_MOST_REPEATS = 1024  # signatures kept, some 2 KB each; then the table starts afresh
_REPEATED_WORKSPACE = 4096  # bytes; a call that needs more on the GPU has work enough to hide the long way
_PLAIN = frozenset({bool, int, float, str, bytes, tuple, type(None)})  # the one tuple is window_size


def signature(arrays: tuple, values: tuple, window_size: Any) -> tuple | None:
    """All that decides about a call but the addresses, or None for a call that takes the long way. Some of `arrays` may
    be None, but not the first; `values` are the other arguments that may differ, window_size among them."""
    if _modes.compiling():
        return None
    types = tuple(map(type, values))
    if types not in _plain_types and not _is_plain(types):
        return None
    if window_size is not _OPEN and (type(window_size) is not tuple or [*map(type, window_size)] != [int, int]):
        return None
    door = _arrays._doors.get(type(arrays[0]))
    about = door and door.describe(arrays)
    return about and (door, about, values, types)


_plain_types: set[tuple] = set()


def _is_plain(types: tuple) -> bool:
    """Whether values of these types are numbers, names and None alone: no arrays, which change under their hash. The
    types are part of a signature, for equal values need not be equally legal (1 == 1.0 == True)."""
    if _PLAIN.issuperset(types):
        _plain_types.add(types)
    return types in _plain_types


class Repeats:
    """The calls of one function of the library that can be repeated."""

    def __init__(self, name: str, arrays: Sequence[str], *structs: tuple[type[ct.Structure], dict[str, str]]):
        """fa_<name> takes the last of the structs, which lie one behind the other. `arrays` names a call's arrays, q
        first and out last. Each struct comes with its fields that vary, all of 8 bytes, and what they hold: the address
        of an array, or of `lse`, `workspace` or `structs`, the size `workspace_bytes`, or the number of `keys`."""
        self.name, self.arrays = name, arrays
        self.known: dict[tuple, Callable | None] = {}  # None where the signature was seen once
        self.size, self.offsets = 0, {}
        for kind, fields in structs:
            self.passed = self.size  # where the last one begins
            self.offsets |= {source: self.size + getattr(kind, field).offset for field, source in fields.items()}
            self.size += ct.sizeof(kind)

    def remember(
        self,
        signature: tuple | None,
        structs: Sequence[ct.Structure],
        arrays: tuple,
        views: tuple[View, View, View | None, View | None],
        keys: tuple[int, int, int] | None = None,
    ) -> None:
        """For the next call of this signature; this one has been launched with these structs, on these arrays. views:
        of q, out, lse and workspace; keys, of a call with one length: how many there are, how many of them are new, and
        the most there may be. Making a repeat costs some 10 us, so it waits for a signature's second call: a decoder's
        cache that grows has a new one at every step."""
        workspace = views[3]
        if signature is None or (workspace and workspace.shape[0] > _REPEATED_WORKSPACE):
            return
        if len(self.known) >= _MOST_REPEATS and signature not in self.known:
            self.known.clear()
        self.known[signature] = self._repeat(structs, arrays, views, keys) if signature in self.known else None

    def _repeat(self, structs, arrays, views, keys) -> Callable[[tuple, Any], Any]:
        """The call on other arrays: a function of them and of the one length. It returns what the call returns, or None
        where the call must take the long way. What it holds never changes and is no array, so threads use it side by
        side."""
        q_view, out_view, lse_view, workspace_view = views
        door, on_cpu, index = q_view.door, q_view.device == CPU, q_view.index
        address, current_stream = door.address, door.current_stream
        given = [i for i, array in enumerate(arrays[:-1]) if array is not None]
        inputs_of = operator.itemgetter(*given)
        make_out = None if arrays[-1] is not None else door.maker(q_view, out_view)
        make_lse = lse_view and door.maker(q_view, lse_view)
        make_workspace = workspace_view and door.maker(q_view, workspace_view)
        alone = len(structs) == 1
        launch = load_packed(self.name, alone)
        new_keys, most_keys = keys[1:] if keys else (0, 0)
        # What varies, in the order in which `call` finds it, and the structs with gaps for it.
        sources = [self.arrays[i] for i in given] + ["out"] + ["lse"] * bool(make_lse)
        sources += ["workspace"] * bool(on_cpu or make_workspace) + ["workspace_bytes"] * on_cpu
        sources += ["keys"] * bool(keys) + ["structs"] * (not alone)
        layout, gaps, order = _packing([self.offsets[source] for source in sources], self.size)
        filled = b"".join(map(bytes, structs))
        parts: list[Any] = [0] * (2 * len(gaps) - 1)
        parts[::2] = [filled[gap] for gap in gaps]
        passed, pack, pack_into, memory_of = self.passed, layout.pack, layout.pack_into, ct.c_char * self.size

        def call(arrays, length):
            stream = None
            try:
                varying = [*map(address, inputs_of(arrays))]
                if make_out:
                    out = make_out(arrays[0])
                    varying.append(address(out))
                else:
                    out = arrays[-1]
                    at_out = address(out)
                    if at_out in varying[:3]:
                        return None
                    varying.append(at_out)
                if make_lse:
                    lse = make_lse(arrays[0])
                    varying.append(address(lse))
                if on_cpu:
                    varying += _scratch.address or 0, _scratch.size
                else:
                    stream = current_stream(index)
                    if make_workspace:  # from the caller's allocator, which knows about streams and graph captures
                        workspace = make_workspace(arrays[0])
                        varying.append(address(workspace))
            except RuntimeError:
                return None
            if keys:
                count = length + new_keys
                if not new_keys <= count <= most_keys:
                    return None
                varying.append(count)
            woven = parts.copy()
            if alone:
                woven[1::2] = order(varying)
                status = launch(pack(*woven), stream)
            else:
                memory = memory_of()
                start = ct.addressof(memory)
                varying.append(start)
                woven[1::2] = order(varying)
                pack_into(memory, 0, *woven)
                status = launch(start + passed, stream)
            if status != OK:
                if status == WORKSPACE_TOO_SMALL:  # another kernel than last time, or this thread's first call
                    return None
                raise failure(status)
            return (out, lse) if make_lse else out

        call.structs = structs  # `filled` holds addresses of theirs, such as that of the kernel's name
        return call


def _packing(offsets: list[int], size: int) -> tuple[struct.Struct, list[slice], Callable]:
    """`size` bytes as a `struct` format, the 8-byte fields at the offsets as numbers and what lies between them as
    bytes; where these bytes are; and what puts values of the fields, as they are listed, into the format's order."""
    pattern, gaps, end = "=", [], 0
    for offset in sorted(offsets):
        pattern += f"{offset - end}sQ"
        gaps.append(slice(end, offset))
        end = offset + 8
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    return struct.Struct(pattern + f"{size - end}s"), [*gaps, slice(end, size)], operator.itemgetter(*order)
