"""A call of the library as data (fa_call of flash_attn.h): structs that are filled once, with holes for what varies.

Repeats of a call, the calls of ranks, recordings and programs of JAX are all such calls. The library fills the holes of
a copy, so nothing here ever changes, and threads use one Prepared at the same time.

The size of a workspace comes from the plan of the very call that gets it. What decides it, the kernel, depends on the
addresses (by their alignment) and on the environment, so the size that an earlier call had is no answer.
"""

from __future__ import annotations

import ctypes as ct
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .library import load
from .structs import OPERATIONS, AttentionPlan, Call, Hole, new

_POINTERS = (ct.c_void_p, ct.c_char_p)


@functools.cache
def pointers(kind: type[ct.Structure]) -> list[tuple[str, Any, int]]:
    """The fields of a struct that hold addresses: (name, type, offset)."""
    return [
        (name, of, getattr(kind, name).offset)
        for name, of in kind._fields_
        if of in _POINTERS or issubclass(of, ct._Pointer)
    ]


class Image:
    """A struct, the structs that it points to, and its strings, in one piece of memory."""

    def __init__(self, filled: ct.Structure):
        self.bytes = bytearray()
        self.links: list[tuple[int, int, int]] = []  # holes for the addresses of places in the image
        self.places: dict[type[ct.Structure], int] = {}  # where the struct of each type begins
        self._add(filled)

    def _add(self, filled: ct.Structure) -> int:
        kind = type(filled)
        begin = self.places[kind] = self._append(bytes(filled))
        for name, of, offset in pointers(kind):
            if of is ct.c_void_p or not (value := getattr(filled, name)):
                continue
            target = self._append(value + b"\0") if of is ct.c_char_p else self._add(value.contents)
            self.links.append((begin + offset, 8, -1 - target))
            self.bytes[begin + offset : begin + offset + 8] = bytes(8)
        return begin

    def _append(self, data: bytes) -> int:
        begin = len(self.bytes)
        self.bytes += data + bytes(-len(data) % 8)
        return begin

    def field(self, kind: type[ct.Structure], name: str) -> tuple[int, int]:
        """The first byte and the size of a field."""
        about = getattr(kind, name)
        return self.places[kind] + about.offset, about.size


class Prepared:
    """A call whose structs are filled.

    operation: the call is that of fa_<operation>, and `filled` its struct. fields: those that vary, each as (type of
    struct, name), in the order of the values that they get. kept: what the structs point to besides these.
    """

    def __init__(self, operation: str, filled: ct.Structure, fields: Sequence[tuple[type, str]], kept: Any = None):
        image = self.image = Image(filled)
        holes = image.links + [(*image.field(*field), i) for i, field in enumerate(fields)]
        self.filled, self.fields = filled, fields
        self.pack = struct.Struct(f"={len(fields)}Q").pack
        self._kept = kept, (Hole * len(holes))(*holes), (ct.c_char * len(image.bytes)).from_buffer(image.bytes)
        self.call = Call(
            1 + OPERATIONS.index(operation), 0, ct.addressof(self._kept[2]), len(image.bytes),
            ct.addressof(self._kept[1]), len(holes), len(fields),
        )  # fmt: skip
        self.address = ct.addressof(self.call)

    def holds(self, values: Sequence[int]) -> bool:
        """Whether the structs were filled with these values in the first of the fields."""
        places = [self.image.field(*field)[0] for field, _ in zip(self.fields, values, strict=False)]
        return [int.from_bytes(self.image.bytes[at : at + 8], "little") for at in places] == [*values]

    def plan(self, values: bytes, kind: type = AttentionPlan) -> Any:
        """The plan of the call with these values; of one that fails, the plan's status is not OK."""
        plan = new(kind)
        load().fa_query_call(self.address, values, ct.addressof(plan))
        return plan


@functools.cache
def runner() -> Callable[[int, bytes, int | None], int]:
    """fa_run_call, which takes the address of a call, packed values and a stream, and returns its status."""
    function = load()["fa_run_call"]  # indexing makes a new function object, with its own types
    function.restype, function.argtypes = ct.c_int, [ct.c_void_p, ct.c_char_p, ct.c_void_p]
    return function
