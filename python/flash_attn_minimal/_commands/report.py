"""Facts that reports name: the processor, its cores, numbers of things."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def plural(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def size_text(count: float, digits: int = 2) -> str:
    """A number of bytes, such as `1.50 GiB`."""
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= bytes_:
            return f"{count / bytes_:.{digits}f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor, such as `Intel Xeon Platinum 8480C`; never a host name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2] for line in lines if line.startswith(("model name", "Model")))
    except (OSError, StopIteration):
        name = f"{platform.machine()} processor"
    for noise in ("(R)", "(TM)", "(r)", "(tm)", "CPU", "Processor"):
        name = name.replace(noise, " ")
    return " ".join(name.partition("@")[0].split())
