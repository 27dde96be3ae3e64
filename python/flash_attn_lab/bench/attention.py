"""The suites over shapes of self-attention: their shapes and systems, and the order of a run. Every answer is checked
before its time is taken."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flash_attn_minimal import backward_kernels, kernels
from flash_attn_minimal._commands.command import did_you_mean

from . import curves
from .check import Exact
from .machine import SHORT, BenchError, Meter, load_average, open_machine
from .suite import SUITES, Outcome, Suite, measuring, register, rounded, speed_text
from .systems import MODES, Inputs, Refused, Shape, System, allowing_tf32, ours, peer, peers_of
from .timing import Protocol, interleave

FORWARD_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
SHORT_SEQLENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MIXES = {"prompts": (256, 1.0, 4096), "documents": (2048, 0.8, 16384)}  # median, sigma of the logarithm, longest

# A peer's error may be this many times the budget before its answer counts as wrong. Peers may round more than this
# library: standard attention in PyTorch keeps S in 16 bits.
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


def forward_shapes(options, machine, grouped: bool = False) -> list[Shape]:
    """grouped: adds shapes of headdim 128 with eight query heads for each key head. A CPU gets an eighth of the tokens
    and a quarter of the heads, so that a run takes minutes and not hours."""
    gpu = machine.device == "cuda"
    tokens = options.tokens or (16384 if gpu else 2048)
    if not gpu and not options.tokens:
        print(f"on a CPU: {tokens} tokens, heads x headdim = {_hidden(machine)}; --tokens asks for more", flush=True)
    seqlens = options.seqlen or [n for n in ((512, 4096, 16384) if options.quick else FORWARD_SEQLENS) if n <= tokens]
    heads = [(d, *_heads(options, d, _hidden(machine))) for d in options.headdim or (64, 128, 256)]
    if grouped and not options.headdim and not options.heads and not options.heads_k:
        heads.append((128, 64, 8) if gpu else (128, 16, 2))
    return [
        Shape(max(1, tokens // n), n, nheads, nheads_k, d, causal, options.dtype)
        for d, nheads, nheads_k in heads
        for causal in _masks(options)
        for n in seqlens
    ]


def float32_shapes(options, machine) -> list[Shape]:
    options.seqlen = options.seqlen or ([1024] if options.quick else [512, 2048, 8192, 16384])
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
    """Sequence lengths drawn from one mix, with sum `tokens`. Every call gives the same lengths."""
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
    """The single shape of the suites `ladder`, `backward_ladder` and `profile`."""
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


@dataclass(frozen=True, kw_only=True)
class AttentionSuite(Suite):
    """A suite over shapes of self-attention."""

    shapes: Callable[[Any, Any], list[Shape]]
    device: str | None = None  # the only device that the suite runs on
    kernels: tuple[str, ...] = ("best",)  # default of --kernel; () means all kernels of the device
    peers: str | None = None  # default of --peers; None means the usual peers of the device
    mode: str | None = None  # one of MODES
    backward: bool = False
    allow_tf32: bool = False
    by_time: bool = False  # report times instead of speeds, for small calls


def shapes_of(options, machine) -> list[Shape]:
    suite = _suite(options)
    shapes = suite.shapes(options, machine)
    more = {"allow_tf32": bool(options.allow_tf32), "backward": bool(options.backward)}
    return [replace(shape, **more) for shape in shapes]


# ---- running them ----


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = opened(options)
    print(f"{machine.title}, {SHORT[options.dtype]}, {machine.framework} arrays", flush=True)
    return machine, timed_on(machine, options, protocol)


def opened(options) -> Any:
    """Opens the machine, fills in the options that were left open, and refuses kernels that the machine does not
    have."""
    suite = _suite(options)
    machine = open_machine(suite.device or options.device, options.framework, suite.name if suite.device else "")
    options.dtype = options.dtype or suite.dtype or ("bfloat16" if machine.device == "cuda" else "float32")
    options.allow_tf32 = options.allow_tf32 or suite.allow_tf32
    options.backward = options.backward or suite.backward
    if options.allow_tf32 and options.dtype != "float32":
        raise BenchError(f"--allow-tf32 needs --dtype fp32, not {SHORT[options.dtype]}")
    table = backward_kernels() if options.backward else kernels()
    known = [kernel["name"] for kernel in table if kernel["device"] == machine.device]
    named = options.kernel or suite.kernels
    for name in named:
        if name not in known and name != "best":
            if not options.kernel:
                raise BenchError(f"--suite {options.suite} times {name}, which is not a kernel of the {machine.device}")
            hint = did_you_mean(name, known)
            raise BenchError(
                f"--kernel {','.join(named)}: {name!r} is not one of best, {', '.join(known)} on {machine.device}{hint}"
            )
    if options.threads and machine.device == "cuda":
        raise BenchError(f"--threads {options.threads} has no meaning on a GPU")
    return machine


def _suite(options) -> AttentionSuite:
    suite = SUITES[options.suite]
    assert isinstance(suite, AttentionSuite)
    return suite


def timed_on(machine, options, protocol: Protocol) -> Outcome:
    suite = _suite(options)
    shapes = shapes_of(options, machine)
    if machine.framework == "torch" and machine.device == "cpu" and options.threads:
        machine.torch.set_num_threads(options.threads)
    named = options.kernel or suite.kernels
    if not named:
        table = backward_kernels() if options.backward else kernels()
        named = [kernel["name"] for kernel in reversed(table) if kernel["device"] == machine.device]
    peers = peers_of(machine, options.peers, suite.peers)
    outcome = Outcome(load=load_average())
    looks = {"mode": suite.mode, "by_time": suite.by_time}
    with measuring(outcome, machine, len(shapes), options.suite) as (meter, progress):
        outcome.rows += roofs(options, machine, protocol, meter)
        for shape in shapes:
            text = compared(shape, named, peers, options, machine, protocol, meter, outcome, **looks)
            progress.step(f"{shape}: {text}")
    return outcome


def prepared(machine, shape: Shape, seed: int, kept: int | None = None) -> tuple[Inputs, Inputs, Exact, Exact]:
    """(our inputs, the peers' inputs, the exact answer for ours, the exact answer for the peers'). Ours and the peers'
    differ for fp8 only. kept: see Exact."""
    given = Inputs(machine, shape.given, seed)
    q, k, v, _ = given[0]
    exact = Exact(machine, shape.given, q, k, v, given.gradients[0][0] if shape.backward else None, kept=kept)
    if shape.given == shape:
        return given, given, exact, exact
    mine, stand_for = given.quantised(machine, shape)
    return mine, given, Exact(machine, shape, *stand_for), exact


def compared(
    shape: Shape,
    named,
    peers: list[str],
    options,
    machine,
    protocol: Protocol,
    meter: Meter,
    outcome: Outcome,
    *,
    mode: str | None = None,
    by_time: bool = False,
    kept: int | None = None,
) -> str:
    """Checks and times all systems on one shape; returns a line of text about them. mode: one of MODES; this library is
    then timed with and without it. kept: see Exact."""
    mine, given, our_exact, peer_exact = prepared(machine, shape, options.seed or 0, kept)
    of = {name: (shape, mine) if name == "fa3" else (shape.given, given) for name in peers}
    makers = []  # (name, whether it is a kernel asked for by name, more fields of its row, a function that makes it)
    for name in named:
        kernel = None if name == "best" else name
        for row in [{}, {mode: True}] if mode else [{}]:
            make = functools.partial(ours, shape, mine, kernel, options.threads or 0, **row)
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
        row |= its_shape.keys() | {"input_sets": len(mine), "max_err": err, "err_budget": budget}
        if err <= budget or (not is_ours and err <= PEER_FACTOR * budget):
            systems.append((system, its_shape, row))
        elif not is_ours:
            reason = f"its answer is off by {err:.3g}, more than {PEER_FACTOR} times the budget of {budget:.3g}"
            outcome.left_out.append({"system": asked, "shape": str(shape), "reason": reason})
        else:
            outcome.wrong += 1
            outcome.rows.append(rounded(row | {"wrong": True}))
            notes.append(f"{system.kernel or asked} is WRONG: error {err:.3g}, budget {budget:.3g}")
    # No graphs for a backward pass: PyTorch runs it on the stream of its forward pass, which is not being captured.
    launches = [system.launch for system, *_ in systems]
    timings = interleave(
        machine, launches, protocol, meter, seed=options.seed or 0, graphs=False if shape.backward else None
    )
    parts = []
    for (system, its_shape, row), timing in zip(systems, timings, strict=True):
        row = rounded(row | timing.row(shape.flops / 1e12))
        row["tbps"] = float(f"{its_shape.bytes / row['us'] * 1e-6:.5g}")
        outcome.rows.append(row)
        speed = f"{row['us']:.1f} us" if by_time else speed_text(row["tflops"])
        parts.append(
            " ".join(filter(None, [system.name, system.kernel, *(mode for mode in MODES if mode in row), speed]))
        )
    machine.release()
    return "; ".join(parts + notes)


def roofs(options, machine, protocol: Protocol, meter) -> list[dict[str, Any]]:
    """Rows for a large product and a copy in the same framework: the roofs that the speeds are compared with. Running
    them also warms the device up. On a CPU only float32 has roofs, because other products are not fast everywhere."""
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


# ---- the suites ----

SHAPE = frozenset({"headdim", "seqlen", "mask", "heads", "heads_k", "kernel", "framework", "threads", "seed"})
TIMED = frozenset({"peers", "rounds", "quick", "sustained", "output"})
TYPED = frozenset({"dtype", "allow_tf32"})
PROTOCOL = SHAPE | TIMED | {"device", "tokens"}


def _register(name: str, about: str, shapes: Callable, options: frozenset[str], **more: Any) -> None:
    by_time = more.get("by_time", False)
    looks: dict[str, Any] = {
        "table": functools.partial(curves.table, by_time=by_time),
        "pictures": {"": functools.partial(curves.picture, by_time=by_time), "_roofline": curves.roofline},
    }
    register(AttentionSuite(name=name, about=about, shapes=shapes, options=options, run=run, **(looks | more)))


_register(
    "cpu",
    "float32, headdim 64 and 128, seqlen 1024 to 4096, one sequence, heads x headdim = 512",
    cpu_shapes,
    SHAPE | TIMED | {"dtype", "batch"},
    device="cpu",
)
_register(
    "forward",
    "16384 tokens, heads x headdim = 2048, headdim 64, 128, 256, seqlen 512 to 16384; then 64 heads on 8 key heads\n"
    "(on a CPU 2048 tokens, heads x headdim = 512, then 16 heads on 2 key heads)",
    functools.partial(forward_shapes, grouped=True),
    PROTOCOL | TYPED,
)
_register(
    "mma",
    "mma_sm80 on the first 36 of them, beside FlashAttention-2",
    forward_shapes,
    PROTOCOL | {"dtype"},
    kernels=("mma_sm80",),
    peers="fa2",
)
_register(
    "fp8",
    "float8 on the same 36, the answer in bfloat16, plain and with fast_accum, beside cuDNN in bfloat16 (and\n"
    "FlashAttention-3 in float8)",
    forward_shapes,
    PROTOCOL,
    peers="cudnn,fa3",
    dtype="float8_e4m3fn",
    mode="fast_accum",
)
_register(
    "float32",
    "float32, seqlen 512 to 16384, the kernel that a call gets and the one on CUDA cores, beside PyTorch",
    float32_shapes,
    PROTOCOL,
    kernels=("best", "minimal"),
    peers="efficient,standard",
    dtype="float32",
)
_register(
    "float32_backward",
    "dq, dk, dv in float32 on the same shapes, plain and deterministic",
    float32_shapes,
    PROTOCOL,
    peers="efficient,standard",
    dtype="float32",
    mode="deterministic",
    backward=True,
)
_register(
    "tf32",
    "float32 with tf32 allowed, the tensor-core and the CUDA-core kernel, beside PyTorch in float32 and tf32",
    float32_shapes,
    PROTOCOL,
    kernels=("mma_tf32_sm80", "minimal"),
    peers="efficient,standard,standard_tf32",
    dtype="float32",
    allow_tf32=True,
)
_register(
    "backward",
    "dq, dk, dv on the shapes of forward (on the CPU of cpu), plain and deterministic",
    backward_shapes,
    PROTOCOL | {"dtype", "batch"},
    peers="cudnn,fa2,fa3,fa4,torch",
    mode="deterministic",
    backward=True,
)
_register(
    "backward_mma",
    "dq, dk, dv from mma_sm80 on the same, beside FlashAttention-2",
    backward_shapes,
    PROTOCOL | {"dtype", "batch"},
    kernels=("mma_sm80",),
    peers="fa2",
    backward=True,
)
_register(
    "short",
    "seqlen 1 to 512 in batches of 1 and 8, where standard attention is hard to beat",
    short_shapes,
    SHAPE | TIMED | TYPED | {"device", "batch"},
    by_time=True,
)
_register(
    "varlen",
    "packed sequences whose lengths are drawn from a fixed distribution",
    varlen_shapes,
    SHAPE - {"seqlen"} | TIMED | TYPED | {"device", "tokens"},
    table=functools.partial(curves.table, axis="mix"),
    pictures={"": curves.bars},
)
_register(
    "ladder",
    "every kernel of the device on one shape",
    one_shape,
    SHAPE | TIMED | TYPED | {"device", "batch"},
    kernels=(),
    table=curves.ladder_table,
    pictures={"": curves.ladder},
)
_register(
    "backward_ladder",
    "every kernel of the backward pass on one shape",
    one_shape,
    SHAPE | TIMED | {"dtype", "device", "batch"},
    kernels=(),
    peers="cudnn,fa2,fa3,fa4",
    backward=True,
    table=curves.ladder_table,
    pictures={"": curves.ladder},
)
