"""Smaller specs that may fail in the same way: one option less, a size halved, an array made contiguous."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from .case import functions
from .function import Function

LISTS = ("lens", "lengths", "links", "given", "lead", "bias", "mask")  # lists that may become shorter
CHOICES = ("blocks",)  # lists of choices that have no smaller ones: blocks have 64 or 128 rows and keys


def candidates(spec: dict[str, Any], known: dict[str, Function] | None = None) -> Iterator[dict[str, Any]]:
    """Yields smaller specs, the largest steps first. Each is a copy; sizes stay within the limits of the function.
    known: the functions by name; None: those of single calls."""
    function = (known or functions())[spec["function"]]
    kept = ("function", "seed", "mutation", "kernel")
    for key in sorted(spec):  # one option less
        if key not in kept and key in function.DEFAULTS:
            if not isinstance(function.DEFAULTS[key], int) or isinstance(function.DEFAULTS[key], bool):
                yield {k: v for k, v in spec.items() if k != key}
    for key in ("numpy_scalars", "graph"):
        if key in spec:
            yield {k: v for k, v in spec.items() if k != key}
    for layout in spec.get("layouts", {}):
        yield _with(spec, "layouts", {k: v for k, v in spec["layouts"].items() if k != layout})
        for part in spec["layouts"][layout]:
            less = {k: v for k, v in spec["layouts"][layout].items() if k != part}
            yield _with(spec, "layouts", {**spec["layouts"], layout: less})
    for key, value in spec.items():
        if key in (*kept, *CHOICES, "layouts") or key not in function.DEFAULTS:
            continue
        for smaller in _smaller(value, function.LEAST.get(key, 0), key in LISTS):
            yield _with(spec, key, smaller)


def _with(spec, key, value):
    changed = copy.deepcopy(spec)
    changed[key] = value
    return changed


def _smaller(value: Any, least: int, shorter: bool = False) -> Iterator[Any]:
    if isinstance(value, bool) or isinstance(value, str):
        return
    if isinstance(value, int):
        for smaller in dict.fromkeys((least, least + 1, value // 2, value - 8, value - 1)):
            if least <= smaller < value:
                yield smaller
    elif isinstance(value, list):
        if len(value) > 1 and shorter:
            yield value[: len(value) // 2]
            yield value[len(value) // 2 :]
            for i in range(min(len(value), 8)):
                yield value[:i] + value[i + 1 :]
        for i in range(min(len(value), 8)):
            for smaller in _smaller(value[i], least):
                yield value[:i] + [smaller] + value[i + 1 :]
    elif isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            for smaller in _smaller(value[key], least):
                yield {**value, key: smaller}


Candidates = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]


def greedily(
    spec: dict[str, Any], candidates: Candidates, fails: Callable[[dict[str, Any]], bool], tries: int
) -> dict[str, Any]:
    """Makes a spec smaller: continues from the first candidate that still fails, until none fails or `tries` candidates
    have been tried."""
    seen = set()
    while True:
        for smaller in candidates(spec):
            if repr(smaller) in seen:
                continue
            seen.add(repr(smaller))
            if tries <= 0:
                return spec
            tries -= 1
            if fails(smaller):
                spec = smaller
                break
        else:
            return spec


def shrink(spec: dict[str, Any], fails: Callable[[dict[str, Any]], bool], tries: int = 40) -> dict[str, Any]:
    """A smaller spec that still fails."""
    trimmed = functions()[spec["function"]].trimmed
    return greedily(spec, lambda spec: map(trimmed, candidates(spec)), fails, tries)
