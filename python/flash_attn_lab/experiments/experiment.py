"""Defines an experiment, and one run of it. Each module registers its experiments, with their tables and pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bench.machine import Meter
from ..bench.suite import Outcome, rounded
from ..bench.timing import Protocol
from ..command import Interrupt
from ..progress import Progress

Rows = list[dict[str, Any]]
DEFAULT_FOLDER = Path("experiments")  # in the current folder; each device has one below it
SAVE_EVERY = 5.0  # seconds between two copies of the result on disk


class Stopped(Exception):
    """The run ends before its last step; the text says why. The results so far are written."""


@dataclass
class Run:
    """One run of an experiment: its machine, its options and its results so far."""

    machine: Any
    quick: bool
    seed: int
    protocol: Protocol
    meter: Meter
    outcome: Outcome = field(default_factory=Outcome)
    limit: float | None = None  # seconds
    interrupt: Interrupt = field(default_factory=Interrupt)
    save: Callable[[], None] = lambda: None
    progress: Any = None
    started: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)

    @property
    def gpu(self) -> bool:
        return self.machine.device == "cuda"

    def steps(self, total: int, title: str) -> Progress:
        """The progress bar of the next `total` steps; a context manager."""
        self.progress = Progress(total, title)
        return self.progress

    def step(self, line: str) -> None:
        """Counts a finished step. The result is saved from time to time, and the run ends here at its limit."""
        self.progress.step(line)
        self.interrupt.check()
        now = time.monotonic()
        if now - self.saved > SAVE_EVERY:
            self.save()
            self.saved = time.monotonic()
        if self.limit and now - self.started > self.limit:
            raise Stopped(f"the limit of {self.limit:g} s")

    def add(self, row: dict[str, Any]) -> None:
        self.outcome.rows.append(rounded(row))

    def leave_out(self, system: str, shape: Any, reason: Any) -> None:
        self.outcome.left_out.append({"system": system, "shape": str(shape), "reason": str(reason)})

    def wrong(self, row: dict[str, Any]) -> None:
        self.outcome.wrong += 1
        self.add(row | {"wrong": True})


def _never(device: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment. `table`, `findings` and `pictures` get the whole result, and its rows without roofs and wrong
    answers."""

    name: str
    about: str  # one line, for --list
    question: str
    method: str  # paragraphs
    run: Callable[[Run], None]
    table: Callable[[dict, Rows], list[str]]
    findings: Callable[[dict, Rows], list[str]]  # sentences, made from the rows, about what the result shows
    pictures: Mapping[str, Callable[[dict, Rows], Any]] = field(default_factory=dict)  # by the file's suffix
    devices: tuple[str, ...] = ("cuda", "cpu")
    framework: str | None = None  # "numpy": the experiment uses only NumPy
    portable: Callable[[str], bool] = _never  # whether a result from this kind of device is independent of its speed
    may_be_empty: bool = False  # whether a page without rows is still useful


EXPERIMENTS: dict[str, Experiment] = {}


def register(experiment: Experiment) -> Experiment:
    EXPERIMENTS[experiment.name] = experiment
    return experiment


def results(data: dict) -> Rows:
    """The rows that tables and pictures show."""
    return [row for row in data["rows"] if row.get("pass") not in ("linear", "copy") and not row.get("wrong")]


def roofs(data: dict) -> dict[str, dict]:
    """The rows of the measured product and copy, by their pass."""
    return {row["pass"]: row for row in data["rows"] if row.get("pass") in ("linear", "copy")}
