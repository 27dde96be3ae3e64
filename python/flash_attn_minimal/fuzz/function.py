"""What a case is about: a public function, how its calls are drawn, made and judged; and the outcomes of a case."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._query import Plan
from .arrays import Arena, Array
from .draw import Draw
from .judge import Wrong

# The outcomes of a case. All but those of the first line (FINE) are findings.
PASSED, REFUSED, REJECTED, SKIPPED = "passed", "refused", "rejected", "skipped"
WRONG, UNTOUCHED, EXCEPTION, ACCEPTED, QUERY, BROKEN = (
    "wrong answer", "canary", "wrong exception", "not refused", "query disagrees", "campaign broken",
)  # fmt: skip
HANG, CRASH, STICKY = "hang", "crash", "sticky CUDA error"
FINE = (PASSED, REFUSED, REJECTED, SKIPPED)

STATUS = {"FA_BAD_ARGUMENT": "BadArgument", "FA_UNSUPPORTED": "Unsupported", "FA_OUT_OF_MEMORY": "OutOfMemory"}


@dataclass
class Outcome:
    kind: str
    kernel: str = ""
    message: str = ""

    @property
    def fine(self) -> bool:
        return self.kind in FINE


@dataclass
class World:
    """What a case is drawn for."""

    backend: Any
    kernel: str | None = None  # only this one, where a function has a table of kernels
    function: str | None = None


class Function:
    """A public function: how its calls are drawn, made and judged. One instance serves all cases."""

    name: str
    weight = 1.0  # its share of the cases
    NEEDS: tuple[str, ...] = ()  # dtypes without which none of its calls can be drawn
    DEFAULTS: dict[str, Any] = {}  # of the spec; an entry that has its default is left out
    LEAST: dict[str, int] = {}  # the smallest value of a size, where that is not 0 (shrinking)
    REQUIRED: tuple[str, ...] = ()  # arrays that may not be None
    FREE: dict[str, tuple[int, ...]] = {}  # axes that may have another size
    LOOSE: dict[str, tuple[int, ...]] = {}  # likewise axes that may have another size when there is no `out`
    BAD_OPTIONS: dict[str, tuple] = {}  # values that must be refused
    any_rank = False  # whether an array with one axis less may be valid, too
    capturable = True  # whether a CUDA graph can hold the call
    queried = False  # whether the query refuses what the call refuses
    ALIASES: tuple[tuple[str, str], ...] = ()  # (output, input) that may not be the same array

    def kernels(self, backend) -> list[str]:
        """The names that `kernel` takes on this device; none where there is no choice."""
        return []

    def draw(self, draw: Draw, backend) -> dict[str, Any]:
        raise NotImplementedError

    def arrays(self, spec) -> dict[str, Array]:
        raise NotImplementedError

    def values(self, spec) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def options(self, spec) -> dict[str, Any]:
        """The arguments that are no arrays."""
        return {}

    def query(self, spec, views, options) -> Plan | None:
        return None

    def exact_query(self, spec) -> bool:
        """Whether the query gets everything that the call's kernel depends on. It may lack some of the arrays."""
        return True

    def call(self, spec, views, options) -> dict[str, Any]:
        """Makes the call; returns by name the results that are not arrays of the arena."""
        raise NotImplementedError

    def written(self, spec, values) -> dict[str, Any]:
        """The outputs in the arena, and which part of each the call writes."""
        return {name: ... for name, array in self.arrays(spec).items() if array.output}

    def judge(self, spec, values, after: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
        """Raises Wrong. `after` has every array of the arena as the call left it."""
        raise NotImplementedError

    def always_served(self, spec) -> bool:
        """Whether some kernel must take this call: without a name, a refusal is a finding."""
        return True

    def bad_options(self, spec) -> dict[str, tuple]:
        """Of BAD_OPTIONS, those that this call looks at."""
        return self.BAD_OPTIONS

    def bad_contents(self, spec, values, draw: Draw) -> tuple[str, int, int] | None:
        """(name of an integer array, flat index, a number that must not stand there), or None."""
        return None

    def simpler(self, spec) -> Iterator[dict[str, Any]]:
        """Smaller calls of its own kind, for shrink.py."""
        return iter(())

    def get(self, spec, key: str) -> Any:
        return spec.get(key, self.DEFAULTS[key])

    def trimmed(self, spec) -> dict[str, Any]:
        """The spec without entries that have their default."""
        return {k: v for k, v in spec.items() if k not in self.DEFAULTS or v != self.DEFAULTS[k]}


def untouched_by(arena: Arena, written, memory=None) -> str:
    """A text about the bytes that changed outside of `written`; "" if there are none."""
    try:
        arena.check_untouched(arena.download() if memory is None else memory, written)
        return ""
    except Wrong as wrong:
        return str(wrong)


def told(error: Exception, frames: int = 6) -> str:
    """What an unexpected exception was, then its last frames: a headline is the first line of a message."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-frames))
    return f"{type(error).__name__}: {error}\n{trace}"


def where(error: BaseException) -> str:
    """The line that raised it, for messages."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" (at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
