"""`python -m flash_attn_minimal info`: what is installed here, and which kernel serves which call."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys

import numpy as np

from . import __version__
from ._library import CPU, CUDA, DEVICES, DTYPES, AttentionArgs, load, new, path
from ._pack import _put_dense
from ._query import plan_of
from ._report import cpu_model
from ._tables import kernel_tables

_TABLES = {
    "forward": "kernels",
    "backward": "backward",
    "linear": "products of a few rows",
    "w4_linear": "products with 4-bit weights",
    "w4_linear_chain": "chains of them",
}
# Typical calls: (description, dtype, batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, options)
_CALLS = [
    ("prefill", "bfloat16", 4, 4096, 4096, 32, 8, 128, 128, {"causal": 1}),
    ("prefill", "float16", 4, 4096, 4096, 16, 16, 64, 64, {}),
    ("prefill", "float32", 4, 1024, 1024, 16, 16, 64, 64, {"causal": 1}),
    ("decode", "bfloat16", 8, 1, 8192, 32, 8, 128, 128, {}),
    (
        "window",
        "bfloat16",
        1,
        8192,
        8192,
        32,
        8,
        128,
        128,
        {"causal": 1, "has_window": 1, "window_left": 1024, "window_right": 0},
    ),
    ("softcap", "bfloat16", 1, 4096, 4096, 16, 8, 256, 256, {"causal": 1, "softcap": 50.0}),
    ("MLA", "bfloat16", 1, 4096, 4096, 16, 16, 192, 128, {"causal": 1}),
    ("odd headdim", "float16", 1, 1023, 799, 6, 3, 72, 72, {}),
]


def typical_args(
    device: int, dtype: str, batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, options
) -> AttentionArgs:
    """A call with contiguous arrays and NULL pointers: enough for the capability query."""
    args = new(AttentionArgs)
    args.device, args.dtype = device, DTYPES[dtype]
    args.batch, args.seqlen_q, args.seqlen_k = batch, seqlen_q, seqlen_k
    args.nheads, args.nheads_k, args.headdim, args.headdim_v = nheads, nheads_k, headdim, headdim_v
    for name, rows, heads, width in (
        ("q", seqlen_q, nheads, headdim),
        ("k", seqlen_k, nheads_k, headdim),
        ("v", seqlen_k, nheads_k, headdim_v),
        ("out", seqlen_q, nheads, headdim_v),
    ):
        _put_dense(args, name, (batch, rows, heads, width))
    for name, value in options.items():
        setattr(args, name, value)
    return args


def gpus() -> list[str]:
    """The names of the CUDA devices, from nvidia-smi, or else from PyTorch if it is imported already."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [line.strip() for line in said.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        pass
    count = load().fa_cuda_device_count()
    if "torch" in sys.modules:
        return [sys.modules["torch"].cuda.get_device_name(i) for i in range(count)]
    return [f"CUDA device {i}" for i in range(count)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_attn_minimal info", description=__doc__.split(": ", 1)[1])
    parser.parse_args(argv)
    lib = load()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"flash-attn-minimal  {__version__}")
    print(f"library             {path()}")
    print(f"                    version {lib.fa_version().decode()}, {lib.fa_build_info().decode()}")
    print(f"Python, NumPy       {platform.python_version()}, {np.__version__}")
    print(f"CPU                 {cpu_model()}, {cores} cores")
    count = lib.fa_cuda_device_count()
    named = gpus()
    for name in named or ["none found"]:
        print(f"GPU                 {name}")
    if named and not count:
        print("                    this build or its driver cannot use it: the library counts 0 CUDA devices")
    for variable in ("FLASH_ATTN_KERNEL", "FLASH_ATTN_NUM_THREADS"):
        if variable in os.environ:
            print(f"{variable:<19} {os.environ[variable]}")

    for table, kernel_list in kernel_tables().items():
        print(f"\n{_TABLES[table]}, best first")
        for kernel in kernel_list:
            print(f"  {kernel['device']:<5} {kernel['name']:<25} {kernel['summary']}")

    devices = [CPU] + ([CUDA] if count else [])
    columns = "  ".join(f"{DEVICES[device]:<16}" for device in devices).rstrip()
    print(
        "\nwhich kernel would serve\n"
        f"  {'':<22} {'(batch, seqlen_q x seqlen_k, nheads/nheads_k, headdim)':<56} {columns}"
    )
    for call in _CALLS:
        kind, dtype, batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, _ = call
        dim = headdim if headdim == headdim_v else f"({headdim}, {headdim_v})"
        plans = [plan_of(typical_args(device, *call[1:])) for device in devices]
        served = [plan.kernel or plan.error for plan in plans]
        shape = f"({batch}, {seqlen_q}x{seqlen_k}, {nheads}/{nheads_k}, {dim})"
        print(f"  {kind:<12} {dtype:<9} {shape:<56} " + "  ".join(f"{text:<16}" for text in served).rstrip())
    return 0
