"""A step of a program: a call (a spec as in case.py) and the way it is made; or a change of the surroundings.

    {"spec": {...}, "thread": 2, "beside": True, "memory": 1, "way": "exact", "times": 3, "session": 0, "device": 1}
    {"env": {"FLASH_ATTN_KERNEL": "naive"}}            an environment variable is set; None removes it
    {"leave": 1, "ranks": 3}                           rank 1 of three ranks breaks off in mid-call

thread   the thread that makes the call; 0 is the program's own thread. With `beside` the next step starts without
         waiting for the call.
memory   the number of a piece of memory that other calls use, too; without it the call has separate memory
way      "call"    a plain call
         "exact"   with a workspace of exactly the size that the query returns, between guards
         "record"  recorded, and replayed after all contents are put back: a Recording on the CPU, a CUDA graph on a GPU
         "fork"    in a process that is forked at this point (CPU)
         "later"   begun at this point, and ended when all other steps are done: autograd
times    how often the call is made, with all contents put back in between
keep     as "record", and the recording is kept under this number
replay   the kept recording of this number runs with the contents of this call
session  the call uses the cache of this number, in which keys that earlier calls appended remain
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
    """The functions of single calls, and those that only programs call."""
    return functions_of_calls() | {f.name: f for f in (*autograd.FUNCTIONS, *decode.FUNCTIONS)}


@dataclass
class Prepared:
    """A call whose arrays are known, with the bytes of its memory before the call."""

    step: dict[str, Any]
    function: Function
    options: dict[str, Any]
    values: dict[str, np.ndarray]
    layout: Layout
    before: np.ndarray
    env: dict[str, str]  # the VARIABLES when the call is made
    moved: bool = False  # a replay under other variables than the recording
    cache: Layout | None = None  # the arrays of a session, which are in other memory
    cache_before: np.ndarray | None = None  # the bytes of the cache when the session begins

    @property
    def spec(self) -> dict[str, Any]:
        return self.step["spec"]

    def views(self, backend, handle, cache=None) -> dict[str, Any]:
        views = self.layout.views_in(backend, handle)
        return views | self.cache.views_in(backend, cache) if self.cache else views

    def call(self, backend, views) -> dict[str, Any]:
        """Makes the call; returns the results that are not among the views."""
        views, options = dict(views), dict(self.options)
        if "mutation" in self.spec:
            arrays = self.layout.arrays | (self.cache.arrays if self.cache else {})
            invalid.apply(self.spec, SimpleNamespace(backend=backend, arrays=arrays), views, options)
        return self.function.call(self.spec, views, options)

    def promised(self, device: str) -> bool:
        """Whether the same call must give the same bits."""
        return device == "cpu" or "backward" not in self.function.name or bool(self.spec.get("deterministic"))

    def judge(self, memory: np.ndarray, cache: np.ndarray | None, cache_before, results) -> None:
        """Compares with float64; raises Wrong."""
        values, after = dict(self.values), {n: self.layout.values(memory, n) for n in self.layout.arrays}
        if self.cache:
            values |= {n: self.cache.values(cache_before, n) for n in self.cache.arrays}
            after |= {n: self.cache.values(cache, n) for n in self.cache.arrays}
        self.function.judge(self.spec, values, after, results)


def prepare(step: Mapping[str, Any], env: Mapping[str, str], before: np.ndarray | None = None) -> Prepared:
    """Prepares the call of a step. before: the bytes of the arrays, if they are known; no values are then computed."""
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
    """The prepared calls of a program; None for steps that are not calls. A graph's kernel is chosen when the graph is
    captured, not when it is replayed, so its replays are prepared with the variables of the capture."""
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
