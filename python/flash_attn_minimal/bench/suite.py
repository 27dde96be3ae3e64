"""What a suite is. Each module of suites registers its own, with the table and the pictures of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """What a run found."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    wrong: int = 0
    conditions: tuple[float, float] | None = None  # medians of (MHz, W)
    driver: str | None = None
    load: float | None = None  # processes running on the host before the start
    chosen: list[str] = field(default_factory=list)  # options that were drawn: with them the command finds the same


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`table` and `pictures` get the whole result and its timed rows."""

    name: str
    about: str  # for --help
    options: frozenset[str]  # the command's options that it listens to; any other is refused, not ignored
    run: Callable[[Any, Any], Any]  # options, protocol -> (machine, Outcome); an exit status where nothing is written
    table: Callable[[dict, list[dict]], list[str]]
    pictures: Mapping[str, Callable[[dict, list[dict]], Any]] = field(default_factory=dict)  # by the file's suffix
    dtype: str | None = None  # of our kernels, where the suite has only one
    titled: bool = True  # whether the title names the dtypes of the rows
    how: str = "median of the bursts, systems in shuffled turns"
    device_time: bool = True  # whether times on a GPU are the device's; else they are the host's
    checked: str | None = None  # how answers are checked, if not against float64 with a budget


SUITES: dict[str, Suite] = {}


def register(suite: Suite) -> Suite:
    SUITES[suite.name] = suite
    return suite


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with floats cut to five digits: none of the numbers is more exact."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) and math.isfinite(v) else v for k, v in row.items()}


def speed_text(tflops: float) -> str:
    return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.1f} GFLOP/s"
