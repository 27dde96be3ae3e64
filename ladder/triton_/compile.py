"""python -m ladder.triton_.compile compiles every configuration of the Triton kernels for Hopper, without a GPU.

It prints the resources that each uses per thread and block; --keep writes PTX and machine code into a folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_LIMIT, REGISTER_FILE = 227 << 10, 64 << 10  # bytes for a block; registers of a multiprocessor


class Hopper:
    """Stands in for the driver, which Triton asks for the target to compile for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@dataclass
class Compiled:
    name: str
    configuration: str
    kernel: object  # Triton's
    seconds: float

    @property
    def shared(self) -> int:
        return self.kernel.metadata.shared

    def resources(self) -> tuple[int, int, int]:
        """Registers of a thread, bytes that a thread spills, and wgmma instructions of the kernel."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            tool = triton.knobs.nvidia.cuobjdump.path
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
        products = self.kernel.asm["ptx"].count("wgmma.mma_async")
        return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), products


def compiled(fn, config, args, options) -> Compiled:
    began = time.monotonic()
    tiles = config.all_kwargs() if config else {}
    if config and config.pre_hook:
        config.pre_hook({**dict(zip(fn.arg_names, args, strict=False)), **options, **tiles})
    kernel = fn.warmup(*args, grid=(1, 1, 1), **options, **tiles)
    what = {"HEADDIM": args[0].base.shape[-1], **options, **tiles}
    what = ",".join(f"{key}={value}" for key, value in what.items() if value is not None)
    return Compiled(fn.__name__, what, kernel, time.monotonic() - began)


def compile_all(call, quick: bool = False):
    """Runs `call` and yields a Compiled for each kernel that it would launch, in all its configurations (`quick`: in
    the first). Nothing is launched."""
    launches = []

    def record(self, *args, **options):
        options = {key: value for key, value in options.items() if key not in ("grid", "warmup")}
        launches.append((self, args, options))

    tuner, jit = triton.runtime.Autotuner, triton.runtime.JITFunction
    before = tuner.run, jit.run
    tuner.run = jit.run = record
    try:
        call()
    finally:
        tuner.run, jit.run = before
    for fn, args, options in launches:
        tuned = isinstance(fn, triton.runtime.Autotuner)
        if tuned:
            fn.nargs = dict(zip(fn.arg_names, args, strict=False))
        configs = fn.prune_configs(options) if tuned else [None]
        for config in configs[:1] if quick else configs:
            yield compiled(fn.fn if tuned else fn, config, args, options)


def passes(headdim: int, causal: bool, dtype, seqlen: int = 4096):
    """A function that calls the forward and the backward pass on arrays in the CPU's memory."""
    from . import flash_attention, gluon_refusal

    q, k, v, out, dout = (torch.empty((1, seqlen, 2, headdim), dtype=dtype) for _ in range(5))
    lse = torch.empty((1, 2, seqlen))

    def call():
        flash_attention.forward(q, k, v, causal)
        flash_attention.backward(dout, q, k, v, out, lse, causal)
        if headdim in (64, 128) and dtype != torch.float32 and not gluon_refusal():
            from . import gluon_flash_attention

            gluon_flash_attention.forward(q, k, v, causal)

    return call


def report(calls, keep: Path | None, quick: bool) -> int:
    """Prints a line for each kernel. Returns how many spill or do not fit."""
    poor = 0
    print(f"{'kernel':18} {'regs':>4} {'spill':>5} {'shared':>7} {'blocks':>6} {'wgmma':>5} {'s':>5}  configuration")
    for call in calls:
        for one in compile_all(call, quick):
            registers, spilled, products = one.resources()
            threads = 32 * one.kernel.metadata.num_warps
            blocks = min(REGISTER_FILE // (registers * threads), (SHARED_LIMIT + 1024) // (one.shared + 1024))
            poor += bool(spilled) or not blocks
            print(f"{one.name:18} {registers:4} {spilled:5} {one.shared:7} {blocks:6} {products:5} {one.seconds:5.1f}  "
                  f"{one.configuration}", flush=True)  # fmt: skip
            if keep:
                name = re.sub(r"[^\w.]+", "_", f"{one.name}_{one.configuration}")
                (keep / f"{name}.ptx").write_text(one.kernel.asm["ptx"])
                (keep / f"{name}.cubin").write_bytes(one.kernel.asm["cubin"])
    return poor


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ladder.triton_.compile", description=__doc__)
    parser.add_argument("--headdim", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtype", nargs="*", default=["float16"], help="float16, bfloat16, float32")
    parser.add_argument("--keep", type=Path, help="a folder for the PTX and the machine code")
    parser.add_argument("--quick", action="store_true", help="one configuration of each kernel")
    options = parser.parse_args(argv)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    driver.set_active(Hopper())
    calls = [
        passes(headdim, causal, getattr(torch, dtype))
        for dtype in options.dtype
        for headdim in options.headdim
        for causal in (False, True)
    ]
    poor = report(calls, options.keep, options.quick)
    print(f"{poor} that spill or do not fit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
