"""The base class for a public function, which draws, makes and judges its calls; and the outcomes of a case."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_attn_minimal._core.queries import Plan

from .arrays import Arena, Array
from .draw import Draw
from .judge import Wrong

# The outcomes of a case. All except those of the first line (FINE) are findings.
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
    """The conditions under which a case is drawn."""

    backend: Any
    kernel: str | None = None  # draw only for this kernel
    function: str | None = None  # draw only calls of this function


class Function:
    """Draws, makes and judges calls of a public function. One instance serves all cases."""

    name: str
    weight = 1.0  # its share of the cases
    NEEDS: tuple[str, ...] = ()  # dtypes without which none of its calls can be drawn
    DEFAULTS: dict[str, Any] = {}  # entries of the spec; one that has its default is left out
    LEAST: dict[str, int] = {}  # the smallest value of a size, if that is not 0 (for shrinking)
    REQUIRED: tuple[str, ...] = ()  # arrays that must not be None
    FREE: dict[str, tuple[int, ...]] = {}  # axes that may have another size
    LOOSE: dict[str, tuple[int, ...]] = {}  # axes that may have another size in calls without `out`
    BAD_OPTIONS: dict[str, tuple] = {}  # values that must be refused
    any_rank = False  # whether an array with one axis less may be valid, too
    capturable = True  # whether a CUDA graph can hold the call
    queried = False  # whether the query refuses every call that is refused
    ALIASES: tuple[tuple[str, str], ...] = ()  # (output, input) that may not be the same array

    def kernels(self, backend) -> list[str]:
        """The names that the option `kernel` accepts on this device; [] if there is no choice."""
        return []

    def draw(self, draw: Draw, backend) -> dict[str, Any]:
        raise NotImplementedError

    def arrays(self, spec) -> dict[str, Array]:
        raise NotImplementedError

    def values(self, spec) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def options(self, spec) -> dict[str, Any]:
        """The arguments that are not arrays."""
        return {}

    def query(self, spec, views, options) -> Plan | None:
        return None

    def exact_query(self, spec) -> bool:
        """Whether the query gets everything on which the choice of the kernel depends. Some queries get fewer
        arrays."""
        return True

    def call(self, spec, views, options) -> dict[str, Any]:
        """Makes the call. Returns, by name, the results that are not arrays of the arena."""
        raise NotImplementedError

    def written(self, spec, values) -> dict[str, Any]:
        """The outputs in the arena by name, with the index of the part that the call writes."""
        return {name: ... for name, array in self.arrays(spec).items() if array.output}

    def judge(self, spec, values, after: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
        """Raises Wrong for a wrong answer. `after` has every array of the arena as it is after the call."""
        raise NotImplementedError

    def always_served(self, spec) -> bool:
        """Whether some kernel must serve this call. A refusal is then a finding, unless a kernel was named."""
        return True

    def bad_options(self, spec) -> dict[str, tuple]:
        """The part of BAD_OPTIONS that this call looks at."""
        return self.BAD_OPTIONS

    def bad_contents(self, spec, values, draw: Draw) -> tuple[str, int, int] | None:
        """(name of an integer array, flat index, a number that must not be there), or None."""
        return None

    def simpler(self, spec) -> Iterator[dict[str, Any]]:
        """Smaller calls of this function, for shrink.py."""
        return iter(())

    def get(self, spec, key: str) -> Any:
        return spec.get(key, self.DEFAULTS[key])

    def trimmed(self, spec) -> dict[str, Any]:
        """The spec without entries that have their default value."""
        return {k: v for k, v in spec.items() if k not in self.DEFAULTS or v != self.DEFAULTS[k]}


def untouched_by(arena: Arena, written, memory=None) -> str:
    """A text about the bytes that changed outside of `written`; "" if there are none."""
    try:
        arena.check_untouched(arena.download() if memory is None else memory, written)
        return ""
    except Wrong as wrong:
        return str(wrong)


def told(error: Exception, frames: int = 6) -> str:
    """Names an unexpected exception, then its last frames. The first line of a message is its headline."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-frames))
    return f"{type(error).__name__}: {error}\n{trace}"


def where(error: BaseException) -> str:
    """The file and line that raised the error, for messages."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" (at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
