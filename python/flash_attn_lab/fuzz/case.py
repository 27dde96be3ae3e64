"""One case: a spec, which is a dict of plain values, is run on a backend and judged.

A spec names a function and every property of the call that is not the function's default. The numbers in the arrays
follow from the spec's seed. A worker does nothing but run(spec, backend), which raises only what is to end the process.
"""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np

from flash_attn_minimal.errors import FlashAttnError, OutOfMemory, Unsupported

from . import attention, backward, cache, distributed, invalid, small, weights
from .arrays import Arena, size_of
from .draw import Draw
from .function import (
    EXCEPTION,
    PASSED,
    QUERY,
    REFUSED,
    SKIPPED,
    STATUS,
    STICKY,
    UNTOUCHED,
    WRONG,
    Function,
    Outcome,
    World,
    untouched_by,
    where,
)
from .judge import Wrong


def functions() -> dict[str, Function]:
    modules = attention, backward, cache, distributed, small, weights
    found = [function for module in modules for function in module.FUNCTIONS]
    return {function.name: function for function in found}


def generate(seed: int, number: int, world: World) -> dict[str, Any]:
    """Draws the case of this number. It depends only on these arguments, the device and the kernels of the build."""
    rng = np.random.default_rng([seed, number])
    known = functions()
    names = [world.function] if world.function else list(known)
    names = [n for n in names if world.backend.dtypes.issuperset(known[n].NEEDS)]
    if world.kernel:
        names = [n for n in names if world.kernel in known[n].kernels(world.backend)]
    shares = np.array([known[n].weight for n in names])
    function = known[names[int(rng.choice(len(names), p=shares / shares.sum()))]]
    draw = Draw(rng)
    kernels = function.kernels(world.backend)
    kernel = world.kernel or (draw.pick(kernels) if kernels and draw.chance(0.65) else None)
    spec = _served(function, kernel, draw, world.backend)
    if draw.chance(0.15):
        spec = invalid.mutated(function, spec, draw, world.backend)
    return spec


def _served(function: Function, kernel: str | None, draw: Draw, backend, tries: int = 40) -> dict[str, Any]:
    """Draws a call. With a forced kernel, calls are drawn until the query says that the kernel serves one; after
    `tries` the last one is taken."""
    for attempt in range(tries if kernel else 1):
        draw.plain = min(attempt / 12, 0.9) if kernel else float(draw.rng.uniform(0, 0.8))
        spec = {"function": function.name, **function.trimmed(function.draw(draw, backend)), "seed": draw.seed()}
        if "layouts" in spec and size_of(function.arrays(spec)) > 3e7:
            del spec["layouts"]
        if kernel is None:
            break
        spec["kernel"] = kernel
        if draw.chance(0.03):  # keep it, served or not, so that refusals are tested, too
            break
        try:
            arena = Arena(backend, function.arrays(spec), None)
            if function.query(spec, arena.views, _options(function, spec)).status == "FA_OK":
                break
        except FlashAttnError:
            pass
    draw.plain = 0.0
    if backend.graphs and function.capturable and spec.get("repeats") and draw.chance(0.3):
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
    except FlashAttnError as error:  # raised while preparing the call, such as by packing a weight
        return Outcome(EXCEPTION, spec.get("kernel") or "", f"{type(error).__name__}: {error}")
    if "mutation" in spec:
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
        untouched = untouched_by(arena, {})
        if untouched:
            return UNTOUCHED, kernel, f"after {type(error).__name__} ({error}): {untouched}"
        if not isinstance(error, FlashAttnError):
            return EXCEPTION, kernel, "".join(traceback.format_exception_only(error)).strip() + where(error)
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
    if untouched := untouched_by(arena, function.written(spec, values), memory):
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
        del graph  # kept until here because it owns the memory of the results
    return PASSED, kernel, ""


def _same(what: str, arena: Arena, memory, results, returned) -> None:
    """Raises Wrong unless a repetition of the call has written and returned the same bits."""
    if not np.array_equal(arena.download(), memory):
        raise Wrong(f"{what} wrote something else")
    for name, array in results.items():
        if not np.array_equal(arena.backend.numpy(array), returned[name], equal_nan=True):
            raise Wrong(f"{what} returned another {name}")
