"""A rank's call as data (_core/prepared.py), made once with all checks and then repeated at other addresses.

Everything that the full checks find follows from the call's signature (_core/repeats.py). So a group keeps its calls,
and the next one of the same signature fills in addresses, allocates and launches.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
from collections.abc import Callable
from typing import Any

from .. import _arrays
from .._arrays import View
from .._core import recordings
from .._core.library import failure
from .._core.prepared import Prepared, runner
from .._core.structs import CPU, new
from ..errors import Unsupported, WorkspaceTooSmall
from ._structs import GROUP_CALLS, KINDS, DistributedPlan, load
from .groups import Group

_MOST_PREPARED = 256  # calls that a group keeps; then the table is cleared


class RankCall:
    """A call of one rank: its structs, and their fields that vary."""

    def __init__(self, name: str, outer: ct.Structure, inner: ct.Structure, like: View, kept: Any):
        """fa_distributed_<name> takes `outer`; the workspace goes into `inner`. like: the View of q; kept: keeps alive
        what the structs point to besides arrays."""
        self.name, self.outer, self.inner, self.kept = name, outer, inner, kept
        self.door, self.on_cpu, self.index = like.door, like.device == CPU, like.index
        self.places: list[tuple[ct.Structure, str] | None] = []  # (struct, field) for each array of the caller
        self.numbers: list[tuple[ct.Structure, str]] = []  # fields for numbers that a repeated call puts in anew
        self.written: list[int] = []  # positions of the arrays that the call writes, if the framework counts writes
        self.results: list[int | None] = []  # for each result its position in the caller's arrays; None: a new array
        self.made: list[tuple[ct.Structure, str, View]] = []  # the new arrays and their fields
        self.makers: list[Callable[[Any], Any]] = []  # how a repeated call makes them
        self._workspace_bytes, self._make_workspace = 0, None  # on a GPU: makes a workspace of this size

    def output(self, struct: ct.Structure, field: str, view: View, given: int | None = None) -> None:
        """Adds a result: a new array, or number `given` of the caller's arrays."""
        setattr(struct, field, view.pointer)
        self.results.append(given)
        if given is None:
            self.made.append((struct, field, view))

    def ask(self, kind: str, rank: int, size: int) -> DistributedPlan:
        """The plan of the library's query."""
        query = "fa_distributed_query" if self.name == "forward" else f"fa_distributed_{self.name}_query"
        plan = new(DistributedPlan)
        getattr(load(), query)(self.outer, KINDS[kind], rank, size, plan)
        return plan

    def call(self, group: Group, arrays: tuple, views: list[View], sign: tuple | None) -> tuple:
        """Prepares this call on the group, and afterwards keeps it for the next call of this signature. Returns, for
        Group.collective, a function that launches and a function that returns the results."""
        places = [place for place in self.places if place] + self.numbers
        places += [(struct, field) for struct, field, _ in self.made]
        filled = new(GROUP_CALLS[self.name])
        filled.args = ct.pointer(self.outer)
        filled.kind, filled.rank, filled.size = KINDS[group.kind], group.rank, group.size
        last = (self.inner, "workspace"), (self.inner, "workspace_bytes"), (filled, "group")
        fields = [(type(struct), field) for struct, field in (*places, *last)]
        self.prepared = Prepared(f"distributed_{self.name}", filled, fields, self.kept)
        given = zip(self.places, arrays, strict=True)
        if sign and not self.prepared.holds([self.door.address(array) for place, array in given if place]):
            sign = None  # a copied array has to be copied again at every call

        if self.door.wrote:
            owners = [view.owner for view in views if view.written]
            self.written = [i for i, x in enumerate(arrays) if i in self.results or any(x is owner for owner in owners)]

        def finish() -> list[Any]:
            made, self.made = [view for *_, view in self.made], []
            self._wrote(arrays)
            if self.door.join:
                self.door.join([*views, *made])
            if sign is not None:
                self.makers = [self.door.maker(views[0], view) for view in made]
                if len(group.calls) >= _MOST_PREPARED:
                    group.calls.clear()
                group.calls[sign] = self
            return self._in_order([view.door.result(view) for view in made], arrays)

        stream = None if self.on_cpu else self.door.stream(views)
        values = [getattr(*place) or 0 for place in places]
        return self._launcher(group, values, stream, arrays, views), finish

    def again(self, group: Group, arrays: tuple, numbers: tuple) -> tuple | None:
        """As `call`, for arrays described like those of that call; None if they have to be checked again. numbers: the
        values of self.numbers."""
        address = self.door.address
        try:
            values = [address(array) for place, array in zip(self.places, arrays, strict=True) if place]
            made = [make(arrays[0]) for make in self.makers]
            values += *numbers, *map(address, made)
            stream = None if self.on_cpu else self.door.current_stream(self.index)
        except RuntimeError:
            return None

        def finish() -> list[Any]:
            self._wrote(arrays)
            return self._in_order(made, arrays)

        return self._launcher(group, values, stream, arrays), finish

    def _in_order(self, made: list[Any], arrays: tuple) -> list[Any]:
        """The results: new arrays and given ones."""
        new = iter(made)
        return [next(new) if given is None else arrays[given] for given in self.results]

    def _wrote(self, arrays: tuple) -> None:
        if self.written:
            self.door.wrote([arrays[i] for i in self.written])

    def _workspace(self, group: Group, size: int, array: Any) -> tuple[Any, int, int]:
        """A workspace: what keeps it alive, its address, and its size, at least `size` bytes. array: q."""
        if self.on_cpu:
            buffer, _, has = group.scratch.place
            return group.scratch.place if buffer is not None and has >= size else group.scratch.grow(size)
        if not size:
            return None, 0, 0
        if size != self._workspace_bytes:
            like = _arrays.view(array, "q")
            made = like.door.empty(like, (size,), "uint8")
            self._workspace_bytes, self._make_workspace = size, like.door.maker(like, made)
            return made, made.pointer, size
        made = self._make_workspace(array)
        return made, self.door.address(made), size

    def _launcher(
        self, group: Group, values: list[int], stream: int | None, arrays: tuple, kept: Any = None
    ) -> Callable[[int], None]:
        run, prepared = runner(), self.prepared

        def plan() -> DistributedPlan:
            return prepared.plan(prepared.pack(*values, 0, 0, 0), DistributedPlan)

        def launch(handle: int, workspace: tuple, kept: Any = kept) -> None:
            _, address, size = workspace
            if status := run(prepared.address, prepared.pack(*values, address, size, handle), stream):
                raise failure(status, self.outer)

        workspace = group.scratch.place  # the library compares it with the plan of this call
        if not self.on_cpu or workspace[0] is None:
            workspace = self._workspace(group, plan().workspace_bytes, arrays[0])

        def launch_all(handle: int) -> None:
            with contextlib.suppress(WorkspaceTooSmall):  # on all ranks or on none
                return launch(handle, workspace)
            try:
                planned = plan()
                larger = self._workspace(group, planned.workspace_bytes, arrays[0])
            except Exception as error:
                group.refuse(error)
                raise
            load().fa_group_reserve(handle, planned.shared_bytes)
            launch(handle, larger)

        return launch_all


def make_call(
    group: Group,
    arrays: tuple,
    start: Callable[[], tuple[tuple | None, Callable]],
    numbers: Callable[[RankCall], tuple] = lambda known: (),
) -> list[Any]:
    """Makes a collective call; returns its results. start: returns the call's signature, and a function that prepares
    the call if it does not repeat an earlier one, returning (RankCall, its views). numbers: the values of a repeated
    call's `numbers`."""

    def ready() -> tuple:
        if recordings.current() is not None:
            raise Unsupported("a collective call is not recorded: the other ranks would not make it again")
        sign, prepare = start()
        if (known := group.calls.get(sign)) is not None:
            if (again := known.again(group, arrays, numbers(known))) is not None:
                return again
        prepared, views = prepare()
        return prepared.call(group, arrays, views, sign)

    return group.collective(ready)
