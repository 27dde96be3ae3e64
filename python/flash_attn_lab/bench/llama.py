"""The suite `llama`: decode steps of the engine at a fixed position, with the whole model and sampling.

Flash and standard attention take turns in one engine over one cache of random keys and values; their logits are
compared before anything is timed. The limit of a step is the time to read weights and cache at the bandwidth of a
large copy in the same run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from flash_attn_minimal.llama.checkpoint import Checkpoint
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.w4 import FORMATS, quantize

from ..models.held import HeldEngine
from ..models.standard import ATTENTIONS, Cuda, Host
from ..models.synthetic import SHAPES, RandomTensors
from ..report import table as markdown_table
from .figure import LINES, figure_of, legend, set_title
from .machine import SHORT, BenchError, library_has_cuda, load_average, open_machine
from .rows import number
from .suite import Outcome, Suite, measuring, register, rounded
from .timing import Protocol, Timing

POSITIONS = (1, 100, 500, 1000)
PLANS = {  # model -> (dtypes of the matrices, or of matrices/cache; batches; positions)
    "cpu": {"stories15M": (("float32",), (1, 8), (1, 100, 200))},
    "cuda": {
        "stories110M": (
            ("float32", "float32/float16", "float16", "bfloat16", "nvfp4/float16", "mxfp4/float16"),
            (1, 8, 64),
            POSITIONS,
        ),
        "7b": (("bfloat16", "nvfp4/bfloat16", "mxfp4/bfloat16"), (1, 8), (1, 1000, 4000)),
    },
}
COPY_BYTES = 1 << 30  # read and written
QUICK = {"cpu": (1, 200), "cuda": (1, 1000)}
# Limits for logit_error: the two attentions sum in different orders, and round to the cache's dtype in every layer.
TOLERANCE = {"float32": 1e-4, "float16": 8e-3, "bfloat16": 6e-2}


class DeviceTensors(RandomTensors):
    """RandomTensors made on a GPU: 7 billion weights in a second."""

    def __init__(self, device, config, seed):
        super().__init__(config, tied=False, seed=seed)
        self.device, self.random = device, device.xp.random.RandomState(seed)

    def make(self, name: str, layer: int) -> Any:
        shape = self.shapes[name]
        values = self.random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            return values / 8 + np.float32(name.startswith("rms"))
        values *= np.float32(shape[1] ** -0.5)
        return self.device.cast(values, self.device.matrix_dtype)


def _model(name: str, device, seed: int, weights: str) -> Llama:
    config = SHAPES[name]
    tied = name != "7b"
    tensors = RandomTensors(config, tied, seed=seed)
    if device.name == "cuda":
        with device.scope():
            tensors = DeviceTensors(device, config, seed)
    checkpoint = Checkpoint(name, "random", tied, config, device.dtype.name, tensors)
    with device.scope():
        return Llama(quantize(checkpoint, weights, device=device) if weights in FORMATS else checkpoint, device)


def fill(engine: HeldEngine, seed: int) -> None:
    """Fills the cache with keys and values of unit variance, as a model's have."""
    device = engine.device
    with device.scope():
        if device.name == "cpu":
            for i, array in enumerate((*engine.cache.k, *engine.cache.v)):
                array[...] = np.random.default_rng([seed, i]).standard_normal(array.shape, np.float32)
            return
        state = device.xp.random.RandomState(seed)
        for array in (*engine.cache.k, *engine.cache.v):
            for part in array:
                values = device.cast(state.standard_normal(part.shape, dtype=np.float32), device.dtype)
                part.view(np.uint16 if part.itemsize == 2 else part.dtype)[...] = values.view(
                    np.uint16 if part.itemsize == 2 else part.dtype
                )


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    kind = options.device or ("cuda" if library_has_cuda() else "cpu")
    machine = open_machine(kind, "cupy" if kind == "cuda" else "numpy", "llama")
    seed, outcome = options.seed or 0, Outcome(load=load_average())
    plans = PLANS[machine.device]
    if options.model:
        if options.model not in SHAPES:
            raise BenchError(f"--model {options.model} is not one of {', '.join(SHAPES)}")
        plans = {options.model: plans.get(options.model, next(iter(plans.values())))}
    jobs = []
    for name, (dtypes, batches, positions) in plans.items():
        context = SHAPES[name].seq_len
        positions = options.seqlen or (QUICK[machine.device] if options.quick else positions)
        if max(positions) >= context:
            raise BenchError(f"--seqlen {max(positions)}: positions of {name} end at {context - 1}")
        for dtype in [options.dtype] if options.dtype else dtypes:
            for batch in [options.batch] if options.batch else (1,) if options.quick else batches:
                jobs.append((name, dtype, batch, positions))
    bandwidth = None
    print(f"{machine.title}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, len(jobs), "llama") as (_, progress):
        made: dict[tuple[str, str], Llama] = {}
        for name, dtype, batch, positions in jobs:
            if (name, dtype) not in made:
                made.clear()  # one model in memory at a time
                made[name, dtype] = _model(name, _device(machine.device, dtype), seed, dtype.partition("/")[0])
            model = made[name, dtype]
            bandwidth = bandwidth or model.device.bandwidth()
            lines = _one(model, name, dtype, batch, positions, bandwidth, seed, protocol, outcome)
            progress.step(f"{name} {dtype} batch {batch}: {'; '.join(lines)}")
    if bandwidth:
        copy = {"suite": "llama", "system": "copy", "pass": "copy"}
        outcome.rows.append(rounded(copy | {"us": COPY_BYTES / bandwidth * 1e6, "tbps": bandwidth / 1e12}))
    return machine, outcome


def logit_error(got: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square difference of a sequence's logits, for the worst sequence, over the standard deviation of
    all logits. The largest single difference would grow with the number of logits."""
    return float(np.sqrt(np.square(got - exact).mean(-1)).max() / exact.std())


def _device(kind: str, dtype: str) -> Any:
    matrices, _, cache = dtype.partition("/")
    four = matrices in FORMATS
    if kind == "cpu":
        return Host("flash", cache or "float32", "bfloat16") if four else Host("flash", cache or matrices)
    return Cuda("flash", cache if four else matrices, cache or None)


def _one(model, name, dtype, batch, positions, bandwidth, seed, protocol, outcome) -> list[str]:
    """Times all positions of one batch size; returns the lines to print."""
    engine = HeldEngine(model, batch, context=min(model.config.seq_len, max(positions) + 8))
    fill(engine, seed)
    lines = []
    for position in positions:
        steps: dict[str, Callable[[], Any]] = {}
        logits = {}
        for attention in ATTENTIONS:
            steps[attention] = _step(engine, batch, position, attention)
            with model.device.scope():
                model.device.upload(engine.tokens, np.ones((batch, 1), np.int32))
            found = steps[attention]()
            model.device.synchronize()
            logits[attention] = (found.get() if hasattr(found, "get") else found).astype(np.float64)
        tolerance = max(TOLERANCE[kind.name] for kind in (model.device.dtype, model.device.matrix_dtype))
        err = logit_error(logits["flash"], logits["standard"])
        kinds = {"dtype": dtype.partition("/")[0], "cache_dtype": model.device.dtype.name}
        row = {"suite": "llama", "pass": "step", "model": name} | kinds | {"batch": batch, "position": position}
        if not err <= tolerance:
            outcome.wrong += 1
            wrong = {"system": "ours", "wrong": True, "max_err": err, "err_budget": tolerance}
            outcome.rows.append(rounded(row | wrong))
            lines.append(f"WRONG at {position}: the logits differ by {err:.3g} standard deviations")
            continue
        timings = times(model.device, steps, protocol, seed)
        read = model.step_bytes + batch * (position + 1) * engine.cache.position_bytes
        for attention, timing in timings.items():
            timed = timing.row(0.0)
            del timed["tflops"]
            us = timed["us"]
            share = read / bandwidth / (us * 1e-6)
            speed = {"steps_per_s": 1e6 / us, "bytes": read, "tbps": read / us * 1e-6, "share": share}
            system = "ours" if attention == "flash" else "standard"
            checked = {"max_err": err, "err_budget": tolerance}
            outcome.rows.append(rounded(row | {"system": system, "kernel": attention} | timed | speed | checked))
        flash, standard = (timings[a].row(0.0)["us"] for a in ("flash", "standard"))
        lines.append(f"at {position} {1e6 / flash:.0f} steps/s ({standard / flash:.2f}x standard)")
    return lines


def _step(engine: HeldEngine, batch: int, position: int, attention: str) -> Callable[[], Any]:
    device = engine.device
    device.attention = attention
    step = engine.hold(batch, position)

    def run():
        device.attention = attention
        return step()

    return run


def times(device, steps: dict[str, Callable], protocol: Protocol, seed: int) -> dict[str, Timing]:
    """Times the steps in bursts, in a new shuffled order every round."""

    def burst(step, count) -> float:
        device.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        device.synchronize()
        return (time.perf_counter() - started) / count

    order, timings, counts = random.Random(seed), {}, {}
    for name, step in steps.items():
        burst(step, 2)  # the second call is captured in a graph
        once = median(burst(step, 2) for _ in range(3))
        counts[name] = max(2, min(protocol.max_launches, round(2 * protocol.burst_s / once)))
        timings[name] = Timing()
    for _ in range(protocol.rounds):
        for name in order.sample(list(steps), len(steps)):
            timings[name].bursts.append(burst(steps[name], counts[name]) * 1e6)
    return timings


# ---- the table and the picture ----


def step_dtype(row: dict) -> str:
    """fp32, or fp32/fp16 for float32 matrices with a float16 cache."""
    kinds = dict.fromkeys((row["dtype"], row["cache_dtype"]))
    return "/".join(SHORT.get(kind, kind) for kind in kinds)


def table(data: dict, rows: list[dict]) -> list[str]:
    """Steps/s at each position, for each model, dtype, batch and attention; then the gain of flash attention."""
    positions = sorted({row["position"] for row in rows})
    body = []
    names = list(dict.fromkeys((row["model"], step_dtype(row), row["batch"]) for row in rows))
    for name in names:
        mine = [row for row in rows if (row["model"], step_dtype(row), row["batch"]) == name]
        found = {(row["kernel"], row["position"]): row for row in mine}
        start = [*map(str, name)]
        for kernel in ("flash", "standard"):
            mine = [found.get((kernel, position)) for position in positions]
            body.append([*start, kernel, *(number(row["steps_per_s"]) if row else "" for row in mine)])
            if kernel == "flash":
                body.append([*start, "of the limit", *(f"{row['share']:.0%}" if row else "" for row in mine)])
        pairs = [(found.get(("flash", p)), found.get(("standard", p))) for p in positions]
        gains = [f"{standard['us'] / flash['us']:.2f}" if flash and standard else "" for flash, standard in pairs]
        body.append([*start, "**flash over standard**", *gains])
    head = ["model", "matrices/cache", "batch", "attention", *(f"position {position}" for position in positions)]
    return ["## Decode steps/s of the whole batch, more is better", "", *markdown_table(head, body)]


def picture(data: dict, rows: list[dict]):
    """Steps/s over position, a panel for each model and batch, a line for each dtype and attention."""
    panels = list(dict.fromkeys((row["model"], row["batch"]) for row in rows))
    dtypes = list(dict.fromkeys(step_dtype(row) for row in rows))  # a colour each, in all panels
    figure, axes = figure_of(1, len(panels), max(6, 3.1 * len(panels)), 3.9)
    for axis, (model, batch) in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        for dtype in dict.fromkeys(step_dtype(row) for row in mine):
            color = LINES[dtypes.index(dtype) % len(LINES)]
            for kernel, line, marker in (("flash", "-", "o"), ("standard", "--", "v")):
                line_of = [row for row in mine if (step_dtype(row), row["kernel"]) == (dtype, kernel)]
                x, y = zip(*sorted((row["position"], row["steps_per_s"]) for row in line_of), strict=True)
                axis.plot(x, y, line, marker=marker, color=color, label=f"{kernel}, {dtype}", markersize=4)
        axis.set_title(f"{model}, batch {batch}")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("position")
    axes[0][0].set_ylabel("decode steps/s")
    set_title(figure, data, "Whole models, one token a step (more is better)")
    legend(figure, axes)
    return figure


register(
    Suite(
        name="llama",
        about="decode steps of whole models over position, flash and standard attention (--seqlen: the positions)",
        options=frozenset({"device", "dtype", "model", "batch", "seqlen", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
        how="median of the bursts, both attentions in shuffled turns, host time of queued steps",
        device_time=False,
        checked="logits of both compared first",
    )
)
