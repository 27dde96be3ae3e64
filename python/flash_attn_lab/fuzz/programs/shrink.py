"""Programs of fewer and simpler steps that fail in the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from .. import shrink as calls
from .steps import functions

KEPT = ("spec", "env", "leave")  # the entries that make a step; others say how it is made


def candidates(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields smaller programs, the largest differences first: half of the steps, one step less, steps made in a simpler
    way, smaller calls."""
    steps = program["steps"]
    size = len(steps) // 2
    while size:
        for at in range(0, len(steps), size):
            if size < len(steps):
                yield program | {"steps": steps[:at] + steps[at + size :]}
        size //= 2
    for i, step in enumerate(steps):
        for name in step:
            if name not in KEPT:
                yield _with(program, i, {n: x for n, x in step.items() if n != name})
        if step.get("times", 1) > 2:
            yield _with(program, i, step | {"times": 2})
        for name in step.get("env", {}):
            if len(step["env"]) > 1:
                yield _with(program, i, {"env": {n: x for n, x in step["env"].items() if n != name}})
    for i, step in enumerate(steps):
        if "spec" in step:
            for spec in calls.candidates(step["spec"], functions()):
                yield _with(program, i, step | {"spec": spec})


def _with(program: dict[str, Any], i: int, step: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(program)
    changed["steps"][i] = copy.deepcopy(step)
    return changed


def shrink(program: dict[str, Any], fails: Callable[[dict[str, Any]], bool], tries: int = 200) -> dict[str, Any]:
    """A smaller program that still fails."""
    return calls.greedily(program, candidates, fails, tries)
