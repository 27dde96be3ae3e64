"""Measures how long nvcc takes for the rungs that are compiled ahead of time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time

from .rung import ROOT, Rung


def nvcc_command(unit: str, capability: tuple[int, int], out: str) -> list[str]:
    """The command that compiles a unit of the library for one GPU, as the library's build does. $FLASH_ATTN_CUTLASS
    names the folder of CUTLASS's headers."""
    number = f"{10 * capability[0] + capability[1]}{'a' if capability[0] == 9 else ''}"
    words = [
        "nvcc",
        "-std=c++17",
        "-O3",
        "--expt-relaxed-constexpr",
        f"-gencode=arch=compute_{number},code=sm_{number}",
    ]
    words += ["-I", str(ROOT / "cuda"), "-I", str(ROOT)]
    if cutlass := os.environ.get("FLASH_ATTN_CUTLASS"):
        words += ["-isystem", cutlass]
    return [*words, "-c", str(ROOT / unit), "-o", out]


class Ahead:
    """Times nvcc while a benchmark runs: one process for each unit, if there are cores to spare."""

    LIMIT_S = 150.0  # the longest wait at the end

    def __init__(self, rungs: list[Rung], capability: tuple[int, int] | None):
        """capability: the GPU's; None without a GPU, and then nothing is compiled."""
        self.folder = tempfile.TemporaryDirectory(prefix="ladder-", ignore_cleanup_errors=True)
        self.running: dict[str, tuple[subprocess.Popen, float]] = {}
        self.seconds: dict[str, float] = {}
        units = {rung.name: rung.unit for rung in rungs if rung.unit}
        if not capability or not shutil.which("nvcc") or (os.cpu_count() or 1) < 2 * len(units):
            return
        for name, unit in units.items():
            words = nvcc_command(unit, capability, f"{self.folder.name}/{name}.o")
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.running[name] = process, time.monotonic()

    def read(self) -> None:
        """Records the units that are done. Call it often: a unit's time ends when it is seen to be done."""
        for name, (process, start) in list(self.running.items()):
            if process.poll() is not None:
                if process.returncode == 0:
                    self.seconds[name] = time.monotonic() - start
                del self.running[name]

    def finish(self, rows: list[dict]) -> None:
        """Waits for the remaining units, then adds build_s to the rows of a benchmark."""
        end = time.monotonic() + self.LIMIT_S
        while self.running and time.monotonic() < end:
            time.sleep(0.1)
            self.read()
        for process, _ in self.running.values():
            process.kill()
            process.wait()
        self.folder.cleanup()
        for row in rows:
            if row["system"] in self.seconds:
                row["build_s"] = round(self.seconds[row["system"]], 1)
