"""A rank's call in the form that the library takes, prepared once and repeated at other addresses.

Most calls differ from an earlier one only in addresses. Everything that the full checks find follows from the call's
signature (_core/repeats.py). So a group keeps the structs of its calls, and the next call of the same signature
fills in the addresses, allocates and launches. The size of the workspace does not follow from the signature: see the
comment above Prepared._new_workspace.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
from collections.abc import Callable
from typing import Any

from .. import _arrays
from .._arrays import View
from .._core import recordings
from .._core.structs import CPU, new
from ..errors import Unsupported, WorkspaceTooSmall
from ._structs import KINDS, DistributedPlan, load
from .groups import Group

_MOST_PREPARED = 256  # calls that a group keeps; then the table is cleared


class Prepared:
    """The structs of a call, their fields that vary, and the call's plan."""

    def __init__(self, name: str, outer: ct.Structure, inner: ct.Structure, like: View, kept: Any):
        """fa_distributed_<name> takes `outer`; the workspace goes into `inner`. like: the View of q; kept: keeps alive
        what the structs point to besides arrays."""
        self.name, self.outer, self.inner, self.kept = name, outer, inner, kept
        self.door, self.on_cpu, self.index = like.door, like.device == CPU, like.index
        self.places: list[tuple[ct.Structure, str] | None] = []  # (struct, field) for each array of the caller
        self.written: list[int] = []  # positions of the arrays that the call writes, if the framework counts writes
        self.outputs: list[tuple] = []  # (struct, field, its View; later a maker), or (position in arrays,)
        self.plan = new(DistributedPlan)
        self._workspace_bytes = 0  # the size that the last call of this signature had
        self._make_workspace: Callable | None = None  # on a GPU: makes a workspace of this size

    def output(self, struct: ct.Structure, field: str, view: View, given: int | None = None) -> None:
        """Adds a result: a new array, or number `given` of the caller's arrays."""
        setattr(struct, field, view.pointer)
        self.outputs.append((struct, field, view) if given is None else (given,))

    def ask(self, kind: str, rank: int, size: int) -> DistributedPlan:
        """Fills the plan by the library's query."""
        query = "fa_distributed_query" if self.name == "forward" else f"fa_distributed_{self.name}_query"
        getattr(load(), query)(self.outer, KINDS[kind], rank, size, self.plan)
        return self.plan

    def call(self, group: Group, arrays: tuple, views: list[View], sign: tuple | None) -> tuple:
        """Prepares this call on the group, and afterwards keeps it for the next call of this signature. Returns, for
        Group.collective, a function that launches and a function that returns the results."""
        self.ask(group.kind, group.rank, group.size)
        if sign is not None and not self._reads(arrays):  # a copied array has to be copied again at every call
            sign = None
        stream = None if self.on_cpu else self.door.stream(views)
        workspace = self._new_workspace(group, views[0])

        if self.door.wrote:
            given = {output[0] for output in self.outputs if len(output) == 1}
            owners = [view.owner for view in views if view.written]
            self.written = [i for i, x in enumerate(arrays) if i in given or any(x is owner for owner in owners)]

        def finish() -> list[Any]:
            self._wrote(arrays)
            if self.door.join:
                self.door.join([*views, *[output[2] for output in self.outputs if len(output) > 1]])
            results = [
                arrays[output[0]] if len(output) == 1 else output[2].door.result(output[2]) for output in self.outputs
            ]
            if sign is not None:
                self._keep(group, sign, views[0])
            return results

        return self._launcher(group, stream, arrays, (views, workspace)), finish

    def _reads(self, arrays: tuple) -> bool:
        """Whether the structs hold the addresses of the arrays that `again` would put into them."""
        return all(
            place is None or (getattr(*place) or 0) == self.door.address(array)
            for place, array in zip(self.places, arrays, strict=True)
        )

    def again(self, group: Group, arrays: tuple) -> tuple | None:
        """As `call`, for arrays described like those of that call; None if they have to be checked again."""
        address = self.door.address
        try:
            for place, array in zip(self.places, arrays, strict=True):
                if place is not None:
                    setattr(*place, address(array))
            results = []
            for output in self.outputs:
                if len(output) == 1:
                    results.append(arrays[output[0]])
                    continue
                struct, field, make = output
                results.append(make(arrays[0]))
                setattr(struct, field, address(results[-1]))
            stream = None if self.on_cpu else self.door.current_stream(self.index)
            workspace = self._next_workspace(group, arrays[0])
        except RuntimeError:
            return None

        def finish() -> list[Any]:
            self._wrote(arrays)
            return results

        return self._launcher(group, stream, arrays, workspace), finish

    def _wrote(self, arrays: tuple) -> None:
        if self.written:
            self.door.wrote([arrays[i] for i in self.written])

    def _keep(self, group: Group, sign: tuple, like: View) -> None:
        maker = self.door.maker
        self.outputs = [
            output if len(output) == 1 else (*output[:2], maker(like, output[2])) for output in self.outputs
        ]
        if len(group.calls) >= _MOST_PREPARED:
            group.calls.clear()
        group.calls[sign] = self

    # The workspace. The library compares the size that it is given with the plan of this call. A repeated call
    # first gets as much as the last call of its signature had. It may need another size, because lengths given as
    # numbers, alignment and the environment also matter. If the size was too small, `launch` asks for a new plan.

    def _new_workspace(self, group: Group, like: View) -> Any:
        """Makes a workspace for the plan. Returns an object that keeps it alive."""
        made, size = None, self.plan.workspace_bytes
        self._workspace_bytes, self._make_workspace = 0, None  # stays so if there is no memory
        if size and not self.on_cpu:
            made = like.door.empty(like, (size,), "uint8")
            self._make_workspace = like.door.maker(like, made)
        self._workspace_bytes = size
        return self._put_workspace(group, lambda _: made)

    def _next_workspace(self, group: Group, array: Any) -> Any:
        """Makes another workspace of the last size; `array` is one described like q."""
        make = self._make_workspace
        return self._put_workspace(group, lambda _: make and make(array))

    def _put_workspace(self, group: Group, make: Callable[[int], Any]) -> Any:
        size = self._workspace_bytes
        if self.on_cpu:
            kept = group.scratch(size)
            address, size = kept.ctypes.data, kept.size
        else:
            kept = make(size) if size else None
            address = None if kept is None else kept.pointer if isinstance(kept, View) else self.door.address(kept)
        self.inner.workspace, self.inner.workspace_bytes = address, size
        return kept

    def _launcher(self, group: Group, stream: int | None, arrays: tuple, kept: Any) -> Callable[[int], None]:
        lib, outer = load(), self.outer
        function = getattr(lib, f"fa_distributed_{self.name}")

        def launch(handle: int, kept: Any = kept) -> None:
            with contextlib.suppress(WorkspaceTooSmall):  # on all ranks or on none
                return function(handle, outer, stream)
            try:
                self.ask(group.kind, group.rank, group.size)
                kept = kept, self._new_workspace(group, _arrays.view(arrays[0], "q"))
            except Exception as error:
                group.refuse(error)
                raise
            lib.fa_group_reserve(handle, self.plan.shared_bytes)
            function(handle, outer, stream)

        return launch


def make_call(
    group: Group,
    arrays: tuple,
    start: Callable[[], tuple[tuple | None, Callable]],
    adjust: Callable[[Prepared], None] | None = None,
) -> list[Any]:
    """Makes a collective call; returns its results. start: returns the call's signature, and a function that prepares
    the call if it does not repeat an earlier one, returning (Prepared, its views). adjust: puts what the signature
    leaves out into a repeated call."""

    def ready() -> tuple:
        if recordings.current() is not None:
            raise Unsupported("a collective call is not recorded: the other ranks would not make it again")
        sign, prepare = start()
        if (known := group.calls.get(sign)) is not None:
            if adjust:
                adjust(known)
            if (again := known.again(group, arrays)) is not None:
                return again
        prepared, views = prepare()
        return prepared.call(group, arrays, views, sign)

    return group.collective(ready)
