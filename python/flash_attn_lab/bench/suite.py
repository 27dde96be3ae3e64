"""Defines a suite. Each module of suites registers its suites, with the table and the pictures of their results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..command import interruptible
from ..progress import Progress
from .machine import Meter, first_line


@dataclass
class Outcome:
    """The results of a run."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    wrong: int = 0
    conditions: tuple[float, float] | None = None  # medians of (MHz, W)
    driver: str | None = None
    load: float | None = None  # processes running on the host before the start
    stopped: str = ""  # why the run ended before its last step
    failure: BaseException | None = None  # what ended it
    chosen: list[str] = field(default_factory=list)  # options that were drawn: with them the command finds the same


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`table` and `pictures` get the whole result and its timed rows."""

    name: str
    about: str  # for --help
    options: frozenset[str]  # the command's options that the suite knows; any other is refused, not ignored
    run: Callable[[Any, Any], Any]  # options, protocol -> (machine, Outcome), or an exit status: nothing to write
    table: Callable[[dict, list[dict]], list[str]]
    pictures: Mapping[str, Callable[[dict, list[dict]], Any]] = field(default_factory=dict)  # by the file's suffix
    dtype: str | None = None  # the dtype of our kernels, if the suite has only one
    titled: bool = True  # whether the title names the dtypes of the rows
    how: str = "median of the bursts, systems in shuffled turns"
    device_time: bool = True  # whether times on a GPU are the device's; else they are the host's
    checked: str | None = None  # how answers are checked, if not against float64 with a budget


@contextlib.contextmanager
def measuring(outcome: Outcome, machine: Any, steps: int, title: str) -> Iterator[tuple[Meter, Progress]]:
    """The meter and the progress of a run, which counts its steps. What ends the block early, Ctrl-C or an error, is
    kept in the outcome once that has rows: the caller goes on with them."""
    with Meter(machine) as meter, _Steps(steps, title) as progress:
        try:
            with interruptible() as progress.interrupt:
                yield meter, progress
        except (KeyboardInterrupt, Exception) as error:
            if not any("us" in row for row in outcome.rows):
                raise
            outcome.failure = error
            interrupted = isinstance(error, KeyboardInterrupt)
            outcome.stopped = "interrupted" if interrupted else f"{type(error).__name__}: {first_line(error)}"
        outcome.conditions, outcome.driver = meter.between(), meter.driver


class _Steps(Progress):
    interrupt: Any = None

    def step(self, line: str) -> None:
        super().step(line)
        self.interrupt.check()


SUITES: dict[str, Suite] = {}


def register(suite: Suite) -> Suite:
    SUITES[suite.name] = suite
    return suite


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with floats rounded to five digits, because no number is more exact. An error of inf or NaN, which JSON
    lacks, becomes 1e30."""
    return {key: _rounded(value) if isinstance(value, float) else value for key, value in row.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if math.isfinite(value) else 1e30


def speed_text(tflops: float) -> str:
    return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.1f} GFLOP/s"
