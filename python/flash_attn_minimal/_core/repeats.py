"""The shortcut for a call that repeats an earlier one.

Most calls differ from an earlier one only in addresses. Everything that the long way (forward.attend and similar
functions) checks and derives follows from the call's signature. So a call that worked leaves its structs, and the next
one of the same signature fills in the addresses, allocates and launches. A call that is not plain, or does not fit,
takes the long way, which has the texts of errors.

There are two tables. `known` has every signature; looking one up takes a description of every array. `latest` has, for
each set of options, the call that was repeated last, with a test whether other arrays are like that call's. The test is
cheaper than a description.

A small call with PyTorch arrays on a CPU takes 4.5 us this way, and the long way takes about 25 us more. Of the 4.5 us
the new output takes 0.8, the library's function 0.65 (half of that in ctypes), the test of the arrays 0.55, and the
arguments 0.45. A call that PyTorch records takes 12 us, of which PyTorch spends 3.5 on any autograd.Function and 0.8 on
what it saves; lse takes 1.1.
"""

from __future__ import annotations

import ctypes as ct
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _arrays
from .._arrays import View, torch_modes
from . import recordings
from .checks import OPEN
from .launch import _scratch
from .library import WORKSPACE_TOO_SMALL, failure
from .prepared import Prepared, runner
from .structs import CPU

_MOST_REPEATS = 1024  # signatures kept, about 2 KB each; then the tables are cleared
SEEDS = ("dropout_seed", "dropout_offset")  # of another value in each step of a training
_PLAIN = frozenset({bool, int, float, str, bytes, tuple, type(None)})  # tuples: names, and window_size


def signature(arrays: tuple, values: tuple, window_size: Any, gradients: bool = False) -> tuple | None:
    """All that a call depends on except the addresses, or None for a call that must take the long way. arrays: any but
    the first may be None; values: the other arguments that may differ, window_size among them; gradients: whether the
    function has gradients, so that PyTorch may record the call."""
    if torch_modes.compiling() or recordings.current() is not None:
        return None
    types = tuple(map(type, values))
    door = _are_plain(types, window_size) and _arrays._doors.get(type(arrays[0]))
    about = door and door.describe(arrays, gradients)
    return (door, about, values, types) if about else None


_plain_types: set[tuple] = set()


def _are_plain(types: tuple, window_size: Any) -> bool:
    """Whether values of these types are only numbers, names and None: an array's contents can change and its hash does
    not. The types are part of a signature, because equal values need not be equally legal (1 == 1.0 == True)."""
    if types not in _plain_types:
        if not _PLAIN.issuperset(types):
            return False
        _plain_types.add(types)
    return window_size is OPEN or _is_plain_window(window_size)


def _is_plain_window(window_size: Any) -> bool:
    return type(window_size) is tuple and [*map(type, window_size)] == [int, int]


class Made(NamedTuple):
    """An array that a call allocates."""

    view: View
    fill: float | None = None  # its value before the launch; None: uninitialised


class Repeat(NamedTuple):
    """A call that can be made again on other arrays."""

    same: Callable[[tuple], bool]  # whether arrays are like those of the call, and PyTorch is in the same mode
    call: Callable[[tuple, Any], Any]  # see Repeats._repeat


class Repeats:
    """The calls of one function of the library that can be repeated."""

    def __init__(self, name: str, *structs: tuple[type[ct.Structure], dict[str, str]]):
        """The function is fa_<name>. Each struct comes with its fields that vary, all of 8 bytes, by what they hold:
        the name of an array, for its address; `workspace_bytes`, a size; or a number's name: `keys`, one of SEEDS."""
        self.name = name
        self.known: dict[tuple, Repeat | None] = {}  # None: the signature was seen once
        self.latest: dict[tuple, Repeat] = {}
        self.fields = {source: (kind, field) for kind, fields in structs for field, source in fields.items()}

    def clear(self) -> None:
        self.known.clear()
        self.latest.clear()

    def find(
        self,
        given: tuple[str, ...],
        arrays: tuple,
        values: tuple,
        window_size: Any,
        numbers: tuple = (),
        gradients=False,
    ) -> tuple[Any, tuple | None]:
        """Repeats an earlier call of the same signature, if there is one. Returns (results, signature). Results are
        None where the call must take the long way; the signature is for `remember`, and None where the call has none.
        arrays: those that are given, q first; given: their names in the structs; numbers: what may vary besides
        the arrays, the one length of all sequences or the values of SEEDS, of which `values` tells which it is. For the
        other arguments see `signature`."""
        if torch_modes.compiling() or recordings.current() is not None:  # a recording must see every call
            return None, None
        types = tuple(map(type, values))
        kind = given, values, types
        try:
            latest = self.latest.get(kind)
        except TypeError:  # a list or an array among the values
            return None, None
        if latest is not None and (window_size is OPEN or _is_plain_window(window_size)) and latest.same(arrays):
            results = latest.call(arrays, numbers)
            if results is not None:
                return results, None
        if not _are_plain(types, window_size):
            return None, None
        door = _arrays._doors.get(type(arrays[0])) if arrays else None
        about = door and door.describe(arrays, gradients)
        if not about:
            return None, None
        sign = kind, door, about
        repeat = self.known.get(sign)
        results = repeat and repeat.call(arrays, numbers)
        if results is not None:
            if repeat is latest:  # its `same` was made in another mode (inference, autocast, ...), which it tests, too
                self.known[sign] = repeat = repeat._replace(same=door.same(arrays, about, gradients))
            self.latest[kind] = repeat
        return results, sign

    def remember(
        self,
        sign: tuple | None,
        filled: ct.Structure,
        arrays: tuple,
        likes: Sequence[View],
        made: Mapping[str, Made],
        keys: tuple[int, int, int] | None = None,
        fits: Callable[[list[int]], bool] | None = None,
        finish: Callable[[Any, tuple, tuple], Any] | None = None,
        views: Sequence[View] = (),
        seeds: bool = False,
        gradients: bool = False,
    ) -> None:
        """Prepares a repeat of a call that was launched with this struct on these arrays.

        likes: the views of the first arrays, on which new arrays can be modelled. made: the arrays that the call
        allocated, by name, `workspace` last. keys: for a call with one length, the number of keys, how many of them are
        new, and the most that fit. fits: a further test, of the addresses of the arrays. finish: makes the results from
        the allocated arrays, the given ones and the numbers. views: views of the arrays that the call writes to,
        perhaps among others. seeds: whether the numbers are the values of SEEDS. gradients: as `find` got it.

        This costs about 30 us, so it waits for a signature's second call: a decoder whose cache grows has a new
        signature at every step.
        """
        if sign is None:
            return
        if len(self.known) >= _MOST_REPEATS and sign not in self.known:
            self.clear()
        if sign not in self.known:
            self.known[sign] = None
            return
        (given, *_), door, about = sign
        results = [name for name in made if name != "workspace"]
        numbers = ("keys",) if keys else SEEDS if seeds else ()
        names = [*given, *results, *numbers, "workspace", "workspace_bytes"]
        prepared = Prepared(self.name, filled, [self.fields[name] for name in names])
        if not prepared.holds([*map(door.address, arrays)]):
            return  # an array was copied, and a copy has to be made again at every call
        written = [view.owner for view in views if view.written] if door.wrote else []
        places = tuple([i for i, array in enumerate(arrays) if any(array is owner for owner in written)])
        call = self._repeat(prepared, given, likes, made, keys, fits, finish, places)
        self.known[sign] = Repeat(door.same(arrays, about, gradients), call)

    def _repeat(self, prepared, given, likes, made, keys, fits, finish, written) -> Callable[[tuple, Any], Any]:
        """The function call(arrays, numbers) that makes the call on other arrays. It returns what the call returns, or
        None where the call must take the long way. written: positions of the arrays whose writes the framework counts.
        The function holds no array, and nothing that it holds ever changes, so threads use it at the same time."""
        first = likes[0]
        door, on_cpu, index = first.door, first.device == CPU, first.index
        address, current_stream, wrote = door.address, door.current_stream, door.wrote
        given_out = given[-1] == "out"
        makers = [_maker(door, likes, one) for name, one in made.items() if name != "workspace"]
        workspace_bytes = made["workspace"].view.shape[0] if "workspace" in made else 0
        make_workspace, like_workspace = _maker(door, likes, made["workspace"]) if workspace_bytes else (None, 0)
        make_out, like_out = makers.pop(0) if makers and not given_out else (None, 0)
        alone, checked = not makers and not finish, given_out or fits
        run, call_address, pack, pick = runner(), prepared.address, prepared.pack, _picker(written)
        new_keys, most_keys = keys[1:] if keys else (0, 0)

        def call(arrays, numbers):
            stream, out = None, None
            try:
                values = [*map(address, arrays)]
                if checked:
                    if given_out and values[-1] in values[:3] or fits and not fits(values):
                        return None
                if make_out:  # on a GPU by the caller's allocator, which knows about streams and captures
                    out = make_out(arrays[like_out])
                    values.append(address(out))
                elif given_out:
                    out = arrays[-1]
                if makers:
                    more = []
                    for make, i in makers:
                        more.append(array := make(arrays[i]))
                        values.append(address(array))
                if keys:
                    total = numbers[0] + new_keys
                    if not new_keys <= total <= most_keys:
                        return None
                    values.append(total)
                elif numbers:
                    values += numbers
                if on_cpu:
                    held, workspace, size = _scratch.place  # held: see launch_with_workspace
                else:
                    stream, workspace, size = current_stream(index), 0, 0
                    if make_workspace:
                        size = prepared.plan(pack(*values, 0, 0)).workspace_bytes
                        if size != workspace_bytes:
                            return None
                        held = make_workspace(arrays[like_workspace])
                        workspace = address(held)
            except RuntimeError:
                return None
            if status := run(call_address, pack(*values, workspace, size), stream):
                if status == WORKSPACE_TOO_SMALL:  # another kernel than last time, or this thread's first call
                    return None
                raise failure(status, prepared.filled)
            if pick:
                wrote(pick(arrays))
            if alone:
                return out
            results = (out, *more) if makers else (out,)
            return finish(results, arrays, numbers) if finish else results

        return call


def _picker(places: tuple[int, ...]) -> Callable[[tuple], Any] | None:
    """A function that picks the arrays at these places and returns a tuple, also of one; None for no places."""
    if len(places) == 1:
        return operator.itemgetter(slice(places[0], places[0] + 1))
    return operator.itemgetter(*places) if places else None


def _maker(door: Any, likes: Sequence[View], made: Made) -> tuple[Callable[[Any], Any], int]:
    """A function that makes an array like `made` from one of the call's arrays, and the position of that array."""
    about = operator.attrgetter("shape", "strides", "dtype")
    i = next((i for i, like in enumerate(likes) if about(like) == about(made.view)), 0)
    return door.maker(likes[i], made.view, made.fill), i
