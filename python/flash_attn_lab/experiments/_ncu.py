"""Counters of calls, read with NVIDIA Nsight Compute.

ncu runs a separate process (_calls.py), which launches one call after another between the profiler's marks. Before each
call it launches a kernel that fills an array. ncu's CSV has a line for each kernel and metric. The metric of a call is
the sum over its kernels; for a share of a peak, the mean weighted by time.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..children import python_path

DURATION = "gpu__time_duration.sum"
BYTES = {
    "dram_bytes": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "l2_bytes": ("lts__t_bytes.sum",),
}
# A wavefront of the load-store unit is a pass of up to 128 bytes. Operands that wgmma reads and tiles that the copy
# engine writes do not go through this unit, and are not counted.
WAVEFRONTS, WAVEFRONT = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 128
# The tensor cores' share of their peak. The name differs between generations and releases; the first known one is used.
TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
)
TRAFFIC_METRICS = (DURATION, *BYTES["dram_bytes"], *BYTES["l2_bytes"], WAVEFRONTS)
SCALE = {"": 1, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "%": 1}
SCALE |= {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1, "second": 1}
PROCESS = "flash_attn_lab.experiments._calls"
FILL = "fill"  # part of the name of the kernel before each call, in PyTorch and in CuPy
TIMEOUT = 180  # seconds for one profiled process


class NcuError(Exception):
    """There are no counters; the text says why."""


class Kernel(NamedTuple):
    name: str
    metrics: dict[str, float]


def parse(text: str) -> list[Kernel]:
    """The metrics of every kernel, in base units (bytes, seconds, percent), from the text of `ncu --csv`. Lines before
    the header belong to ncu's log or to the program. A metric that ncu could not read is left out."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise NcuError(_reason(text))
    kernels: dict[str, Kernel] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row.get("Metric Name") is None or not (row["ID"] or "").isdigit():
            continue
        metrics = kernels.setdefault(row["ID"], Kernel(row["Kernel Name"], {})).metrics
        try:
            value = float(row["Metric Value"].replace(",", "")) * SCALE.get(row["Metric Unit"], 1)
        except (AttributeError, ValueError):  # "n/a"
            continue
        if math.isfinite(value):
            metrics[row["Metric Name"]] = value
    return list(kernels.values())


def by_call(kernels: Iterable[Kernel], count: int) -> list[list[dict[str, float]]]:
    """The metrics of the kernels of each call; [] for a call that launched nothing."""
    calls: list[list[dict[str, float]]] = []
    for kernel in kernels:
        if FILL in kernel.name.lower():
            calls.append([])
        elif calls:
            calls[-1].append(kernel.metrics)
    if len(calls) != count:
        raise NcuError(f"ncu saw {len(calls)} of {count} calls")
    return calls


def _reason(text: str) -> str:
    """The reason why ncu has no table, from its first line with an error or warning."""
    for line in text.splitlines():
        if "==ERROR==" in line or "ERR_NVGPUCTRPERM" in line or "==WARNING==" in line:
            return f"ncu: {line.replace('==ERROR==', '').replace('==WARNING==', '').strip()}"
    last = [line for line in text.splitlines() if line.strip()][-1:]
    return f"ncu wrote no table{': ' + last[0].strip()[:200] if last else ''}"


def total(kernels: Iterable[dict[str, float]], names: Iterable[str]) -> float | None:
    """The sum of metrics over kernels; None if one is missing."""
    values = [kernel.get(name) for kernel in kernels for name in names]
    return None if not values or None in values else sum(value for value in values if value is not None)


def traffic(kernels: list[dict[str, float]]) -> dict[str, float]:
    """The bytes that a call moved at each level, and its time under ncu."""
    found = {name: total(kernels, metrics) for name, metrics in BYTES.items()}
    wavefronts = total(kernels, (WAVEFRONTS,))
    found["shared_bytes_moved"] = None if wavefronts is None else wavefronts * WAVEFRONT
    found["ncu_us"] = None if (seconds := total(kernels, (DURATION,))) is None else seconds * 1e6
    return {name: value for name, value in found.items() if value is not None}


def tensor_shares(framework: str, calls: list[dict[str, Any]]) -> list[float | None]:
    """For each call, the percentage of the tensor cores' peak, averaged over its kernels with their times as
    weights."""
    unknown = NcuError("ncu knows no metric of the tensor cores")
    for name in TENSOR:
        try:
            counted = profile((DURATION, name), framework, calls)
        except NcuError as error:
            if "metric" not in str(error).lower():
                raise
            unknown = error
            continue
        shares = [_weighted(kernels, name) for kernels in counted]
        if any(share is not None for share in shares):
            return shares
    raise unknown


def _weighted(kernels: list[dict[str, float]], name: str) -> float | None:
    pairs = [(kernel[name], kernel[DURATION]) for kernel in kernels if name in kernel and DURATION in kernel]
    time = sum(weight for _, weight in pairs)
    return sum(share * weight for share, weight in pairs) / time if time > 0 else None


def command(metrics: Iterable[str], asked: dict[str, Any], log: Path) -> list[str]:
    ncu = ["ncu", "--csv", "--page", "details", "--print-units", "base", "--metrics", ",".join(metrics)]
    ncu += ["--profile-from-start", "off", "--clock-control", "none", "--log-file", str(log)]
    return [*ncu, sys.executable, "-c", f"import sys; from {PROCESS} import main; main(sys.argv[1])", json.dumps(asked)]


def profile(metrics: Iterable[str], framework: str, calls: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """The metrics of the kernels of each call. A call is an entry as call_of() in _calls.py makes it."""
    if shutil.which("ncu") is None:
        raise NcuError("ncu is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        environment = os.environ | {"PYTHONPATH": python_path(), "LC_ALL": "C"}  # decimal points in numbers
        words = command(metrics, {"framework": framework, "calls": calls}, log)
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
        except subprocess.TimeoutExpired:
            raise NcuError(f"ncu took longer than {TIMEOUT} s") from None
        except OSError as error:
            raise NcuError(f"ncu does not start: {error.strerror}") from None
        text = log.read_text(errors="replace") if log.is_file() else ""
        if done.returncode:
            raise NcuError(_reason(text + "\n" + done.stdout + "\n" + done.stderr))
        return by_call(parse(text), len(calls))
