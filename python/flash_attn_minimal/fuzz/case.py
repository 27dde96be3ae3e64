"""One case: a spec, which is a dict of plain values, run on a backend and judged.

A spec names a function and what the call has that is not the function's default; the numbers in its arrays follow from
its seed. run(spec, backend) is all that a worker does; it never raises, but for what ends the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._library import FlashAttnError, OutOfMemory, Unsupported
from ..attention import Plan
from .arrays import Arena, Array, size_of
from .draw import Draw
from .judge import Wrong

# What may come out of a case. Those of the second line are findings, and so are HANG, CRASH and STICKY.
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
    DEFAULTS: dict[str, Any] = {}  # of the spec; an entry that has its default is left out
    LEAST: dict[str, int] = {}  # the smallest value of a size, where that is not 0 (shrinking)
    REQUIRED: tuple[str, ...] = ()  # arrays that may not be None
    FREE: dict[str, tuple[int, ...]] = {}  # axes that may have another size
    LOOSE: dict[str, tuple[int, ...]] = {}  # likewise axes that may have another size when there is no `out`
    BAD_OPTIONS: dict[str, tuple] = {}  # values that must be refused
    any_rank = False  # whether an array with an axis less may be right too
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
        """Whether the query is told everything that decides: it is not about arrays that it does not take."""
        return True

    def call(self, spec, views, options) -> dict[str, Any]:
        """The results that are no arrays of the arena, by name."""
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
        """An integer array, an index and what it may not hold there."""
        return None

    def simpler(self, spec) -> Iterator[dict[str, Any]]:
        """Smaller calls of its own kind, for shrink.py."""
        return iter(())

    def get(self, spec, key: str) -> Any:
        return spec.get(key, self.DEFAULTS[key])

    def trimmed(self, spec) -> dict[str, Any]:
        """Without what is a default anyhow."""
        return {k: v for k, v in spec.items() if k not in self.DEFAULTS or v != self.DEFAULTS[k]}


def functions() -> dict[str, Function]:
    from . import attention, cache, small, weights

    found = (*attention.FUNCTIONS, *cache.FUNCTIONS, *small.FUNCTIONS, *weights.FUNCTIONS)
    return {function.name: function for function in found}


def generate(seed: int, number: int, world: World) -> dict[str, Any]:
    """The case of this number: it depends on these arguments, the device and the kernels of the build alone."""
    rng = np.random.default_rng([seed, number])
    known = functions()
    names = [world.function] if world.function else list(known)
    if world.kernel:
        names = [n for n in names if world.kernel in known[n].kernels(world.backend)]
    weights = np.array([known[n].weight for n in names])
    function = known[names[int(rng.choice(len(names), p=weights / weights.sum()))]]
    draw = Draw(rng)
    kernels = function.kernels(world.backend)
    kernel = world.kernel or (draw.pick(kernels) if kernels and draw.chance(0.65) else None)
    spec = _served(function, kernel, draw, world.backend)
    if draw.chance(0.15):
        from . import invalid

        spec = invalid.mutated(function, spec, draw, world.backend)
    return spec


def _served(function: Function, kernel: str | None, draw: Draw, backend, tries: int = 40) -> dict[str, Any]:
    """A call, forced to this kernel and drawn again until its query says that it serves; the last one otherwise."""
    for attempt in range(tries if kernel else 1):
        draw.plain = min(attempt / 12, 0.9) if kernel else float(draw.rng.uniform(0, 0.8))
        spec = {"function": function.name, **function.trimmed(function.draw(draw, backend)), "seed": draw.seed()}
        if "layouts" in spec and size_of(function.arrays(spec)) > 3e7:
            del spec["layouts"]
        if kernel is None:
            break
        spec["kernel"] = kernel
        if draw.chance(0.03):  # as it comes, so that refusals are seen too
            break
        try:
            arena = Arena(backend, function.arrays(spec), None)
            if function.query(spec, arena.views, _options(function, spec)).status == "FA_OK":
                break
        except FlashAttnError:
            pass
    draw.plain = 0.0
    if backend.graphs and spec.get("repeats") and draw.chance(0.3):
        spec["graph"] = True
    if draw.chance(0.1):
        spec["numpy_scalars"] = True
    return spec


def _options(function: Function, spec) -> dict[str, Any]:
    options = function.options(spec)
    if spec.get("numpy_scalars"):
        kinds = {bool: np.bool_, int: np.int64, float: np.float64}
        options = {k: kinds[type(v)](v) if type(v) in kinds and abs(v) < 2**63 else v for k, v in options.items()}
    return options | {"kernel": spec["kernel"]} if spec.get("kernel") else options


def run(spec: dict[str, Any], backend) -> Outcome:
    """Makes the call and judges it."""
    function = functions()[spec["function"]]
    try:
        values = function.values(spec)
        arena = Arena(backend, function.arrays(spec), values, spec.get("seed", 0))
        options = _options(function, spec)
    except FlashAttnError as error:  # of what prepares a call, such as packing a weight
        return Outcome(EXCEPTION, spec.get("kernel") or "", f"{type(error).__name__}: {error}")
    if "mutation" in spec:
        from . import invalid

        return invalid.run(function, spec, arena, values, options)
    try:
        plan = function.query(spec, arena.views, options)
    except FlashAttnError as error:
        return Outcome(EXCEPTION, spec.get("kernel") or "", f"the query raised {type(error).__name__}: {error}")
    kernel = plan.kernel if plan and plan.kernel else spec.get("kernel") or ""
    try:
        return Outcome(*_launch(function, spec, arena, values, options, plan, kernel))
    except Wrong as wrong:
        return Outcome(WRONG, kernel, str(wrong))


def _launch(function, spec, arena, values, options, plan, kernel) -> tuple[str, str, str]:
    backend = arena.backend
    expected = STATUS.get(plan.status, "") if plan else ""
    if plan and not expected and spec.get("kernel") and plan.kernel != spec["kernel"]:
        return QUERY, kernel, f"kernel={spec['kernel']!r}, but the query says {plan.kernel!r}"
    try:
        results = function.call(spec, arena.views, options)
        backend.synchronize()
    except OutOfMemory as error:
        return SKIPPED, kernel, str(error)
    except Exception as error:
        if not backend.alive():
            return STICKY, kernel, f"{type(error).__name__}: {error}"
        untouched = _untouched(arena, {})
        if untouched:
            return UNTOUCHED, kernel, f"after {type(error).__name__} ({error}): {untouched}"
        if not isinstance(error, FlashAttnError):
            return EXCEPTION, kernel, "".join(traceback.format_exception_only(error)).strip() + _where(error)
        if isinstance(error, Unsupported) and not function.exact_query(spec):
            return REFUSED, kernel, str(error)
        if type(error).__name__ != expected:
            said = f"the query says {plan.status} {plan.error!r}" if plan else "there is no query"
            return QUERY if plan else EXCEPTION, kernel, f"{type(error).__name__}: {error}; {said}"
        if not spec.get("kernel") and isinstance(error, Unsupported) and function.always_served(spec):
            return EXCEPTION, kernel, f"no kernel takes this call: {error}"
        return (REFUSED if isinstance(error, Unsupported) else EXCEPTION), kernel, str(error)
    if expected:
        return QUERY, kernel, f"the query says {plan.status} {plan.error!r}, but the call ran"
    memory = arena.download()
    if untouched := _untouched(arena, function.written(spec, values), memory):
        return UNTOUCHED, kernel, untouched
    for name, array in results.items():
        if not backend.same_kind(array):
            raise Wrong(f"{name} is a {type(array).__name__}")
    returned = {name: backend.numpy(array) for name, array in results.items()}
    after = {name: arena.values(memory, name) for name in arena.arrays}
    function.judge(spec, values, after, returned)
    for again in range(spec.get("repeats", 0)):
        results = function.call(spec, arena.views, options)
        backend.synchronize()
        _same(f"call {again + 2} with the same arguments", arena, memory, results, returned)
    if spec.get("graph") and backend.graphs:
        results, graph = backend.replayed(lambda: function.call(spec, arena.views, options))
        _same("a replayed graph of the call", arena, memory, results, returned)
        del graph  # owns the memory of the results
    return PASSED, kernel, ""


def _same(what: str, arena: Arena, memory, results, returned) -> None:
    """What the call did again, bit for bit."""
    if not np.array_equal(arena.download(), memory):
        raise Wrong(f"{what} wrote something else")
    for name, array in results.items():
        if not np.array_equal(arena.backend.numpy(array), returned[name], equal_nan=True):
            raise Wrong(f"{what} returned another {name}")


def _untouched(arena: Arena, written, memory=None) -> str:
    try:
        arena.check_untouched(arena.download() if memory is None else memory, written)
        return ""
    except Wrong as wrong:
        return str(wrong)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
