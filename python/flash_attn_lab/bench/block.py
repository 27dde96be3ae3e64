"""The suite `block`: one Transformer block of a 7B shape and decode steps of whole models, with 16-bit and with 4-bit
weights. Attention over a cache and everything else is included.

A launch runs LAYERS blocks one after another, as the engine does. Each block has its own weights, so that they come
from memory and not from a cache; times are per block. Before a block with 4-bit weights is timed, its result is
compared with that of the same weights in 16-bit matrices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from flash_attn_minimal.llama.cache import KVCache
from flash_attn_minimal.llama.checkpoint import STACKED, Checkpoint
from flash_attn_minimal.llama.host import Host
from flash_attn_minimal.llama.model import Llama, Rows, blocks, load_layer
from flash_attn_minimal.llama.w4 import FORMATS, quantize
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import PackedW4

from ..models.held import HeldEngine
from ..models.synthetic import SHAPES, RandomTensors
from ..report import table as markdown_table
from .figure import MINE, figure_of, set_title
from .llama import TOLERANCE, DeviceTensors, fill, logit_error, times
from .machine import library_has_cuda, load_average, open_machine
from .suite import Outcome, Suite, measuring, register, rounded
from .timing import Protocol

LAYERS, CHECKED = 6, 2  # blocks in a launch; how many of them, from the first on, are compared
POSITION = 1000
PLANS = {  # the block's shape and batches; steps: model, 16-bit type, batches
    "cuda": ("7b", (1, 2, 4, 8, 16, 32, 64), (("stories110M", "float16", (1, 8)), ("7b", "bfloat16", (1, 8)))),
    "cpu": ("stories15M", (1,), ()),
}
QUICK = {"cuda": ("7b", (1,), ()), "cpu": PLANS["cpu"]}
BLOCK_ERROR = 2e-2  # relative to what the blocks add to x; x, q, k, v and the 16-bit matrices are rounded


def _device(kind: str, dtype: str) -> Any:
    """A device with 16-bit matrices, also on the host."""
    if kind == "cpu":
        return Host("float32", dtype)
    from flash_attn_minimal.llama.cuda import Cuda

    return Cuda(dtype)


def _random(name: str, config, device, seed: int) -> Checkpoint:
    tensors = RandomTensors(config, False, seed=seed)
    if device.name == "cuda":
        tensors = DeviceTensors(device, config, seed)
    return Checkpoint(name, "random", False, config, device.matrix_dtype.name, tensors)


def _narrow(checkpoint: Checkpoint, weights: str, device) -> Checkpoint:
    """The model quantized to 4 bits. Every tensor is made once and kept."""
    layers = range(checkpoint.config.n_layers)
    found = quantize(checkpoint, weights, device=device)
    tensors = {name: found.tensors[name] for name in found.tensors if name not in STACKED}
    for name, tensor in tensors.items():
        tensors[name] = tensor if hasattr(tensor, "dtype") else [tensor[i] for i in layers]
    return replace(checkpoint, tensors=tensors | {name: [found.tensors[name][i] for i in layers] for name in STACKED})


def _widened(four: Checkpoint, device, layers: int) -> Checkpoint:
    """The first `layers` layers of a 4-bit model, with the same weights in 16-bit matrices."""
    wide = {name: [w.dequantize(device.matrix_dtype.name) for w in four.tensors[name][:layers]] for name in STACKED}
    return replace(four, tensors=four.tensors | wide)


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    kind = options.device or ("cuda" if library_has_cuda() else "cpu")
    machine = open_machine(kind, "cupy" if kind == "cuda" else "numpy", "block")
    seed, outcome = options.seed or 0, Outcome(load=load_average())
    name, batches, steps = (QUICK if options.quick else PLANS)[machine.device]
    print(f"{machine.title}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, 1 + len(steps), "block") as (_, progress):
        progress.step("\n".join(_blocks(machine, name, batches, seed, protocol, outcome)))
        machine.release()
        for model, dtype, counts in steps:
            progress.step("\n".join(_steps(machine, model, dtype, counts, seed, protocol, outcome)))
            machine.release()
    return machine, outcome


# ---- one block ----


def _blocks(machine, name: str, batches, seed: int, protocol: Protocol, outcome: Outcome) -> list[str]:
    device = _device(machine.device, "bfloat16")
    config = replace(SHAPES[name], n_layers=LAYERS)
    position = min(POSITION, config.seq_len - 8)
    lines = []
    with device.scope():
        base = _random(name, config, device, seed)
        layers = {base.dtype: [load_layer(base, i, device) for i in range(LAYERS)]}
        checks = {}
        for weights in FORMATS:
            four = _narrow(base, weights, device)
            layers[weights] = [load_layer(four, i, device) for i in range(LAYERS)]
            wide = _widened(four, device, CHECKED)
            checks[weights] = [load_layer(wide, i, device) for i in range(CHECKED)]
        cache = KVCache(device, config, max(batches), position + 8)
        fill(SimpleNamespace(device=device, cache=cache), seed)
    for batch in batches:
        with device.scope():
            x = device.xp.asarray(np.random.default_rng(seed).standard_normal((batch, config.dim), np.float32))
            tokens, lengths = device.vector_int32(np.zeros((batch, 1))), device.vector_int32([position] * batch)
            rows = Rows(tokens, lengths, None, 0, position + 1)

        def through(layers, x=x, rows=rows):
            return blocks(device, config, layers, x.copy(), rows, cache)  # products of many rows add in place

        launches, found = {}, {}
        for weights, mine in layers.items():
            row = {"suite": "block", "system": "ours", "pass": "block", "model": name, "dtype": weights}
            row |= {"batch": batch, "position": position}
            if weights in checks:
                with device.scope():
                    got, exact = (machine.host(through(some)) for some in (mine[:CHECKED], checks[weights]))
                    added = np.linalg.norm(exact - machine.host(x))
                row |= {"max_err": float(np.linalg.norm(got - exact) / added), "err_budget": BLOCK_ERROR}
                if not row["max_err"] <= BLOCK_ERROR:
                    outcome.wrong += 1
                    outcome.rows.append(rounded(row | {"wrong": True}))
                    lines.append(f"WRONG: {weights}, batch {batch}: error {row['max_err']:.3g} of what the blocks add")
                    continue
            found[weights] = row

            run = partial(through, mine)
            with device.scope():
                if kernels := _chain_kernels(run):
                    row["kernel"] = kernels
                launches[weights] = _in_scope(device, device.once(run))
        timings = times(device, launches, protocol, seed)
        for weights, row in found.items():
            timed = timings[weights].row(0.0)
            del timed["tflops"]
            timed = {key: value / LAYERS for key, value in timed.items()}
            read = _bytes(layers[weights][0]) + batch * (position + 1) * cache.position_bytes // LAYERS
            outcome.rows.append(rounded(row | timed | {"bytes": read, "tbps": read / timed["us"] * 1e-6}))
        spent = {row["dtype"]: row["us"] for row in outcome.rows[-len(found) :]}
        lines.append(f"{name}, batch {batch}: " + ", ".join(f"{key} {us:.1f} us" for key, us in spent.items()))
    return lines


def _chain_kernels(run) -> str:
    """Runs something; returns the names of the kernels that its chains of products took."""
    chain, found = ops.linear_chain, {}

    def watched(products, *rest, **options):
        found[ops.linear_chain_query(products, kernel=options.get("kernel")).kernel] = True
        return chain(products, *rest, **options)

    ops.linear_chain = watched
    try:
        run()
    finally:
        ops.linear_chain = chain
    return ", ".join(found)


def _in_scope(device, run):
    def inside():
        with device.scope():
            run()

    return inside


def _bytes(layer) -> int:
    arrays = [a for a in vars(layer).values() if a is not None]
    return sum(a.bytes if isinstance(a, PackedW4) else a.nbytes for a in arrays)


# ---- whole models ----


def _steps(machine, name: str, dtype: str, batches, seed: int, protocol: Protocol, outcome: Outcome) -> list[str]:
    device = _device(machine.device, dtype)
    config, lines = SHAPES[name], []
    with device.scope():
        base = _random(name, config, device, seed)
        narrow = {weights: _narrow(base, weights, device) for weights in ("nvfp4", "mxfp4")}
        wide = _widened(narrow["nvfp4"], device, config.n_layers)
    models = {dtype: Llama(wide, device)} | {weights: Llama(four, device) for weights, four in narrow.items()}
    position = min(POSITION, config.seq_len - 8)
    for batch in batches:
        launches, rows, engines = {}, {}, {}
        for weights, model in models.items():
            engine = engines[weights] = HeldEngine(model, batch, position + 8)
            fill(engine, seed)
            launches[weights] = engine.hold(batch, position)
            row = {"suite": "block", "system": "ours", "pass": "model", "model": name, "dtype": weights, "batch": batch}
            rows[weights] = row | {"position": position, "bytes": model.step_bytes}
            rows[weights]["bytes"] += batch * (position + 1) * engine.cache.position_bytes
            if weights == "nvfp4":  # the 16-bit model was made from the nvfp4 weights
                with device.scope():
                    for which in (weights, dtype):  # the same tokens for both: rounding may change a step's tokens
                        device.upload(engines[which].tokens, np.ones((batch, 1), np.int32))
                    got, exact = (machine.host(launches[which]()).astype(np.float64) for which in (weights, dtype))
                error = {"max_err": logit_error(got, exact), "err_budget": TOLERANCE[dtype]}
                if not error["max_err"] <= error["err_budget"]:
                    outcome.wrong += 1
                    outcome.rows.append(rounded(rows.pop(weights) | error | {"wrong": True}))
                    del launches[weights]
                    lines.append(f"WRONG: {name} {weights}: the logits differ by {error['max_err']:.3g} deviations")
                    continue
                rows[weights] |= error
        for weights, timing in times(device, launches, protocol, seed).items():
            timed = timing.row(0.0)
            del timed["tflops"]
            speed = {"steps_per_s": 1e6 / timed["us"], "tbps": rows[weights]["bytes"] / timed["us"] * 1e-6}
            outcome.rows.append(rounded(rows[weights] | timed | speed))
        spent = ", ".join(f"{row['dtype']} {row['us']:.0f} us" for row in outcome.rows[-len(rows) :])
        lines.append(f"{name}, batch {batch}: " + spent)
    return lines


# ---- Markdown and the picture ----


def table(data: dict, _: list[dict]) -> list[str]:
    lines, gpu = [], "gpu" in data["machine"]
    titles = {"block": "One block, us", "model": "Decode step of the whole model, us"}
    for kind, title in titles.items():
        rows = [row for row in data["rows"] if row["pass"] == kind and "us" in row]
        points: dict[tuple, dict[str, dict]] = {}
        for row in rows:
            points.setdefault((row["model"], row["batch"]), {})[row["dtype"]] = row
        kinds = list(dict.fromkeys(row["dtype"] for row in rows))
        four = [kind for kind in kinds if kind in FORMATS]
        body = []
        for (model, batch), found in points.items():
            wide = next(row for name, row in found.items() if name not in FORMATS)
            cells = [f"{found[k]['us']:.1f}" + f" ({found[k]['tbps']:.2f})" * gpu if k in found else "" for k in kinds]
            gains = [f"**{wide['us'] / found[k]['us']:.2f}**" if k in found else "" for k in four]
            body.append([model, str(batch), *cells, *gains])
        if body:
            head = ["model", "batch", *kinds, *(f"{k} over 16 bit" for k in four)]
            lines += [f"## {title}" + " (TB/s of weights and cache)" * gpu, "", *markdown_table(head, body), ""]
    return lines[:-1]


def picture(data: dict, _: list[dict]):
    """Speed relative to 16-bit weights, over the batch size."""
    rows = [row for row in data["rows"] if row["pass"] == "block" and "us" in row]
    figure, [[axis]] = figure_of(1, 1, 6.5, 4)
    wide = {row["batch"]: row["us"] for row in rows if row["dtype"] not in FORMATS}
    for i, weights in enumerate(FORMATS):
        mine = sorted((row["batch"], wide[row["batch"]] / row["us"]) for row in rows if row["dtype"] == weights)
        if mine:
            axis.plot(*zip(*mine, strict=True), marker="os^"[i], color=MINE[i], label=weights)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_ylim(bottom=0)
    axis.set(xlabel="sequences at once", ylabel="times as fast as with 16-bit weights")
    if axis.lines[1:]:  # more than the line at 1
        axis.legend()
    set_title(figure, data, f"A Transformer block of {rows[0]['model']} shape, one token a step")
    return figure


register(
    Suite(
        name="block",
        about="a Transformer block of a 7B shape and decode steps of whole models, with 16-bit and with 4-bit weights",
        options=frozenset({"device", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
        how="median of the bursts, all weights in shuffled turns, host time of queued launches",
        device_time=False,
        checked="every result compared first with that of the same numbers in 16-bit matrices",
    )
)
