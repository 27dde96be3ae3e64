"""The suite `profile`: one kernel on one shape under a profiler, ncu on a GPU and perf on the CPU."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time

from .attention import SHAPE, TYPED, AttentionSuite, one_shape, opened, prepared, shapes_of
from .check import Exact
from .machine import SHORT, BenchError
from .suite import register
from .systems import Refused, Shape, System, ours


def run(options, protocol) -> int:
    machine = opened(options)
    if len(options.kernel or ()) > 1:
        raise BenchError(f"--kernel {','.join(options.kernel)}: suite profile takes one kernel")
    if options.kernel == ["best"]:
        options.kernel = None
    try:
        if options.inner:
            return inner(options, machine)
        if options.run:
            words = command(options, machine, sys.executable)
            if shutil.which(words[0]) is None:
                raise BenchError(f"{words[0]} is not on PATH; without --run the command is printed")
            return subprocess.run(words).returncode
        print(shlex.join(command(options, machine, "python")))
        return 0
    except Refused as refusal:
        raise BenchError(str(refusal)) from None


def command(options, machine, python: str) -> list[str]:
    """The command line that profiles this command with `--inner`, for one kernel and shape."""
    [shape] = shapes_of(options, machine)
    kernel = _profiled(options, machine, shape)[0].kernel or "best"
    mask = "causal" if shape.causal else "full"
    name = f"{kernel}_{SHORT[shape.dtype]}_d{shape.headdim}_s{shape.seqlen}_{mask}" + "_backward" * shape.backward
    words = [
        python,
        "-m",
        "flash_attn_lab",
        "bench",
        "--suite",
        "profile",
        "--inner",
        "--device",
        machine.device,
        "--kernel",
        kernel,
    ]
    words += ["--dtype", shape.dtype, "--headdim", str(shape.headdim), "--seqlen", str(shape.seqlen), "--mask", mask]
    words += [
        "--batch",
        str(shape.batch),
        "--heads",
        str(shape.nheads),
        "--heads-k",
        str(shape.nheads_k),
        "--framework",
        machine.framework,
    ]
    words += ["--backward"] * shape.backward + ["--allow-tf32"] * shape.allow_tf32
    if machine.device == "cuda":
        return [
            "ncu",
            "--set",
            "full",
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "-f",
            "-o",
            name,
            *words,
        ]
    if options.threads:
        words += ["--threads", str(options.threads)]
    return ["perf", "record", "-g", "-o", f"{name}.perf", *words]


def inner(options, machine) -> int:
    """The profiled process. After two launches to warm up: on a GPU, one launch between the profiler's marks; on the
    CPU, launches for a second."""
    [shape] = shapes_of(options, machine)
    system, exact = _profiled(options, machine, shape)
    for i in range(2):
        system.launch(i)
    machine.synchronize()
    if machine.device == "cuda":
        profiler = machine.torch.cuda.profiler if machine.framework == "torch" else machine.cupy.cuda.profiler
        profiler.start()
        system.launch(0)
        machine.synchronize()
        profiler.stop()
    else:
        start = time.perf_counter()
        while time.perf_counter() - start < 1:
            system.launch(0)
    err, budget = exact.judge(system.launch(0), "tf32" if system.tf32 else shape.dtype)
    print(f"{system.kernel or 'best'}: {shape}: error {err:.3g}, budget {budget:.3g}")
    return 0 if err <= budget else 1


def _profiled(options, machine, shape: Shape) -> tuple[System, Exact]:
    [named] = options.kernel or (None,)
    mine, _, exact, _ = prepared(machine, shape, options.seed or 0)
    return ours(shape, mine, None if named == "best" else named, options.threads or 0), exact


def _no_table(data: dict, rows: list[dict]) -> list[str]:
    """Nothing: this suite writes no result."""
    return []


register(
    AttentionSuite(
        name="profile",
        about="the ncu (CPU: perf) command for one kernel and shape",
        options=SHAPE | TYPED | {"device", "batch", "run", "inner", "backward"},
        run=run,
        table=_no_table,
        shapes=one_shape,
    )
)
