"""`python -m flash_attn_minimal info`: what is installed here, and which kernel serves which call."""

from __future__ import annotations

import ctypes as ct
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np

from .. import __version__
from .._core.fields import _put_dense
from .._core.library import load, path
from .._core.queries import kernel_tables, plan_from, plan_of
from .._core.structs import CPU, CUDA, DEVICES, DTYPES, AttentionArgs, AttentionBackwardArgs, new
from .command import Parser, command
from .report import cores, cpu_model, plural

_TABLES = {
    "forward": "kernels",
    "backward": "backward",
    "linear": "products of a few rows",
    "w4_linear": "products with 4-bit weights",
    "w4_linear_chain": "chains of products with 4-bit weights",
}
# How a refusal begins that every call of a kernel would get on this machine.
_OF_THE_MACHINE = re.compile("this processor, or this build, lacks|needs sm_")
_WINDOW = {"causal": 1, "has_window": 1, "window_left": 1024, "window_right": 0}
# Typical calls: (description, dtype, batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, options)
_CALLS = [
    ("prefill", "bfloat16", 4, 4096, 4096, 32, 8, 128, 128, {"causal": 1}),
    ("prefill", "float16", 4, 4096, 4096, 16, 16, 64, 64, {}),
    ("prefill", "float32", 4, 1024, 1024, 16, 16, 64, 64, {"causal": 1}),
    ("decode", "bfloat16", 8, 1, 8192, 32, 8, 128, 128, {}),
    ("window", "bfloat16", 1, 8192, 8192, 32, 8, 128, 128, _WINDOW),
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


def why_not_here(table: str, kernel: dict[str, str]) -> str:
    """Why no call can run this kernel on this machine, "" if one may."""
    if kernel["device"] == "cuda" and not load().fa_cuda_device_count():
        return "the library sees no GPU"
    if table not in ("forward", "backward"):
        return ""
    device = {name: number for number, name in DEVICES.items()}[kernel["device"]]
    for call in _CALLS:
        args = typical_args(device, *call[1:])
        args.kernel = kernel["name"].encode()
        plan = plan_of(args) if table == "forward" else _backward_plan(args)
        reason = plan.error.partition(": ")[2]
        if _OF_THE_MACHINE.match(reason):
            return reason
    return ""


def _backward_plan(args: AttentionArgs):
    backward = new(AttentionBackwardArgs)
    backward.forward = ct.pointer(args)
    for name, like in (("dout", "out"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        for axis in ("batch", "row", "head"):
            setattr(backward, f"{name}_{axis}_stride", getattr(args, f"{like}_{axis}_stride"))
    return plan_from(lambda plan: load().fa_attention_backward_query(backward, plan))


class _Page:
    """Prints lines of two columns, broken between words at the width of the terminal; a pipe gets whole lines."""

    def __init__(self):
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.width = shutil.get_terminal_size().columns if known else 0

    def line(self, head: str, text: str, under: int = 6) -> None:
        """`text` to the right of `head`; where little room is left, in the next lines, `under` columns in."""
        if not self.width:
            print(head + text)
            return
        room = self.width - len(head)
        beside = room >= min(36, len(text)) and room >= max(map(len, text.split()))
        inset = " " * (len(head) if beside else under)
        lines = self._wrapped(text, inset)
        if beside:
            lines[0] = head + lines[0][len(head) :]
        elif len(head) > self.width:
            lines = self._wrapped(head, "  ") + lines
        elif head.strip():
            lines = [head.rstrip(), *lines]
        print(*lines, sep="\n")

    def _wrapped(self, text: str, inset: str) -> list[str]:
        between_words = {"break_long_words": False, "break_on_hyphens": False}  # a path stays whole
        return textwrap.wrap(text, self.width, initial_indent=inset, subsequent_indent=inset, **between_words)


@command("info")
def main(argv: list[str]) -> int:
    Parser("info", description=__doc__.split(": ", 1)[1]).parse_args(argv)
    lib, page = load(), _Page()

    def about(name: str, value: str) -> None:
        page.line(f"{name:<19} ", value, 20)

    about("flash-attn-minimal", __version__)
    about("library", str(path()))
    about("", f"version {lib.fa_version().decode()}, {lib.fa_build_info().decode()}")
    if "general kernels only" in lib.fa_build_info().decode():
        about("", "Calls on a GPU are slow with this library: it lacks the fast kernels.")
        about("", "./build_and_run.sh --all-kernels builds them (CMake: -DFLASH_ATTN_KERNELS=all).")
    about("Python, NumPy", f"{platform.python_version()}, {np.__version__}")
    about("CPU", f"{cpu_model()}, {plural(cores(), 'core')}")
    count = lib.fa_cuda_device_count()
    named = gpus()
    for name in named or ["none found"]:
        about("GPU", name)
    if named and not count:
        about("", "this build or its driver cannot use it: the library counts 0 CUDA devices")
    for variable in ("FLASH_ATTN_KERNEL", "FLASH_ATTN_NUM_THREADS", "FLASH_ATTN_OPENMP"):
        if variable in os.environ:
            about(variable, os.environ[variable])

    for table, kernel_list in kernel_tables().items():
        print()
        page.line("", f"{_TABLES[table]}, best first", 0)
        absent: dict[str, list[dict[str, str]]] = {}
        for kernel in kernel_list:
            absent.setdefault(why_not_here(table, kernel), []).append(kernel)
        for reason, those in sorted(absent.items(), key=lambda item: item[0] != ""):
            if reason:
                page.line("  cannot run here: ", reason)
            for kernel in those:
                page.line(f"  {kernel['device']:<5} {kernel['name']:<25} ", kernel["summary"])

    devices = [CPU] + ([CUDA] if count else [])
    print()
    page.line("", "which kernel would serve (batch, seqlen_q x seqlen_k, nheads/nheads_k, headdim)", 2)
    for call in _CALLS:
        kind, dtype, batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, _ = call
        dim = headdim if headdim == headdim_v else f"({headdim}, {headdim_v})"
        plans = {device: plan_of(typical_args(device, *call[1:])) for device in devices}
        served = [f"{DEVICES[device]}: {plan.kernel or plan.error}" for device, plan in plans.items()]
        if len(devices) == 1:
            served = [plan.kernel or plan.error for plan in plans.values()]
        shape = f"({batch}, {seqlen_q}x{seqlen_k}, {nheads}/{nheads_k}, {dim})"
        page.line(f"  {kind:<12} {dtype:<9} {shape:<33} ", "  ".join(f"{text:<22}" for text in served).rstrip())
    return 0
