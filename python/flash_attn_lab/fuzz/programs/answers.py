"""The answer of a call, a call made alone, and the comparison of two answers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..function import EXCEPTION, UNTOUCHED, WRONG
from ..invalid import has_unknown_elements
from ..judge import Wrong
from .steps import VARIABLES, Prepared


@dataclass
class Answer:
    """The answer of a call: its error; the bytes of its arrays after it; its other results, as numbers."""

    error: str = ""
    memory: np.ndarray | None = None
    cache: np.ndarray | None = None  # the bytes of a session's cache
    cache_before: np.ndarray | None = None
    results: dict[str, np.ndarray] = field(default_factory=dict)
    trouble: str = ""  # a fault that the campaign itself found while it made the call


_AT_START = {name: os.environ[name] for name in VARIABLES if name in os.environ}


def set_variables(env: dict[str, str]) -> None:
    """Sets a program's variables; the other VARIABLES get the values that they had when the process began."""
    for name in VARIABLES:
        value = env.get(name, _AT_START.get(name))
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def alone(prepared: Prepared, cache_before: np.ndarray | None, place: Any) -> Answer:
    """Makes the call as the only call of a program."""
    set_variables(prepared.env)
    handle = place.upload(prepared.before)
    cache = None if prepared.cache is None else place.upload(cache_before)
    error, results = "", {}
    try:
        results = prepared.call(place.backend, prepared.views(place.backend, handle, cache))
        place.synchronize()
    except Exception as raised:
        error = said(raised)
    after = None if cache is None else place.download(cache)
    return Answer(
        error, place.download(handle), after, cache_before,
        {name: place.backend.numpy(array) for name, array in results.items()},
    )  # fmt: skip


def _plain(error: str) -> str:
    """The text of an error without the parts that may differ: names of groups, addresses."""
    return re.sub(r"group \d+|0x[0-9a-f]+|\(nil\)|<[^>]*>", "_", error)


def _same_error(prepared: Prepared, a: str, b: str) -> bool:
    if "distributed" in prepared.function.name:  # the text depends on which rank was first
        kinds = {a.split(":")[0], b.split(":")[0]}
        # A wrong array on one rank, in a call that no rank can make: either of them may be the first to refuse.
        return len(kinds) == 1 or ("mutation" in prepared.spec and kinds == {"BadArgument", "Unsupported"})
    return _plain(a) == _plain(b)


def difference(prepared: Prepared, got: Answer, fresh: Answer, device: str) -> tuple[str, str] | None:
    """(kind of finding, message) if an answer differs from that of a fresh process, else None."""
    if got.trouble:
        return WRONG, got.trouble
    if prepared.moved and got.error.startswith("WorkspaceTooSmall"):
        return None  # a recording has the workspace of the kernel that it was made with
    if not _same_error(prepared, got.error, fresh.error):
        return EXCEPTION, f"{got.error or 'the call was served'}; alone: {fresh.error or 'the call is served'}"
    try:
        if got.error or (prepared.promised(device) and not has_unknown_elements(prepared.spec)):
            _same_bits(prepared, got, fresh)
        elif (
            "mutation" not in prepared.spec
        ):  # a wrong call that is served after all (PyTorch casts dout) has other values
            written = prepared.function.written(prepared.spec, prepared.values)
            prepared.layout.check_same(prepared.before, got.memory, written, "changed that are not the call's to write")
            prepared.judge(got.memory, got.cache, got.cache_before, got.results)
    except Wrong as wrong:
        return (UNTOUCHED if "bytes" in str(wrong).split(":")[0] else WRONG), str(wrong)
    return None


def _same_bits(prepared: Prepared, got: Answer, fresh: Answer) -> None:
    arrays = prepared.layout.arrays
    for name in sorted(name for name, array in arrays.items() if array.output and not array.scratch):
        _equal(name, *(prepared.layout.stored(x.memory, name) for x in (got, fresh)))
    scratch = {name: ... for name, array in arrays.items() if array.scratch}
    prepared.layout.check_same(fresh.memory, got.memory, scratch, "are not what they are after the same call alone")
    if prepared.cache:
        prepared.cache.check_same(
            fresh.cache, got.cache, {}, "of the cache are not what they are after the same call alone"
        )
    for name in fresh.results:
        if name not in got.results:
            raise Wrong(f"{name} was not returned")
        _equal(name, got.results[name], fresh.results[name])


def _equal(name: str, got: np.ndarray, fresh: np.ndarray) -> None:
    """Raises Wrong unless the arrays are equal bit for bit, except for the bits of a NaN."""
    if got.shape != fresh.shape or got.dtype != fresh.dtype:
        raise Wrong(f"{name} is {got.dtype} {got.shape}; alone: {fresh.dtype} {fresh.shape}")
    if got.tobytes() == fresh.tobytes() or np.array_equal(got, fresh, equal_nan=got.dtype.kind == "f"):
        return
    differ = (got != fresh) & ~((got != got) & (fresh != fresh))
    at = tuple(map(int, np.argwhere(differ)[0]))
    raise Wrong(f"{name}{at} is {got[at]}; alone it is {fresh[at]} ({int(differ.sum())} of {got.size} differ)")
