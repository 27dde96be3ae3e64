"""The suites: which shapes, which systems, in which order; every answer is checked before its time is taken.

cpu       float32, headdim 64 and 128, seqlen 1024 to 4096, one sequence, heads x headdim = 512
forward   16384 tokens, heads x headdim = 2048, headdim 64, 128, 256, seqlen 512 to 16384; then 64 heads on 8 key heads
mma       mma_sm80 on the first 36 of them, beside FlashAttention-2
fp8       float8 on the same 36, the answer in bfloat16, plain and with fast_accum, beside cuDNN in bfloat16 (and
          FlashAttention-3 in float8)
float32   float32 with tf32 allowed, the tensor-core and the CUDA-core kernel, beside PyTorch in float32 and tf32
backward  dq, dk, dv on the shapes of forward (on the CPU of cpu), plain and deterministic
backward_mma  dq, dk, dv from mma_sm80 on the same, beside FlashAttention-2
short     seqlen 1 to 512 in batches of 1 and 8, where standard attention is hard to beat
varlen    packed sequences whose lengths are drawn from a fixed distribution
ladder    every kernel of the device on one shape; backward_ladder the backward ones
profile   the ncu (CPU: perf) command for one kernel and shape
prefill   causal chunks against caches, contiguous and paged, beside the same without a cache; latent attention
decode    one query token against caches of 128 to 131072 keys: contiguous, paged, 8-bit; beside cuDNN,
          FlashAttention-2 and a kernel that only reads the cache
llama     decode steps of whole models over position, flash and standard attention (--seqlen: the positions)
block     a Transformer block of a 7B shape and decode steps of whole models, with 16-bit and with 4-bit weights
overhead  host time of a small call, for NumPy, PyTorch and CuPy arrays
linear    products with 4-bit weights over the rows of x, beside the framework's own with 16-bit ones
ops       linear with weights from memory, beside the framework's own product; a decode step of them; sampling, norms
"""

from __future__ import annotations

import functools
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

import numpy as np

from .. import backward_kernels, flash_attn_func, kernels, query
from .check import Exact
from .machine import SHORT, BenchError, Meter, load_average, open_machine
from .systems import MODES, Inputs, Refused, Shape, System, allowing_tf32, ours, peer, peers_of
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
    if options.suite == "forward" and not options.headdim and not options.heads and not options.heads_k:
        heads.append((128, 64, 8))
    return [
        Shape(max(1, tokens // n), n, nheads, nheads_k, d, causal, options.dtype)
        for d, nheads, nheads_k in heads
        for causal in _masks(options)
        for n in seqlens
    ]


def float32_shapes(options, machine) -> list[Shape]:
    options.seqlen = options.seqlen or ([1024] if options.quick else [512, 2048, 8192])
    return forward_shapes(options, machine)


def backward_shapes(options, machine) -> list[Shape]:
    shapes = forward_shapes if machine.device == "cuda" or options.tokens else cpu_shapes
    return shapes(options, machine)


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


@dataclass(frozen=True)
class Suite:
    shapes: Callable[..., list[Shape]] | None
    options: set[str]  # those it listens to; any other is refused, not ignored
    kernels: tuple[str, ...] = ("best",)
    peers: str | None = None  # None: the usual ones of the device
    dtype: str | None = None  # None: bfloat16 on a GPU, float32 on the CPU


_SHAPE = {"headdim", "seqlen", "mask", "heads", "heads_k", "kernel", "framework", "threads", "seed"}
_TIMED = {"peers", "rounds", "quick", "sustained", "output"}
_TYPED = {"dtype", "allow_tf32"}
_PROTOCOL = _SHAPE | _TIMED | {"device", "tokens"}
SUITES = {
    "cpu": Suite(cpu_shapes, _SHAPE | _TIMED | {"dtype", "batch"}),
    "forward": Suite(forward_shapes, _PROTOCOL | _TYPED),
    "mma": Suite(forward_shapes, _PROTOCOL | {"dtype"}, kernels=("mma_sm80",), peers="fa2"),
    "fp8": Suite(forward_shapes, _PROTOCOL, peers="cudnn,fa3", dtype="float8_e4m3fn"),
    "float32": Suite(
        float32_shapes,
        _PROTOCOL,
        kernels=("mma_tf32_sm80", "minimal"),
        peers="efficient,standard,standard_tf32",
        dtype="float32",
    ),
    "backward": Suite(backward_shapes, _PROTOCOL | {"dtype", "batch"}, peers="cudnn,fa2,fa3,torch"),
    "backward_mma": Suite(backward_shapes, _PROTOCOL | {"dtype", "batch"}, kernels=("mma_sm80",), peers="fa2"),
    "short": Suite(short_shapes, _SHAPE | _TIMED | _TYPED | {"device", "batch"}),
    "varlen": Suite(varlen_shapes, _SHAPE - {"seqlen"} | _TIMED | _TYPED | {"device", "tokens"}),
    "ladder": Suite(one_shape, _SHAPE | _TIMED | _TYPED | {"device", "batch"}, kernels=()),
    "backward_ladder": Suite(
        one_shape, _SHAPE | _TIMED | {"dtype", "device", "batch"}, kernels=(), peers="cudnn,fa2,fa3"
    ),
    "profile": Suite(one_shape, _SHAPE | _TYPED | {"device", "batch", "run", "inner", "backward"}),
    "prefill": Suite(None, {"device", "framework", "dtype", "rounds", "quick", "seed", "output"}),
    "decode": Suite(None, {"device", "dtype", "kernel", "rounds", "quick", "seed", "output"}),
    "llama": Suite(None, {"device", "dtype", "model", "batch", "seqlen", "rounds", "quick", "seed", "output"}),
    "linear": Suite(None, {"device", "framework", "dtype", "kernel", "rounds", "quick", "seed", "output"}),
    "block": Suite(None, {"device", "rounds", "quick", "seed", "output"}),
    "ops": Suite(None, {"device", "framework", "rounds", "quick", "seed", "output"}),
    "overhead": Suite(None, {"device", "framework", "rounds", "quick", "seed", "output"}),
}


def shapes_of(options, machine) -> list[Shape]:
    shapes = SUITES[options.suite].shapes(options, machine)
    more = {"allow_tf32": bool(options.allow_tf32), "backward": bool(options.backward)}
    return [replace(shape, **more) for shape in shapes]


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
    """Any suite that has shapes, but profile."""
    suite = SUITES[options.suite]
    shapes = shapes_of(options, machine)
    threads = options.threads or 0
    if machine.framework == "torch" and machine.device == "cpu" and threads:
        machine.torch.set_num_threads(threads)
    named = options.kernel or suite.kernels
    if not named:
        table = backward_kernels() if options.backward else kernels()
        named = [kernel["name"] for kernel in reversed(table) if kernel["device"] == machine.device]
    peers = peers_of(machine, options.peers, suite.peers)
    outcome = Outcome(load=load_average())
    with Meter(machine) as meter, Progress(len(shapes), options.suite) as progress:
        outcome.rows += roofs(options, machine, protocol, meter)
        for shape in shapes:
            progress.step(f"{shape}: {_one(shape, named, peers, options, machine, protocol, meter, threads, outcome)}")
    outcome.conditions, outcome.driver = meter.between(), meter.driver
    return outcome


def prepared(machine, shape: Shape, seed: int) -> tuple[Inputs, Inputs, Exact, Exact]:
    """What ours and what the peers get, and what their answers should be. The two differ for fp8 only."""
    given = Inputs(machine, shape.given, seed)
    q, k, v, _ = given[0]
    exact = Exact(machine, shape.given, q, k, v, given.gradients[0][0] if shape.backward else None)
    if shape.given == shape:
        return given, given, exact, exact
    mine, stand_for = given.quantised(machine, shape)
    return mine, given, Exact(machine, shape, *stand_for), exact


def _one(shape, named, peers, options, machine, protocol, meter, threads, outcome: Outcome) -> str:
    """Checks and times all systems on one shape; returns the line about it."""
    mine, given, our_exact, peer_exact = prepared(machine, shape, options.seed or 0)
    of = {name: (shape, mine) if name == "fa3" else (shape.given, given) for name in peers}
    makers = []  # what it is called, whether it was asked for by that name, more about its row, how to make it
    for name in named:
        kernel = None if name == "best" else name
        for row in [{}, {MODES[options.suite]: True}] if options.suite in MODES else [{}]:
            make = functools.partial(ours, shape, mine, kernel, threads, **row)
            makers.append((" ".join([kernel or "ours", *row]), bool(kernel), row, make))
    makers += [(name, False, {}, functools.partial(peer, name, machine, *of[name])) for name in peers]
    systems: list[tuple[System, Shape, dict[str, Any]]] = []
    notes = []
    for asked, forced, more, make in makers:
        try:
            system = make()
        except Refused as refusal:
            outcome.left_out.append({"system": asked, "shape": str(shape), "reason": str(refusal)})
            if asked not in peers:
                notes.append(f"{asked} refuses: {refusal}")
            continue
        is_ours = system.name == "ours"
        its_shape = shape if is_ours else of[system.name][0]
        exact = our_exact if its_shape == shape else peer_exact
        for place in mine.results:
            place[...] = float("nan")
        answer = system.launch(0)
        machine.synchronize()
        err, budget = exact.judge(answer, "tf32" if system.tf32 else its_shape.dtype)
        del answer
        row: dict[str, Any] = {"suite": options.suite, "system": system.name}
        row |= ({"kernel": system.kernel} if system.kernel else {}) | ({"forced": True} if forced else {}) | more
        row |= ({"tf32": True} if system.tf32 else {}) | {"pass": "bwd" if shape.backward else "fwd"}
        row |= its_shape.keys() | {"input_sets": len(mine), "max_err": min(err, 1e30), "err_budget": budget}
        if err <= budget or (not is_ours and err <= PEER_FACTOR * budget):
            systems.append((system, its_shape, row))
        elif not is_ours:
            reason = f"its answer is off by {err:.3g}, more than {PEER_FACTOR} times the budget of {budget:.3g}"
            outcome.left_out.append({"system": asked, "shape": str(shape), "reason": reason})
        else:
            outcome.wrong += 1
            outcome.rows.append(rounded(row | {"wrong": True}))
            notes.append(f"{system.kernel or asked} is WRONG: error {err:.3g}, budget {budget:.3g}")
    # PyTorch runs a backward pass on the stream of its forward, which is not the one being captured.
    launches = [system.launch for system, *_ in systems]
    timings = interleave(
        machine, launches, protocol, meter, seed=options.seed or 0, graphs=False if shape.backward else None
    )
    parts = []
    for (system, its_shape, row), timing in zip(systems, timings, strict=True):
        row = rounded(row | timing.row(shape.flops / 1e12))
        row["tbps"] = float(f"{its_shape.bytes / row['us'] * 1e-6:.5g}")
        outcome.rows.append(row)
        speed = f"{row['us']:.1f} us" if options.suite == "short" else speed_text(row["tflops"])
        parts.append(
            " ".join(
                filter(None, [system.name, system.kernel, *(mode for mode in MODES.values() if mode in row), speed])
            )
        )
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
    dtype = "bfloat16" if options.dtype == "float8_e4m3fn" else options.dtype
    n, copied = (8192, 1 << 28) if gpu else (1024 if options.quick else 2048, 1 << 24)
    a, b, c = (machine.random((n, n), dtype, i) for i in range(3))
    source, target = (machine.random((copied,), "float32", i) for i in range(2))
    if machine.framework == "torch":

        def product(i):
            with allowing_tf32(machine.torch, bool(options.allow_tf32)):
                machine.torch.matmul(a, b, out=c)

        launches = [product, lambda i: target.copy_(source)]
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
    product_row, copy = (timing.row(2e-12 * n**3) for timing in interleave(machine, launches, protocol, meter, seed=0))
    copy["tbps"] = 8e-6 * copied / copy["us"]
    del copy["tflops"]
    copy.pop("sustained_tflops", None)
    machine.release()
    shape = {"dtype": dtype, "m": n, "n": n, "k": n}
    return [
        rounded(
            {"suite": options.suite, "system": "cublas" if gpu else "blas", "pass": "linear"} | shape | product_row
        ),
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
    [shape] = shapes_of(options, machine)
    kernel = _profiled(options, machine, shape)[0].kernel or "best"
    mask = "causal" if shape.causal else "full"
    name = f"{kernel}_{SHORT[shape.dtype]}_d{shape.headdim}_s{shape.seqlen}_{mask}" + "_backward" * shape.backward
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
    inner += ["--backward"] * shape.backward + ["--allow-tf32"] * shape.allow_tf32
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
