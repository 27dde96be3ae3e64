"""A step of a program: a call (its spec, as case.py has it) and the way it is made; or a change of what is around it.

    {"spec": {...}, "thread": 2, "beside": True, "memory": 1, "way": "exact", "times": 3, "session": 0, "device": 1}
    {"env": {"FLASH_ATTN_KERNEL": "naive"}}            a variable is set, or released with None
    {"leave": 1, "ranks": 3}                           one of three ranks breaks off in mid-call

thread   who makes the call; 0 is the program's own thread. With `beside` nobody waits for it: the next step starts.
memory   the number of a piece of memory that later calls use, too; without it the call has memory of its own
way      "call"    as anybody would
         "exact"   in a workspace of exactly the size that the query tells, among guards
         "record"  recorded, and replayed after all contents are put back: a Recording on the CPU, a CUDA graph on a GPU
         "fork"    in a process that is forked at this point (CPU)
         "later"   begun at this point, and ended when all other steps are done: autograd
times    how often the call is made, with all contents put back in between
keep     "record", kept under this number; "replay": the kept one with the contents of this call
session  the cache of this number is the call's: what earlier calls appended stays there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import invalid
from ..arrays import Layout
from ..case import _options as options_of
from ..case import functions as functions_of_calls
from ..function import Function
from . import autograd, decode

CACHE = ("k_cache", "v_cache", "k_scale", "v_scale", "block_table", "cache_batch_idx")
VARIABLES = tuple(
    f"FLASH_ATTN_{what}"
    for what in ("KERNEL", "BACKWARD_KERNEL", "DENSE_LINEAR_KERNEL", "LINEAR_KERNEL", "CHAIN_KERNEL", "NUM_THREADS")
)


def functions() -> dict[str, Function]:
    """Those of single calls, and those that only a program makes."""
    return functions_of_calls() | {f.name: f for f in (*autograd.FUNCTIONS, *decode.FUNCTIONS)}


@dataclass
class Prepared:
    """A call whose arrays are known, and the bytes they lie in before it."""

    step: dict[str, Any]
    function: Function
    options: dict[str, Any]
    values: dict[str, np.ndarray]
    layout: Layout
    before: np.ndarray
    env: dict[str, str]  # of VARIABLES, when the call is made
    moved: bool = False  # a replay, under other variables than the recording
    cache: Layout | None = None  # of a session: its arrays lie elsewhere
    cache_before: np.ndarray | None = None  # when the session begins

    @property
    def spec(self) -> dict[str, Any]:
        return self.step["spec"]

    def views(self, backend, handle, cache=None) -> dict[str, Any]:
        views = self.layout.views_in(backend, handle)
        return views | self.cache.views_in(backend, cache) if self.cache else views

    def call(self, backend, views) -> dict[str, Any]:
        """The results that are not among the views."""
        views, options = dict(views), dict(self.options)
        if "mutation" in self.spec:
            arrays = self.layout.arrays | (self.cache.arrays if self.cache else {})
            invalid.apply(self.spec, SimpleNamespace(backend=backend, arrays=arrays), views, options)
        return self.function.call(self.spec, views, options)

    def promised(self, device: str) -> bool:
        """Whether the same call gives the same bits."""
        return device == "cpu" or "backward" not in self.function.name or bool(self.spec.get("deterministic"))

    def judge(self, memory: np.ndarray, cache: np.ndarray | None, cache_before, results) -> None:
        """Against float64: raises Wrong."""
        values, after = dict(self.values), {n: self.layout.values(memory, n) for n in self.layout.arrays}
        if self.cache:
            values |= {n: self.cache.values(cache_before, n) for n in self.cache.arrays}
            after |= {n: self.cache.values(cache, n) for n in self.cache.arrays}
        self.function.judge(self.spec, values, after, results)


def prepare(step: Mapping[str, Any], env: Mapping[str, str], before: np.ndarray | None = None) -> Prepared:
    """before: the bytes of the arrays, where they are known; the values are then left out."""
    spec = step["spec"]
    function = functions()[spec["function"]]
    arrays, values, seed = (
        function.arrays(spec),
        {} if before is not None else function.values(spec),
        spec.get("seed", 0),
    )
    nothing = np.zeros(0, np.uint8)
    prepared = Prepared(dict(step), function, options_of(function, spec), values, Layout(arrays), nothing, dict(env))
    if "session" in step and "k_cache" in arrays:
        prepared.cache = Layout({n: a for n, a in arrays.items() if n in CACHE})
        prepared.cache_before = prepared.cache.filled(values, seed) if before is None else None
        prepared.layout = Layout({n: a for n, a in arrays.items() if n not in CACHE})
    prepared.before = prepared.layout.filled(values, seed) if before is None else before
    return prepared


def prepare_all(program: Mapping[str, Any], graphs: bool) -> list[Prepared | None]:
    """None for the steps that are no calls. A kernel is chosen when a graph is captured, not when it is replayed."""
    env: dict[str, str] = {}
    captured: dict[int, dict[str, str]] = {}
    found: list[Prepared | None] = []
    for step in program["steps"]:
        for name, value in step.get("env", {}).items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        if "spec" not in step:
            found.append(None)
            continue
        if "keep" in step:
            captured[step["keep"]] = dict(env)
        then = captured.get(step.get("replay", -1), env)
        prepared = prepare(step, then if graphs else env)
        prepared.moved = then != env and not graphs
        found.append(prepared)
    return found
