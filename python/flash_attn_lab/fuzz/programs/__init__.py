"""`python -m flash_attn_lab fuzz --programs N`: random programs, which test whether calls affect later calls.

    steps.py     a step: a call, and the way it is made
    draw.py      programs from a seed and a number
    run.py       runs a program: threads, streams, memory that is used again, recordings, sessions
    places.py    memory and streams of the CPU, PyTorch and CuPy; exact.py, workspaces between guards
    answers.py   the answer of a call, and its comparison with the answer of the same call alone
    worker.py    a worker of the campaign; children.py, forked processes; alone.py, the process for calls alone on a GPU
    autograd.py, decode.py    calls that single cases do not have
    shrink.py    programs of fewer steps; command.py, the campaign and its report

On the CPU the worker itself never makes a call. It forks one process for a program, and one for each of its calls. A
process with a GPU cannot be forked, so there a program runs in the worker, and its calls run again, one by one and in
another order, in a second process. If the two differ, a new process decides.
"""

from __future__ import annotations

from typing import Any


def reproduce(program: dict[str, Any], device: str = "cpu", framework: str | None = None, seconds: float = 60.0):
    """Runs one program, and its calls alone. Returns the outcome (a function.Outcome)."""
    from .worker import Judge

    with Judge(device, framework, seconds) as judge:
        return judge.outcome(program)
