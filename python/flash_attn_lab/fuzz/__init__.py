"""`python -m flash_attn_lab fuzz`: random valid and invalid calls of every function, compared with float64.

    function.py   the description of a public function, and the outcomes of a case
    attention.py, backward.py, cache.py, distributed.py, small.py, weights.py
                  how each function's calls are drawn, made and judged
    case.py       a spec (a dict of plain values) drawn from a seed and a number, run, judged
    invalid.py    calls that must be refused
    arrays.py     the arrays of a call among guards of NaN, on the CPU or the GPU
    judge.py      how far from float64 a result may be
    campaign.py   worker processes under a watchdog; worker.py, the other end; report.py; shrink.py
    programs/     programs of calls: whether one call affects another
    readers.py    damaged files for the readers of files; edits.py damages them

A finding is printed as a Python call that repeats it: `reproduce(spec, device)`.
"""

from __future__ import annotations

from typing import Any

from flash_attn_minimal._commands.command import command

from ..command import interruptible


def reproduce(spec: dict[str, Any], device: str = "cpu", framework: str | None = None):
    """Runs one case in this process; returns its outcome (a function.Outcome)."""
    from .arrays import backend_for
    from .case import run

    return run(spec, backend_for(device, framework))


@command("fuzz")
def main(argv: list[str]) -> int:
    from . import campaign

    options = campaign.parsed(argv)
    with interruptible():
        if options.programs is None:
            return campaign.run(options, argv)
        from .programs import command

        return command.run(options, argv)
