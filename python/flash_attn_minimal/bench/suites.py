"""The suites: which shapes, which systems, in which order; every answer is checked before its time is taken.

cpu       float32, headdim 64 and 128, seqlen 1024 to 4096, one sequence, heads x headdim = 512
forward   16384 tokens, heads x headdim = 2048, headdim 64, 128, 256, seqlen 512 to 16384; then 64 heads on 8 key heads
short     seqlen 1 to 512 in batches of 1 and 8, where standard attention is hard to beat
varlen    packed sequences whose lengths are drawn from a fixed distribution
ladder    every kernel of the device on one shape
profile   the ncu (CPU: perf) command for one kernel and shape
overhead  host time of a small call, for NumPy, PyTorch and CuPy arrays
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import numpy as np

from .. import flash_attn_func, kernels, query
from .check import Exact
from .machine import SHORT, BenchError, Meter, load_average, open_machine
from .systems import Inputs, Refused, Shape, System, ours, peer, peers_of
from .timing import Protocol, interleave

FORWARD_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
SHORT_SEQLENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MIXES = {"prompts": (256, 1.0, 4096), "documents": (2048, 0.8, 16384)}  # median, sigma of the logarithm, longest

# A peer may round more than ours: standard attention in PyTorch keeps S in 16 bits. Beyond this it is something else.
PEER_FACTOR = 5


# ---- shapes ----


def _masks(options, default=("full", "causal")) -> list[bool]:
    return [mask == "causal" for mask in options.mask or default]


def _hidden(machine) -> int:
    """heads x headdim."""
    return 2048 if machine.device == "cuda" else 512


def _heads(options, headdim: int, hidden: int) -> tuple[int, int]:
    nheads = options.heads or max(1, hidden // headdim)
    return nheads, options.heads_k or nheads


def cpu_shapes(options, machine) -> list[Shape]:
    seqlens = options.seqlen or ((1024,) if options.quick else (1024, 2048, 4096))
    return [
        Shape(options.batch or 1, n, *_heads(options, d, 512), d, causal, options.dtype)
        for d in options.headdim or (64, 128)
        for causal in _masks(options)
        for n in seqlens
    ]


def forward_shapes(options, machine) -> list[Shape]:
    tokens = options.tokens or 16384
    seqlens = options.seqlen or [n for n in ((512, 4096, 16384) if options.quick else FORWARD_SEQLENS) if n <= tokens]
    heads = [(d, *_heads(options, d, 2048)) for d in options.headdim or (64, 128, 256)]
    if not options.headdim and not options.heads and not options.heads_k:
        heads.append((128, 64, 8))
    return [
        Shape(max(1, tokens // n), n, nheads, nheads_k, d, causal, options.dtype)
        for d, nheads, nheads_k in heads
        for causal in _masks(options)
        for n in seqlens
    ]


def short_shapes(options, machine) -> list[Shape]:
    return [
        Shape(batch, n, *_heads(options, d, _hidden(machine)), d, causal, options.dtype)
        for d in options.headdim or (64, 128)
        for batch in ([options.batch] if options.batch else (1, 8))
        for causal in _masks(options)
        for n in options.seqlen or ((1, 32, 512) if options.quick else SHORT_SEQLENS)
    ]


def draw_lengths(mix: str, tokens: int) -> tuple[int, ...]:
    """Sequence lengths of one mix that add up to `tokens`, the same every time."""
    middle, sigma, longest = MIXES[mix]
    draw, lengths, left = random.Random(f"flash-attn-minimal {mix}"), [], tokens
    while left:
        lengths.append(min(left, longest, max(1, round(middle * math.exp(sigma * draw.gauss(0, 1))))))
        left -= lengths[-1]
    return tuple(lengths)


def varlen_shapes(options, machine) -> list[Shape]:
    tokens = options.tokens or (32768 if machine.device == "cuda" else 4096)
    shapes = []
    for d in options.headdim or ((128,) if options.quick else (64, 128)):
        for causal in _masks(options):
            for mix in MIXES:
                lengths = draw_lengths(mix, tokens)
                heads = _heads(options, d, _hidden(machine))
                shapes.append(Shape(len(lengths), max(lengths), *heads, d, causal, options.dtype, lengths, mix))
    return shapes


def one_shape(options, machine) -> list[Shape]:
    """Of `ladder` and `profile`."""
    gpu = machine.device == "cuda"
    for name in ("headdim", "seqlen", "mask"):
        if len(getattr(options, name) or ()) > 1:
            raise BenchError(
                f"--{name} {','.join(map(str, getattr(options, name)))}: suite {options.suite} takes one value"
            )
    d = (options.headdim or (128 if gpu else 64,))[0]
    n = (options.seqlen or (4096 if gpu else 1024,))[0]
    [causal] = _masks(options, ("full",))
    return [
        Shape(options.batch or (4 if gpu else 1), n, *_heads(options, d, _hidden(machine)), d, causal, options.dtype)
    ]


SHAPES: dict[str, Callable[..., list[Shape]]] = {
    "cpu": cpu_shapes,
    "forward": forward_shapes,
    "short": short_shapes,
    "varlen": varlen_shapes,
    "ladder": one_shape,
}


# ---- running them ----


class Progress:
    """A bar on a terminal with rich, plain lines anywhere else."""

    def __init__(self, total: int, title: str):
        self.total, self.done, self._bar = total, 0, None
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
            )
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def say(self, line: str):
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def step(self, line: str):
        self.done += 1
        if self._bar:
            self._bar.advance(self._task)
            self.say(line)
        else:
            self.say(f"[{self.done}/{self.total}] {line}")


@dataclass
class Outcome:
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    wrong: int = 0
    conditions: tuple[float, float] | None = None  # medians of (MHz, W)
    driver: str | None = None
    load: float | None = None  # processes running on the host before the start


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five digits are more than any of these numbers has."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) and math.isfinite(v) else v for k, v in row.items()}


def run(options, machine, protocol: Protocol) -> Outcome:
    """One of SHAPES' suites."""
    shapes = SHAPES[options.suite](options, machine)
    threads = options.threads or 0
    if machine.framework == "torch" and machine.device == "cpu" and threads:
        machine.torch.set_num_threads(threads)
    if options.suite == "ladder" and not options.kernel:
        named = [kernel["name"] for kernel in reversed(kernels()) if kernel["device"] == machine.device]
    else:
        named = [None if name == "best" else name for name in options.kernel or ("best",)]
    peers = peers_of(machine, options.peers)
    outcome = Outcome(load=load_average())
    with Meter(machine) as meter, Progress(len(shapes), options.suite) as progress:
        outcome.rows += roofs(options, machine, protocol, meter)
        for shape in shapes:
            progress.step(f"{shape}: {_one(shape, named, peers, options, machine, protocol, meter, threads, outcome)}")
    outcome.conditions, outcome.driver = meter.between(), meter.driver
    return outcome


def _one(shape, named, peers, options, machine, protocol, meter, threads, outcome: Outcome) -> str:
    """Checks and times all systems on one shape; returns the line about it."""
    inputs = Inputs(machine, shape, options.seed or 0)
    exact = Exact(machine, shape, *inputs[0][:3])
    makers = [(name or "ours", lambda name=name: ours(shape, inputs, name, threads)) for name in named]
    makers += [(name, lambda name=name: peer(name, machine, shape, inputs)) for name in peers]
    systems: list[tuple[System, dict[str, Any]]] = []
    notes = []
    for asked, make in makers:
        try:
            system = make()
        except Refused as refusal:
            outcome.left_out.append({"system": asked, "shape": str(shape), "reason": str(refusal)})
            if asked in named or asked == "ours":
                notes.append(f"{asked} refuses: {refusal}")
            continue
        inputs[0][3][...] = float("nan")
        out = system.launch(0)
        machine.synchronize()
        err, budget = exact.judge(out)
        row: dict[str, Any] = {"suite": options.suite, "system": system.name}
        if system.kernel:
            row["kernel"] = system.kernel
        if asked in named:
            row["forced"] = True
        row |= (
            {"pass": "fwd"}
            | shape.keys()
            | {"input_sets": len(inputs), "max_err": min(err, 1e30), "err_budget": budget}
        )
        if err <= budget or (system.name != "ours" and err <= PEER_FACTOR * budget):
            systems.append((system, row))
        elif system.name != "ours":
            reason = f"its answer is off by {err:.3g}, more than {PEER_FACTOR} times the budget of {budget:.3g}"
            outcome.left_out.append({"system": asked, "shape": str(shape), "reason": reason})
        else:
            outcome.wrong += 1
            outcome.rows.append(rounded(row | {"wrong": True}))
            notes.append(f"{system.kernel or asked} is WRONG: error {err:.3g}, budget {budget:.3g}")
    timings = interleave(machine, [system.launch for system, _ in systems], protocol, meter, seed=options.seed or 0)
    parts = []
    for (system, row), timing in zip(systems, timings, strict=True):
        row = rounded(row | timing.row(shape.flops / 1e12))
        row["tbps"] = float(f"{shape.bytes / row['us'] * 1e-6:.5g}")
        outcome.rows.append(row)
        speed = f"{row['us']:.1f} us" if options.suite == "short" else speed_text(row["tflops"])
        parts.append(f"{system.name + ' ' + system.kernel if system.kernel else system.name} {speed}")
    machine.release()
    return "; ".join(parts + notes)


def speed_text(tflops: float) -> str:
    return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.1f} GFLOP/s"


def roofs(options, machine, protocol: Protocol, meter) -> list[dict[str, Any]]:
    """What the same framework reaches on this device with a large product and with a copy: the roofs to measure ours
    by. Also the warm-up. On the CPU only float32 products are fast everywhere."""
    gpu = machine.device == "cuda"
    if not gpu and options.dtype != "float32":
        return []
    n, copied = (8192, 1 << 28) if gpu else (1024 if options.quick else 2048, 1 << 24)
    a, b, c = (machine.random((n, n), options.dtype, i) for i in range(3))
    source, target = (machine.random((copied,), "float32", i) for i in range(2))
    if machine.framework == "torch":
        launches = [lambda i: machine.torch.matmul(a, b, out=c), lambda i: target.copy_(source)]
    else:
        xp = machine.cupy if gpu else np
        launches = [lambda i: xp.matmul(a, b, out=c), lambda i: xp.copyto(target, source)]
    try:
        launches[0](0)
    except (TypeError, ValueError):  # a framework that stores this dtype but does not multiply it
        return []
    start = time.perf_counter()
    while gpu and time.perf_counter() - start < 1:
        launches[0](0)
        machine.synchronize()
    product, copy = (timing.row(2e-12 * n**3) for timing in interleave(machine, launches, protocol, meter, seed=0))
    copy["tbps"] = 8e-6 * copied / copy["us"]
    del copy["tflops"]
    copy.pop("sustained_tflops", None)
    machine.release()
    shape = {"dtype": options.dtype, "m": n, "n": n, "k": n}
    return [
        rounded({"suite": options.suite, "system": "cublas" if gpu else "blas", "pass": "linear"} | shape | product),
        rounded({"suite": options.suite, "system": "copy", "pass": "copy"} | copy),
    ]


# ---- the host's share of a call ----


def overhead(options, protocol: Protocol) -> tuple[Any, Outcome]:
    """Host time of a call on one query and one key, for each framework at hand. On the GPU nothing is waited for."""
    machines = []
    for device, framework in (("cpu", "numpy"), ("cpu", "torch"), ("cuda", "torch"), ("cuda", "cupy")):
        if options.device in (None, device) and options.framework in (None, framework):
            try:
                machines.append(open_machine(device, framework))
            except BenchError:
                continue
    if not machines:
        wanted = [
            f"--{name} {value}"
            for name, value in (("device", options.device), ("framework", options.framework))
            if value
        ]
        raise BenchError(f"{' '.join(wanted)}: no such arrays here")
    outcome = Outcome(load=load_average())
    for machine in machines:
        gpu = machine.device == "cuda"
        dtype = "float32" if not gpu else "float16" if machine.framework == "cupy" else "bfloat16"
        q, k, v, out = (machine.random((1, 1, 1, 64), dtype, i) for i in range(4))
        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("ours", "new out"): lambda q=q, k=k, v=v: flash_attn_func(q, k, v),
            ("ours", "given out"): lambda q=q, k=k, v=v, out=out: flash_attn_func(q, k, v, out=out),
        }
        if machine.framework == "torch":
            attention = machine.torch.nn.functional.scaled_dot_product_attention
            views = [x.transpose(1, 2) for x in (q, k, v)]
            calls["torch", "new out"] = lambda attention=attention, views=views: attention(*views)
        err = float(
            np.abs(machine.host(flash_attn_func(q, k, v)) - machine.host(v)).max()
        )  # one key: the answer is its value
        if not err <= 1e-6:
            outcome.wrong += 1
            outcome.rows.append(
                {
                    "suite": "overhead",
                    "system": "ours",
                    "arrays": machine.framework,
                    "device": machine.device,
                    "wrong": True,
                }
            )
            print(f"{machine.framework} arrays on {machine.device}: WRONG, error {err:.3g}")
            continue
        times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
        order = random.Random(options.seed or 0)
        for call in calls.values():
            _host_us(machine, call)
        for _ in range(protocol.rounds):
            for name in order.sample(list(calls), len(calls)):
                times[name].append(_host_us(machine, calls[name]))
        for (system, call), us in times.items():
            low, _, high = quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
            row = {
                "suite": "overhead",
                "system": system,
                "arrays": machine.framework,
                "device": machine.device,
                "call": call,
            }
            if system == "ours":
                row["kernel"] = query(q, k, v).kernel
            row |= {
                "pass": "fwd",
                "dtype": dtype,
                "headdim": 64,
                "seqlen_q": 1,
                "seqlen_k": 1,
                "batch": 1,
                "nheads": 1,
                "nheads_k": 1,
            }
            outcome.rows.append(rounded(row | {"us": median(us), "us_min": min(us), "us_spread": high - low}))
            print(
                f"{machine.framework} arrays on {machine.device}: {system}, {call}: {median(us):.1f} us a call",
                flush=True,
            )
    return machines[-1], outcome


def _host_us(machine, call, count: int = 200) -> float:
    machine.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    machine.synchronize()
    return seconds / count * 1e6


# ---- under a profiler ----


def profile_command(options, machine, python: str) -> list[str]:
    """The profiler's command line around `--inner` for one kernel and shape."""
    [shape] = one_shape(options, machine)
    [named] = options.kernel or (None,)
    kernel = ours(shape, Inputs(machine, shape, 0), named, options.threads or 0).kernel
    mask = "causal" if shape.causal else "full"
    name = f"{kernel}_{SHORT[shape.dtype]}_d{shape.headdim}_s{shape.seqlen}_{mask}"
    inner = [
        python,
        "-m",
        "flash_attn_minimal",
        "bench",
        "--suite",
        "profile",
        "--inner",
        "--device",
        machine.device,
        "--kernel",
        kernel,
    ]
    inner += ["--dtype", shape.dtype, "--headdim", str(shape.headdim), "--seqlen", str(shape.seqlen), "--mask", mask]
    inner += [
        "--batch",
        str(shape.batch),
        "--heads",
        str(shape.nheads),
        "--heads-k",
        str(shape.nheads_k),
        "--framework",
        machine.framework,
    ]
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
            *inner,
        ]
    if options.threads:
        inner += ["--threads", str(options.threads)]
    return ["perf", "record", "-g", "-o", f"{name}.perf", *inner]


def profile_inner(options, machine) -> int:
    """The profiled process: one launch between the profiler's marks, after two to warm up; on the CPU launches for a
    second."""
    [shape] = one_shape(options, machine)
    [named] = options.kernel or (None,)
    inputs = Inputs(machine, shape, options.seed or 0)
    system = ours(shape, inputs, named, options.threads or 0)
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
    err, budget = Exact(machine, shape, *inputs[0][:3]).judge(inputs[0][3])
    print(f"{system.kernel}: {shape}: error {err:.3g}, budget {budget:.3g}")
    return 0 if err <= budget else 1
