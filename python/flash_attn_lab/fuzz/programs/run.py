"""Runs the steps of a program in order. Each has its thread, stream and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flash_attn_minimal import distributed
from flash_attn_minimal.errors import RankLost

from ..distributed import groups_of
from ..judge import Wrong
from . import exact
from .answers import Answer, said, set_variables
from .children import in_child
from .places import Place, Places
from .steps import Prepared

CHILD_SECONDS = 20.0


@dataclass
class Shot:
    """An answer whose bytes are still in the device's memory."""

    error: str = ""
    memory: Any = None
    cache: Any = None
    cache_before: Any = None
    results: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    guards: exact.Guards | None = None
    answer: Answer | None = None  # an answer from another process, already downloaded

    def download(self, place: Place) -> Answer:
        if self.answer:
            return self.answer
        if self.guards:
            try:
                self.guards.check()
            except Wrong as wrong:
                self.trouble = str(wrong)
        memory, cache, cache_before = (
            None if x is None else place.download(x) for x in (self.memory, self.cache, self.cache_before)
        )
        results = {name: place.backend.numpy(array) for name, array in self.results.items()}
        return Answer(self.error, memory, cache, cache_before, results, self.trouble)


@dataclass
class Kept:
    """A recorded call, and its memory."""

    handle: Any
    cache: Any
    replay: Callable[[], None]
    results: dict[str, Any]


class Runner:
    """One run of a program. `run` returns, for each step, the answers of its call, one for each time it was made."""

    def __init__(self, program: Mapping[str, Any], prepared: list[Prepared | None], places: Places):
        self.steps, self.prepared, self.places = program["steps"], prepared, places
        self.memories: dict[tuple, Any] = {}
        self.outgrown: list[Any] = []
        self.last: dict[tuple, np.ndarray] = {}  # the contents of a piece of memory after the last call in it
        self.sessions: dict[tuple, Any] = {}
        self.kept: dict[int, Kept] = {}
        self.later: list[tuple[int, Any, Callable[[], dict[str, Any]]]] = []
        self.shots: list[list[Shot]] = [[] for _ in self.steps]
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.pending: list[Future] = []
        self.users: dict[Any, tuple[int, Future | None]] = {}  # of memory, sessions and recordings: (thread, last call)
        self.groups = threading.Lock()

    def run(self) -> list[list[Answer]]:
        exact.install()
        set_variables({})
        env: dict[str, str] = {}
        try:
            self.staged = [p and self.place(i).upload(p.before) for i, p in enumerate(self.prepared)]
            self.places.synchronize()
            for i, step in enumerate(self.steps):
                if "env" in step:
                    self.wait()
                    env = {n: v for n, v in (env | step["env"]).items() if v is not None}
                    set_variables(env)
                elif "leave" in step:
                    self.wait()
                    self.leave(step)
                else:
                    self.start(i, step)
            self.wait()
            for i, handle, end in reversed(self.later):
                self.shots[i].append(self.shot(i, handle, None, None, end))
            self.places.synchronize()
            found = [[shot.download(self.place(i)) for shot in shots] for i, shots in enumerate(self.shots)]
            self.check_memories()
            return found
        finally:
            for pool in self.threads.values():
                pool.shutdown()
            set_variables({})

    def place(self, i: int) -> Place:
        return self.places[self.steps[i].get("device", 0)]

    # ---- who runs it ----

    def start(self, i: int, step: Mapping[str, Any]) -> None:
        thread = step.get("thread", 0)
        spec = step["spec"]
        ranks = "distributed" in spec["function"]
        if step.get("way") == "fork" or ranks:
            self.wait()
        uses = [(name, step[name], step.get("device", 0)) for name in ("memory", "session") if name in step]
        uses += [("kept", step[name]) for name in ("keep", "replay") if name in step]
        for use in uses:
            user, future = self.users.get(use, (thread, None))
            if user != thread:
                if future:
                    future.result()
                self.places.synchronize()
        if not thread or ranks:
            self.one(i)
            future = None
        else:
            if thread not in self.threads:
                self.threads[thread] = ThreadPoolExecutor(1)
            future = self.threads[thread].submit(self.one, i)
            self.pending.append(future)
            if not step.get("beside"):
                future.result()
        for use in uses:
            self.users[use] = thread, future
        if ranks:
            self.places.synchronize()

    def wait(self) -> None:
        for future in self.pending:
            future.result()
        self.pending.clear()
        self.places.synchronize()

    # ---- one step ----

    def one(self, i: int) -> None:
        step, prepared, place = self.steps[i], self.prepared[i], self.place(i)
        if step.get("way") == "fork" and place.backend.device == "cpu":
            how, found = in_child(lambda: self.forked(i), CHILD_SECONDS)
            self.shots[i] += found if how == "done" else [Shot(trouble=f"in a forked process: {how}: {found}")]
            return
        with place.on(step.get("thread", 0)):
            kept = self.kept.get(step.get("replay", -1))
            if kept and kept.handle.shape == self.staged[i].shape and (kept.cache is None) == (prepared.cache is None):
                place.copy(kept.handle, self.staged[i])
                cache = self.session(i, step, prepared, place)
                before = None if cache is None else place.clone(cache)

                def replay() -> dict[str, Any]:
                    kept.replay()
                    return kept.results

                self.shots[i].append(self.shot(i, kept.handle, cache, before, replay))
                return
            if "replay" in step and place.graphs:
                return  # nothing was captured, because the call was refused under the variables of that step
            self.made(i, step, prepared, place)

    def forked(self, i: int) -> list[Shot]:
        self.shots[i] = []
        place = self.place(i)
        self.made(i, {n: x for n, x in self.steps[i].items() if n != "way"}, self.prepared[i], place)
        return [Shot(answer=shot.download(place)) for shot in self.shots[i]]

    def made(self, i: int, step: Mapping[str, Any], prepared: Prepared, place: Place) -> None:
        handle = self.memory(step, prepared.layout.size, place)
        cache = self.session(i, step, prepared, place)
        before = None if cache is None else place.clone(cache)
        views = prepared.views(place.backend, handle, cache)
        way = step.get("way", "call")

        def call() -> dict[str, Any]:
            return prepared.call(place.backend, views)

        if way == "later" and hasattr(prepared.function, "begin"):
            place.copy(handle, self.staged[i])
            try:
                end = prepared.function.begin(prepared.spec, views, prepared.options)
            except Exception as error:
                self.shots[i].append(self.shot(i, handle, cache, before, None, said(error)))
            else:
                self.later.append((i, handle, end))
            return
        record = way == "record" or "keep" in step
        for turn in range(step.get("times", 1)):
            place.copy(handle, self.staged[i])
            if turn and cache is not None:
                place.copy(cache, before)
            if record and place.can_record(prepared.function) and "mutation" not in prepared.spec:
                self.recorded(i, step, place, handle, cache, before, call)
            elif way == "exact":
                with exact.workspaces(place) as guards:
                    shot = self.shot(i, handle, cache, before, call)
                shot.guards = guards
                self.shots[i].append(shot)
            else:
                self.shots[i].append(self.shot(i, handle, cache, before, call))
        if "memory" in step:
            key = step["memory"], step.get("device", 0)
            self.last[key] = self.shots[i][-1].memory

    def recorded(self, i, step, place: Place, handle, cache, before, call) -> None:
        try:
            results, replay = place.captured(call)
        except Exception as error:
            if "record" in str(error):  # a Recording refuses calls that copy an input
                self.shots[i].append(self.shot(i, handle, cache, before, call))
            else:
                self.shots[i].append(self.shot(i, handle, cache, before, None, said(error)))
            return
        place.copy(handle, self.staged[i])
        if cache is not None:
            place.copy(cache, before)

        def made() -> dict[str, Any]:
            replay()
            return results

        self.shots[i].append(self.shot(i, handle, cache, before, made))
        if "keep" in step:
            self.kept[step["keep"]] = Kept(handle, cache, replay, results)

    def shot(self, i: int, handle, cache, before, call: Callable[[], dict[str, Any]] | None, error: str = "") -> Shot:
        """Makes a call, and copies what it has written before another call can overwrite it."""
        place, results = self.place(i), {}
        if call:
            try:
                results = {name: place.clone(array) for name, array in call().items()}
            except Exception as raised:  # also if a result is not an array
                results, error = {}, said(raised)
        after = None if cache is None else place.clone(cache)
        return Shot(error, place.clone(handle), after, before, results)

    # ---- memory ----

    def memory(self, step: Mapping[str, Any], size: int, place: Place) -> Any:
        if "memory" not in step or "keep" in step or step.get("way") == "later":
            return place.empty(size)
        key = step["memory"], step.get("device", 0)
        known = self.memories.get(key)
        if known is None or known.shape[0] < size:
            if known is not None:  # kept alive: its stream might reuse it while another stream still works on it
                self.outgrown.append(known)
            self.memories[key] = known = place.empty(max(size, 2 * (0 if known is None else known.shape[0])))
        return known[:size]

    def session(self, i: int, step: Mapping[str, Any], prepared: Prepared, place: Place) -> Any:
        """The cache of a session. The session's first step makes it."""
        if prepared.cache is None:
            return None
        key = step["session"], step.get("device", 0), str(prepared.cache.arrays)
        if key not in self.sessions:
            self.sessions[key] = place.upload(prepared.cache_before)
        return self.sessions[key]

    def check_memories(self) -> None:
        """Raises Wrong if a piece of memory has changed after the last call in it: a later call has written there."""
        for key, last in self.last.items():
            place = self.places[key[1]]
            now = place.download(self.memories[key][: last.shape[0]])
            if not np.array_equal(now, place.download(last)):
                raise Wrong(f"memory {key[0]} has changed after the last call in it")

    # ---- ranks ----

    def leave(self, step: Mapping[str, Any]) -> None:
        """One rank leaves in mid-call. Raises Wrong unless the other ranks get RankLost."""
        size = max(step.get("ranks", 2), 2)
        gone = step["leave"] % size
        cpu = self.places.backend.device == "cpu"
        found: list[str] = [""] * size

        def rank(group: distributed.Group) -> None:
            if group.rank == gone:
                raise KeyError("this rank leaves")
            handle = self.places[0].empty(1024)
            q = self.places.backend.view(handle, "float32", (4, 2, 16), (32, 16, 1), 0)
            try:
                distributed.forward(group, q, q, q, cu_seqlens_q=np.array([0, 4 * size], np.int32))
            except BaseException as error:
                found[group.rank] = type(error).__name__
                raise

        try:
            distributed.run(groups_of(("cpu" if cpu else 0,) * size), rank)
        except (KeyError, RankLost):
            pass
        groups_of.cache_clear()
        wrong = [(r, name) for r, name in enumerate(found) if r != gone and name != "RankLost"]
        if wrong:
            raise Wrong(f"rank {gone} of {size} has left, and {wrong} did not get RankLost")
