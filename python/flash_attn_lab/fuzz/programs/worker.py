"""A worker of the campaign of programs. Its protocol is that of fuzz/worker.py:

in   {"number": 17} or {"spec": {...}}, which is a program
out  {"ready": ...} once, then for each program {"spec": {...}} before it runs and {"kind": ..., ...} after it
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from flash_attn_minimal._core.library import load

from ..function import BROKEN, CRASH, HANG, PASSED, STICKY, WRONG, Outcome, World, told
from ..judge import Wrong
from ..worker import opened
from . import exact
from .alone import Alone
from .answers import Answer, alone, difference
from .children import RAISED, in_child
from .draw import generate
from .places import Places
from .run import Runner
from .steps import Prepared, prepare_all

JUDGED = 0.05  # the share of calls with the right bits that are also compared with float64


class Judge:
    """Runs programs and returns their outcomes."""

    def __init__(
        self, device: str, framework: str | None = None, seconds: float = 30.0, judged: float = JUDGED,
        compares: bool = True,
    ):  # fmt: skip
        """compares: compare answers with those of the same calls alone. Otherwise a program only has to end without an
        error, as under a sanitizer."""
        load()
        self.compares = compares
        self.device, self.framework, self.seconds, self.judged = device, framework, seconds, judged
        self.places = Places(device, framework)
        importlib.import_module("numpy.ma")  # otherwise the first call in every forked process imports it
        if self.places.backend.framework == "torch":
            importlib.import_module("flash_attn_minimal.torch")
        self.other: Alone | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        if self.other:
            self.other.close()

    def start(self) -> None:
        """Starts the second process, on a GPU. That takes seconds."""
        if self.other is None and self.device == "cuda" and self.compares:
            self.other = Alone(self.device, self.framework)
            self.other.answers([])

    def outcome(self, program: dict[str, Any]) -> Outcome:
        prepared = prepare_all(program, self.places.graphs)
        if self.device == "cpu":
            gc.freeze()
            how, found = in_child(lambda: self._ran(program, prepared), self.seconds)
            if how in (HANG, CRASH):
                return Outcome(how, "", found)
            if how == RAISED:
                return Outcome(BROKEN, "", found)
        else:
            found = self._ran(program, prepared)
        trouble, answers = found
        if trouble:
            kind = STICKY if self.device == "cuda" and not self.places.backend.alive() else WRONG
            return Outcome(kind, "", trouble)
        self.places.release()
        if not self.compares:
            return Outcome(PASSED)
        calls = [(i, p, answers[i]) for i, p in enumerate(prepared) if p and answers[i]]
        return self._apart(calls) if self.device == "cpu" else self._second(calls)

    def _ran(self, program: dict[str, Any], prepared: list[Prepared | None]) -> tuple[str, list[list[Answer]]]:
        try:
            return "", Runner(program, prepared, self.places).run()
        except Wrong as wrong:
            return str(wrong), []
        except Exception as error:
            if self.device == "cpu":
                raise
            return told(error, 3), []  # a GPU reports the error of an earlier call late

    # ---- the same calls alone ----

    def _apart(self, calls: list[tuple[int, Prepared, list[Answer]]]) -> Outcome:
        """Compares each call with the same call in a process that has made no call before."""
        for i, prepared, answers in calls:
            how, found = in_child(lambda i=i, p=prepared, a=answers: self._compared(i, p, a), self.seconds)
            if how in (HANG, CRASH):
                return Outcome(how, self._kernel(prepared), f"step {i}, alone: {found}")
            if how == RAISED:
                return Outcome(BROKEN, "", f"step {i}: {found}")
            if found:
                return Outcome(found[0], self._kernel(prepared), f"step {i}, {prepared.function.name}: {found[1]}")
        return Outcome(PASSED)

    def _compared(self, i: int, prepared: Prepared, answers: list[Answer]) -> tuple[str, str] | None:
        fresh = alone(prepared, answers[0].cache_before, self.places[0])
        return self._differ(prepared, answers, fresh) or self._wrong(i, prepared, fresh)

    def _differ(self, prepared: Prepared, answers: list[Answer], fresh: Answer) -> tuple[str, str] | None:
        for turn, answer in enumerate(answers):
            if found := difference(prepared, answer, fresh, self.device):
                return found[0], found[1] + (f" (time {turn + 1} of {len(answers)})" if len(answers) > 1 else "")
        return None

    def _wrong(self, i: int, prepared: Prepared, fresh: Answer) -> tuple[str, str] | None:
        """Judges a sample of the calls like single cases. Calls of sessions are left out, because the contents of a
        session are not known after a call that was refused."""
        sampled = np.random.default_rng([prepared.spec.get("seed", 0), i]).random() < self.judged
        if not sampled or fresh.error or prepared.cache is not None or "mutation" in prepared.spec:
            return None
        try:
            prepared.judge(fresh.memory, fresh.cache, fresh.cache_before, fresh.results)
        except Wrong as wrong:
            return WRONG, f"alone, too: {wrong}"
        return None

    def _second(self, calls: list[tuple[int, Prepared, list[Answer]]]) -> Outcome:
        """Compares the calls with those of the second process, made in another order. If an answer differs, a new
        process makes the call again."""
        self.start()
        order = np.random.default_rng(len(calls)).permutation(len(calls))
        try:
            fresh = dict(zip(order, self.other.answers([self._order(calls[j]) for j in order]), strict=True))
        except (EOFError, BrokenPipeError):
            self.other.close()
            self.other = None
            return Outcome(CRASH, "", "the process that makes the calls of this program alone has ended")
        for j, (i, prepared, answers) in enumerate(calls):
            found = self._differ(prepared, answers, fresh[j])
            if found:
                with Alone(self.device, self.framework) as new:
                    truth = new.answers([self._order(calls[j])])[0]
                if right := self._differ(prepared, answers, truth):
                    found = right
                else:
                    found = found[0], f"right here, but not in the process that makes calls alone: {found[1]}"
            found = found or self._wrong(i, prepared, fresh[j])
            if found:
                return Outcome(found[0], self._kernel(prepared), f"step {i}, {prepared.function.name}: {found[1]}")
        return Outcome(PASSED)

    @staticmethod
    def _order(call: tuple[int, Prepared, list[Answer]]) -> tuple:
        _, prepared, answers = call
        step = {"spec": prepared.spec} | ({"session": 0} if prepared.cache else {})
        return step, prepared.env, prepared.before, answers[0].cache_before

    @staticmethod
    def _kernel(prepared: Prepared) -> str:
        return prepared.spec.get("kernel") or ""


def main() -> int:
    about, say = opened()
    judge = Judge(
        about["device"], about.get("framework"), about.get("program_seconds", 30.0), compares=about["compares"]
    )
    world = World(judge.places.backend, about.get("kernel"), about.get("function"))
    exact.install()
    if about["device"] == "cuda" and not judge.places.backend.alive():  # creates the context
        sys.exit("the device takes no work")
    judge.start()
    say(ready=judge.places.backend.framework)
    with judge:
        for line in sys.stdin:
            order = json.loads(line)
            started, program = time.perf_counter(), order.get("spec")
            try:
                program = program or generate(about["seed"], order["number"], world, bool(about.get("ranks")))
                say(spec=program)
                outcome = judge.outcome(program)
            except Exception as error:
                outcome = Outcome(BROKEN, "", told(error))
                if about["device"] == "cuda" and not judge.places.backend.alive():
                    outcome.kind = STICKY
            calls = [step["spec"]["function"] for step in (program or {}).get("steps", []) if "spec" in step]
            say(
                kind=outcome.kind, kernel=outcome.kernel, message=outcome.message, dtype="", function="program",
                seconds=round(time.perf_counter() - started, 4), calls={name: calls.count(name) for name in set(calls)},
            )  # fmt: skip
            if outcome.kind == STICKY:
                os._exit(0)  # memory of a lost context cannot be freed
    return 0


if __name__ == "__main__":
    sys.exit(main())
