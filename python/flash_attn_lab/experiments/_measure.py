"""Checks kernels and variants on one shape against float64, then times them in shuffled turns, with the tools of
`bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..bench.attention import prepared
from ..bench.machine import first_line
from ..bench.suite import rounded, speed_text
from ..bench.systems import Inputs, Refused, Shape, System, ours
from ..bench.timing import interleave
from .experiment import Run


@dataclass
class Candidate:
    """A kernel or variant to time on a shape. `make` gets our inputs of the shape, which are quantised for float8."""

    name: str
    make: Callable[[Shape, Inputs], System]
    row: dict[str, Any] = field(default_factory=dict)  # more fields of its row


def kernel(name: str | None, **more: bool) -> Candidate:
    """A kernel of the library by its name; None: the kernel that the library chooses."""
    return Candidate(name or "best", lambda shape, inputs: ours(shape, inputs, name, 0, **more), dict(more))


def measure(run: Run, shape: Shape, candidates: list[Candidate], graphs: bool | None = None) -> list[dict]:
    """The rows of the candidates that serve the shape and are right. Other candidates are noted in the outcome."""
    machine, outcome = run.machine, run.outcome
    inputs, _, exact, _ = prepared(machine, shape, run.seed)
    systems: list[tuple[System, dict]] = []
    for candidate in candidates:
        try:
            system = candidate.make(shape, inputs)
            for place in inputs.results:
                place[...] = float("nan")
            answer = system.launch(0)
            machine.synchronize()
        except Refused as refusal:
            run.leave_out(candidate.name, shape, refusal)
            continue
        except (MemoryError, NotImplementedError, ValueError) as error:
            run.leave_out(candidate.name, shape, first_line(error))
            continue
        err, budget = exact.judge(answer, "tf32" if system.tf32 else shape.dtype)
        del answer
        row: dict[str, Any] = {
            "name": candidate.name,
            "kernel": system.kernel,
            "pass": "bwd" if shape.backward else "fwd",
        }
        row |= shape.keys() | candidate.row | {"max_err": err, "err_budget": budget}
        if err <= budget:
            systems.append((system, row))
        else:
            run.wrong(row)
    if shape.backward:
        graphs = False
    timings = interleave(
        machine, [system.launch for system, _ in systems], run.protocol, run.meter, seed=run.seed, graphs=graphs
    )
    rows = [rounded(row | timing.row(shape.flops / 1e12)) for (_, row), timing in zip(systems, timings, strict=True)]
    outcome.rows += rows
    machine.release()
    return rows


def summary(rows: list[dict]) -> str:
    """A text about the fastest of some rows, for a line of progress."""
    if not rows:
        return "nothing was timed"
    best = min(rows, key=lambda row: row["us"])
    return f"fastest {best['name']} {best['us']:.1f} us, {speed_text(best['tflops'])}"
