"""The suite `linear`: products with 4-bit weights beside the framework's products with 16-bit weights (cuBLAS on a GPU;
float32 on a CPU), over the number of rows of x. Calls rotate through copies of the weights, so that these come from
memory and not from the level-2 cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flash_attn_minimal._commands.report import plural
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer._library import W4_FORMATS
from flash_attn_minimal.transformer.quantized import W4Weight

from .. import reference_ops
from ..report import table as markdown_table
from .figure import MINE, figure_of, legend, set_title
from .machine import BenchError, load_average, open_machine
from .rows import label, number
from .suite import Outcome, Suite, measuring, register, rounded
from .systems import LABELS
from .timing import Protocol, interleave

SHAPES = ((14336, 4096), (4096, 14336), (8192, 8192), (4096, 4096))  # out_features, in_features
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
FORMATS = tuple(W4_FORMATS)
QUICK = {"cuda": (((8192, 8192),), (1, 16, 128, 1024)), "cpu": (((1024, 1024),), (1, 16))}
CPU = ((2048, 2048), (1024, 4096)), (1, 4, 16, 64)
NORMED = 8  # rows of x up to which the first format is timed with a norm in the product, too, as in a decode step
CHECKED = 64  # rows of x and of weight, at each end
PASS = "w4"


def ends(count: int) -> np.ndarray:
    return np.unique(np.r_[: min(CHECKED, count), max(0, count - CHECKED) : count])


class Weights:
    """A matrix in every 4-bit format and in the peer's dtype, each in more copies than the level-2 cache holds."""

    def __init__(self, machine, n: int, k: int, dtype: str, peer_dtype: str):
        w = machine.random((n, k), "float32", 0) * k**-0.5
        self.packed, self.exact, self.bytes = {}, {}, {}
        for format in FORMATS:
            plain = W4Weight.quantize(w, format)
            packed = [plain.pack(dtype)]
            packed += [plain.pack(dtype) for _ in range(1, sets(machine, packed[0].bytes))]
            self.packed[format], self.bytes[format] = packed, packed[0].bytes
            rows = plain.dequantize()
            self.exact[format] = np.stack([machine.host(rows[int(n)]) for n in ends(n)]).astype(np.float64)
        self.bytes["peer"] = n * k * (4 if peer_dtype == "float32" else 2)
        self.peer = [machine.cast(w + 0, peer_dtype) for _ in range(sets(machine, self.bytes["peer"]))]


def sets(machine, size: int) -> int:
    return max(1, min(64, math.ceil(3 * getattr(machine, "l2_bytes", 0) / size)))


class Product:
    """This library's product with one format and kernel. norm: the weight of a norm that x goes through first."""

    def __init__(self, machine, x, packed: list, kernel: str | None, programmatic: bool, norm=None):
        self.x, self.packed, self.kernel, self.programmatic, self.norm = x, packed, kernel, programmatic, norm
        plan = ops.linear_query(x, packed[0], norm_weight=norm, programmatic=programmatic, kernel=kernel)
        self.plan = plan
        if plan.status == "FA_OK":
            self.workspace = machine.nans((plan.workspace_bytes // 4 + 1,), "float32").view(machine.xp.uint8)
            self.out = machine.nans((x.shape[0], packed[0].shape[0]), str(x.dtype).removeprefix("torch."))

    def __call__(self, i: int):
        return ops.linear(
            self.x, self.packed[i % len(self.packed)], norm_weight=self.norm,
            out=self.out, kernel=self.kernel, workspace=self.workspace, programmatic=self.programmatic,
        )  # fmt: skip


def judge(machine, product: Product, exact: np.ndarray, n: int) -> tuple[float, float]:
    """(max_err, err_budget) at the first and last rows and columns. The budget is twice the error that rounding the
    weight and the result to 16 bits may cause."""
    rows, columns = ends(product.x.shape[0]), ends(n)
    got = product(0)
    got = np.stack([machine.host(got[int(row)]) for row in rows]).astype(np.float64)[:, columns]
    x = np.stack([machine.host(product.x[int(row)]) for row in rows]).astype(np.float64)
    if product.norm is not None:
        x = reference_ops.rms_norm(x, machine.host(product.norm).astype(np.float64))
    answer = x @ exact.T
    epsilon = 2.0**-7 if product.packed[0].dtype == "bfloat16" else 2.0**-10
    spread = float(np.sqrt((x * x).sum(-1).max() * (exact * exact).sum(-1).max() / x.shape[1]))
    err = float(np.abs(got - answer).max())
    return err, epsilon * (float(np.abs(answer).max()) + spread)


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, options.framework)
    gpu = machine.device == "cuda"
    dtype = options.dtype or ("bfloat16" if machine.framework == "torch" else "float16")
    if dtype not in ("float16", "bfloat16"):
        raise BenchError(f"--dtype {dtype}: products with 4-bit weights are made in fp16 or bf16")
    shapes, counts = QUICK[machine.device] if options.quick else (SHAPES, ROWS) if gpu else CPU
    outcome = Outcome(load=load_average())
    print(f"{machine.title}, {dtype}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, len(shapes) * len(counts), "linear") as (meter, progress):
        for n, k in shapes:
            weights = Weights(machine, n, k, dtype, dtype if gpu else "float32")
            for m in counts:
                said = _one(machine, weights, (m, n, k), dtype, options, protocol, meter, outcome)
                progress.step(f"{n} x {k}, {plural(m, 'row')}: {said}")
            del weights
            machine.release()
    return machine, outcome


def _one(machine, weights: Weights, shape, dtype: str, options, protocol, meter, outcome: Outcome) -> str:
    """Checks and times everything at one point; returns the line to print."""
    (m, n, k), gpu = shape, machine.device == "cuda"
    x = machine.cast(machine.random((m, k), "float32", 1000 + m), dtype if gpu else "float32")
    base = {"suite": "linear", "pass": PASS, "dtype": dtype, "m": m, "n": n, "k": k}
    timed, notes = [], []
    for format in FORMATS:
        # (kernel, whether the launch is programmatic, the mode): as in a model, as a plain call, after a norm.
        ways = [(kernel, gpu, "programmatic") for kernel in options.kernel or ["best"]]
        if ("best", True, "programmatic") in ways:
            ways.append(("best", False, "plain"))
            if format == FORMATS[0] and m <= NORMED:
                ways.append(("best", True, "norm"))
        for kernel, programmatic, mode in ways:
            forced = None if kernel == "best" else kernel
            if mode == "norm":
                residual, norm = machine.random((m, k), "float32", 1000 + m), machine.random((k,), "float32", 999)
                product = Product(machine, residual, weights.packed[format], None, programmatic, norm)
            else:
                product = Product(machine, x, weights.packed[format], forced, programmatic)
            if product.plan.status != "FA_OK":
                reason = product.plan.error
                outcome.left_out.append({"system": kernel, "shape": f"{n} x {k}, {plural(m, 'row')}", "reason": reason})
                continue
            err, budget = judge(machine, product, weights.exact[format], n)
            row = base | {"system": "ours", "kernel": product.plan.kernel, "weights": format}
            row |= {"forced": True} if kernel != "best" else {}
            row |= {"max_err": err, "err_budget": budget}
            row |= {"mode": mode} if gpu else {}
            if err <= budget:
                timed.append((row, product, weights.bytes[format]))
                continue
            outcome.wrong += 1
            outcome.rows.append(rounded(row | {"wrong": True}))
            notes.append(f"{format} {product.plan.kernel} is WRONG: error {err:.3g}, budget {budget:.3g}")
    out = machine.nans((m, n), dtype if gpu else "float32")

    def peer(i: int):
        return machine.xp.matmul(x, weights.peer[i % len(weights.peer)].T, out=out)

    timed.append((base | {"system": "cublas" if gpu else "blas"}, peer, weights.bytes["peer"]))
    launches = [launch for _, launch, _ in timed]
    timings = interleave(machine, launches, protocol, meter, seed=options.seed or 0, graphs=True)
    for (row, _, size), timing in zip(timed, timings, strict=True):
        measured = timing.row(2e-12 * m * n * k)
        measured["tbps"] = size / measured["us"] * 1e-6
        outcome.rows.append(rounded(row | measured))
    found = outcome.rows[-len(timed) :]
    peer_us = found[-1]["us"]
    parts = [f"{found[-1]['system']} {peer_us:.1f} us"]
    parts += [
        f"{row['weights']} {row['kernel']} {row['us']:.1f} ({peer_us / row['us']:.2f})"
        for row in found[:-1]
        if row.get("mode") not in ("plain", "norm")
    ]
    return "; ".join(parts + notes)


# ---- the table and the picture ----


def grouped(rows: list[dict]) -> dict[tuple[int, int], dict[int, dict[str, dict]]]:
    """shape -> rows of x -> name of the series -> result row."""
    found: dict[tuple[int, int], dict[int, dict[str, dict]]] = {}
    for row in rows:
        name = "peer"
        if row["system"] == "ours":
            name = row["weights"] + (f" {row['kernel']}" if row.get("forced") else "")
            mode = row.get("mode", "programmatic")
            name += {"programmatic": "", "plain": ", plain launch"}.get(mode, f", {mode}")
        found.setdefault((row["n"], row["k"]), {}).setdefault(row["m"], {})[name] = row
    return found


def table(data: dict, rows: list[dict]) -> list[str]:
    peer = next((LABELS.get(row["system"], row["system"]) for row in rows if row["system"] != "ours"), "peer")
    lines = []
    for (n, k), counts in grouped(rows).items():
        names = list(dict.fromkeys(name for found in counts.values() for name in found if name != "peer"))
        body = []
        for m, found in counts.items():
            theirs = found["peer"]["us"]
            cells = [number(theirs)]
            for name in names:
                row = found.get(name)
                cells.append(f"{number(row['us'])} (**{theirs / row['us']:.2f}**)" if row else "")
            kernels = dict.fromkeys(row["kernel"] for row in found.values() if row["system"] == "ours")
            body.append([str(m), *cells, ", ".join(kernels)])
        lines += [f"## {n} x {k}: microseconds (speed over {peer})", ""]
        lines += [*markdown_table(["rows of x", peer, *names, "kernel"], body), ""]
    return lines[:-1]


def picture(data: dict, rows: list[dict]):
    """Speed relative to the framework's product over the rows of x, a panel for each shape of the weight."""
    panels = grouped(rows)
    figure, axes = figure_of(math.ceil(len(panels) / 2), min(2, len(panels)), 9, 1.2 + 2.9 * math.ceil(len(panels) / 2))
    for axis, ((n, k), counts) in zip(axes.flat, panels.items(), strict=False):
        names = dict.fromkeys(name for found in counts.values() for name in found if name != "peer")
        for i, name in enumerate(name for name in names if "," not in name):
            line = [(m, found["peer"]["us"] / found[name]["us"]) for m, found in counts.items() if name in found]
            axis.plot(*zip(*line, strict=True), color=MINE[i % len(MINE)], marker="oDP*X"[i % 5], label=name)
        axis.axhline(1, color="0.5", linewidth=1, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_ylim(bottom=0)
        axis.set_title(f"{n} x {k}")
        axis.set_xlabel("rows of x")
        axis.set_ylabel(f"speed over {data_label(rows)}")
    set_title(figure, data, "Products with 4-bit weights over the same with 16-bit ones (more is better)")
    legend(figure, axes)
    return figure


def data_label(rows: list[dict]) -> str:
    return next((label(row["system"]) for row in rows if row["system"] != "ours"), "the peer")


register(
    Suite(
        name="linear",
        about="products with 4-bit weights over the rows of x, beside the framework's own with 16-bit ones",
        options=frozenset({"device", "framework", "dtype", "kernel", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
    )
)
