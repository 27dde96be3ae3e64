"""The suite `ops`: linear on the shapes of decoders, with weights that are not in the cache, beside the framework's
product (cuBLAS on a GPU); a decode step made of such products; sampling and the other small operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_attn_minimal._commands.report import plural
from flash_attn_minimal.transformer import ops

from .. import reference_ops as reference
from ..report import table as markdown_table
from .machine import SHORT, load_average, open_machine
from .suite import Outcome, Suite, measuring, register, rounded
from .timing import Protocol, interleave

STORY = [(768, 768), (2304, 768), (4096, 768), (768, 2048), (32000, 768)]  # (out, in) of a 110M-parameter Llama
LARGE = [(4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008), (32000, 4096)]  # of a 7B Llama
LAYERS = 12
CHECKED_ROWS = 128  # rows of weight that are checked, at each end


@dataclass
class Linear:
    """One shape: one x, and enough sets of weights that they come from memory."""

    machine: Any
    n: int
    k: int
    m: int
    dtype: str
    fused: bool  # x is float32 and goes through RMSNorm, like the residual stream of a decoder
    swiglu: bool = False

    def __post_init__(self):
        machine, weight_bytes = self.machine, self.n * self.k * (4 if self.dtype == "float32" else 2)
        sets = max(1, min(128, math.ceil(3 * machine.l2_bytes / weight_bytes)))
        scale = self.k**-0.5
        self.weights = [
            machine.cast(machine.random((self.n, self.k), "float32", i) * scale, self.dtype) for i in range(sets)
        ]
        self.x = machine.random((self.m, self.k), "float32" if self.fused else self.dtype, 1000)
        self.narrow = machine.cast(self.x, self.dtype)  # the operand of the peer
        self.norm = machine.random((self.k,), "float32", 1001) if self.fused else None
        columns = self.n // 2 if self.swiglu else self.n
        self.out = machine.nans((self.m, columns), "float32" if self.fused else self.dtype)
        self.peer_out = machine.nans((self.m, self.n), self.dtype)

    def ours(self, i: int, programmatic: bool = True):
        weight = self.weights[i % len(self.weights)]
        more = {"norm_weight": self.norm} if self.fused else {}
        return ops.linear(self.x, weight, swiglu=self.swiglu, out=self.out, programmatic=programmatic, **more)

    def plain(self, i: int):
        return self.ours(i, programmatic=False)

    def peer(self, i: int):
        return self.machine.xp.matmul(self.narrow, self.weights[i % len(self.weights)].T, out=self.peer_out)

    def judge(self) -> tuple[float, float]:
        """(max_err, err_budget) of this library on the first and last columns."""
        machine, half = self.machine, self.n // 2
        got = machine.host(self.ours(0)).astype(np.float64)
        columns = got.shape[1]
        picked = np.unique(np.r_[: min(CHECKED_ROWS, columns), max(0, columns - CHECKED_ROWS) : columns])
        rows = np.r_[picked, picked + half] if self.swiglu else picked
        weight = np.stack([machine.host(self.weights[0][int(row)]) for row in rows])
        norm = None if self.norm is None else machine.host(self.norm)
        exact = reference.linear(machine.host(self.x), weight, norm_weight=norm, act_swiglu=self.swiglu)
        epsilon = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[
            "float32" if self.fused else self.dtype
        ]
        return float(np.abs(got[:, picked] - exact).max()), epsilon * float(np.abs(exact).max()) + 2e-5

    def row(self, system: str) -> dict[str, Any]:
        row = {
            "suite": "ops",
            "system": system,
            "pass": "matvec",
            "dtype": self.dtype,
            "m": self.m,
            "n": self.n,
            "k": self.k,
        }
        row |= {"kernel": self.kernel()} if system == "ours" else {}
        return row | ({"fused": "norm, swiglu" if self.swiglu else "norm"} if self.fused else {})

    def kernel(self) -> str | None:
        more = {"norm_weight": self.norm} if self.fused else {}
        return ops.linear_query(self.x, self.weights[0], swiglu=self.swiglu, programmatic=True, **more).kernel

    def terabytes(self) -> float:
        return self.n * self.k * (4e-12 if self.dtype == "float32" else 2e-12)


def shapes(gpu: bool, quick: bool, sixteen_bit: str) -> list[dict[str, Any]]:
    found = [
        {"n": n, "k": k, "m": 1, "dtype": dtype, "fused": n != 768, "swiglu": n == 4096}
        for dtype in (("float16", "float32") if gpu else ("float32",))
        for n, k in STORY
    ]
    if gpu:
        found += [
            {"n": n, "k": k, "m": m, "dtype": "float16", "fused": n != 768, "swiglu": n == 4096}
            for n, k in STORY for m in (4, 8)
        ]  # fmt: skip
    if gpu and not quick:
        found += [
            {"n": n, "k": k, "m": m, "dtype": sixteen_bit, "fused": False} for n, k in LARGE for m in (1, 2, 4, 16)
        ]
    return found


class Step:
    """The products of a decode step of the 110M-parameter Llama, with a product in place of attention, and the
    sampling."""

    def __init__(self, machine, dtype: str):
        def matrix(n, k, seed):
            return machine.cast(machine.random((n, k), "float32", seed) * k**-0.5, dtype)

        names = {"wqkv": (2304, 768), "attention": (768, 768), "wo": (768, 768), "w13": (4096, 768), "w2": (768, 2048)}
        self.layers = [
            {name: matrix(*shape, 8 * layer + i) for i, (name, shape) in enumerate(names.items())}
            for layer in range(LAYERS)
        ]
        self.head, self.norm = matrix(32000, 768, 999), machine.random((768,), "float32", 998)
        empty = {"x": 768, "qkv": 2304, "attended": 768, "inner": 2048, "logits": 32000}
        self.arrays = {name: machine.random((1, n), "float32", 0) for name, n in empty.items()}
        self.token = machine.int32([0])

    def __call__(self, i: int, programmatic: bool = True):
        a, more = self.arrays, {"programmatic": programmatic}
        for w in self.layers:
            ops.linear(a["x"], w["wqkv"], norm_weight=self.norm, out=a["qkv"], **more)
            ops.linear(a["qkv"][:, :768], w["attention"], out=a["attended"], **more)
            ops.linear(a["attended"], w["wo"], residual=a["x"], out=a["x"], **more)
            ops.linear(a["x"], w["w13"], norm_weight=self.norm, swiglu=True, out=a["inner"], **more)
            ops.linear(a["inner"], w["w2"], residual=a["x"], out=a["x"], **more)
        ops.linear(a["x"], self.head, norm_weight=self.norm, out=a["logits"], **more)
        ops.sample(a["logits"], out=self.token, **more)

    def plain(self, i: int):
        self(i, programmatic=False)

    def terabytes(self) -> float:
        return sum(w.nbytes for layer in self.layers for w in layer.values()) * 1e-12 + self.head.nbytes * 1e-12


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, options.framework)
    gpu = machine.device == "cuda"
    outcome = Outcome(load=load_average())
    sixteen_bit = "bfloat16" if machine.framework == "torch" else "float16"  # CuPy may have no bfloat16
    cases = shapes(gpu, bool(options.quick), sixteen_bit)
    print(f"{machine.title}, {machine.framework} arrays", flush=True)

    def timed(launches, rows, terabytes):
        for row, timing in zip(
            rows, interleave(machine, launches, protocol, meter, seed=options.seed or 0, graphs=True), strict=True
        ):
            row |= timing.row(0.0)
            del row["tflops"]
            if terabytes:
                row["tbps"] = terabytes / (row["us"] * 1e-6)
            outcome.rows.append(rounded(row))

    dtypes = ("float16", "float32") if gpu else ()  # of the decode steps
    with measuring(outcome, machine, len(cases) + len(dtypes), "ops") as (meter, progress):
        for case in cases:
            linear = Linear(machine, **case)
            what = f"{linear.n} x {linear.k}, {plural(linear.m, 'row')}, {SHORT[linear.dtype]}"
            err, budget = linear.judge()
            if not err <= budget:
                outcome.wrong += 1
                outcome.rows.append(rounded(linear.row("ours") | {"wrong": True, "max_err": err, "err_budget": budget}))
                progress.step(f"{what}: WRONG, error {err:.3g} where {budget:.3g} is allowed")
                continue
            checked = {"max_err": err, "err_budget": budget}
            launches, rows = [linear.ours], [linear.row("ours") | checked]
            if gpu:
                launches.append(linear.plain)
                rows[0]["mode"] = "programmatic"
                rows.append(linear.row("ours") | checked | {"mode": "plain"})
            try:
                linear.peer(0)
                launches.append(linear.peer)
                rows.append(linear.row("cublas" if gpu else "blas"))
            except (TypeError, ValueError, RuntimeError) as error:
                outcome.left_out.append({"system": "blas", "shape": what, "reason": str(error).splitlines()[0]})
            timed(launches, rows, linear.terabytes())
            progress.step(
                f"{what}: " + ", ".join(f"{r['system']} {r['us']:.1f} us" for r in outcome.rows[-len(rows) :])
            )
            del linear, launches
            machine.release()
        for dtype in dtypes:
            step = Step(machine, dtype)
            row = {"suite": "ops", "system": "ours", "pass": "products", "dtype": dtype}
            modes = [row | {"mode": "programmatic"}, row | {"mode": "plain"}]
            timed([step, step.plain], modes, step.terabytes())
            progress.step(f"a step of products, {SHORT[dtype]}: {outcome.rows[-2]['us']:.1f} us")
        for row, launch, terabytes in small(machine, gpu, sixteen_bit):
            timed([launch], [row], terabytes)
            progress.say(f"{row['call']}: {outcome.rows[-1]['us']:.1f} us")
    return machine, outcome


def small(machine, gpu: bool, sixteen_bit: str):
    """Yields (row, launch, terabytes moved) of the other operations."""

    def row(name, call, dtype):
        return {"suite": "ops", "system": "ours", "pass": name, "call": call, "dtype": dtype}

    cuts: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40},
    ]
    for vocab in (32000, 128256):
        logits, token = machine.random((1, vocab), "float32", 0), machine.int32([0])
        for cut in cuts:
            text = ", ".join(f"{name} {value}" for name, value in cut.items()) or "greedy"
            call = f"sample of {vocab}, {text}"
            yield (
                row("sample", call, "float32"),
                lambda i, x=logits, t=token, c=cut: ops.sample(x, out=t, seed=i, **c),
                0.0,
            )
    dtype, tokens = (sixteen_bit, 8192) if gpu else ("float32", 256)
    size = 2e-12 if gpu else 4e-12
    x, weight = machine.random((tokens, 4096), dtype, 0), machine.random((4096,), dtype, 1)
    out = machine.nans((tokens, 4096), dtype)
    call = f"rms_norm of {tokens} x 4096"
    yield row("rms_norm", call, dtype), lambda i: ops.rms_norm(x, weight, out=out), 2 * tokens * 4096 * size
    gate_up, half = machine.random((tokens, 8192), dtype, 2), machine.nans((tokens, 4096), dtype)
    yield (
        row("swiglu", f"swiglu of {tokens} x 8192", dtype),
        lambda i: ops.swiglu(gate_up, out=half),
        3 * tokens * 4096 * size,
    )
    table = machine.random((tokens, 64), "float32", 3)
    heads, turned = x.reshape(1, tokens, 32, 128), out.reshape(1, tokens, 32, 128)
    call = f"rope of {tokens} x 32 x 128"
    yield row("rope", call, dtype), lambda i: ops.rope(heads, table, table, out=turned), 2 * tokens * 4096 * size


# ---- Markdown ----


def table(data: dict, rows: list[dict]) -> list[str]:
    rows = [row for row in data["rows"] if "us" in row]
    products: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["pass"] == "matvec":
            key = row["n"], row["k"], row["m"], row["dtype"], row.get("fused", "")
            products.setdefault(key, {})[row.get("mode", "") if row["system"] == "ours" else "peer"] = row
    body = []
    for (n, k, m, dtype, fused), found in products.items():
        ours, plain, peer = found.get("programmatic") or found.get(""), found.get("plain"), found.get("peer")
        cells = [f"{ours['us']:.2f}", f"{ours['tbps']:.2f}", f"{plain['us']:.2f}" if plain else ""]
        cells += [f"{peer['us']:.2f}", f"**{peer['us'] / ours['us']:.2f}**"] if peer else ["", ""]
        body.append([f"{n} x {k}", str(m), SHORT[dtype], fused, *cells])
    head = [
        "weight",
        "rows",
        "dtype",
        "fused to ours",
        "ours, us",
        "TB/s",
        "plain launch, us",
        "peer, us",
        "speed over the peer",
    ]
    lines = ["## linear, weights from memory", "", *markdown_table(head, body)]
    steps = [row for row in rows if row["pass"] == "products"]
    if steps:
        body = [[SHORT[row["dtype"]], row["mode"], f"{row['us']:.1f}", f"{row['tbps']:.2f}"] for row in steps]
        lines += ["", f"## {LAYERS} layers of 5 products, the logits and a greedy draw in one graph", ""]
        lines += markdown_table(["dtype", "launch", "us", "TB/s"], body)
    others = [
        [row["call"], f"{row['us']:.1f}", f"{row['tbps']:.2f}" if "tbps" in row else ""]
        for row in rows
        if "call" in row
    ]
    lines += ["", "## The other operations", "", *markdown_table(["call", "us", "TB/s"], others)]
    return lines


register(
    Suite(
        name="ops",
        about="linear with weights from memory, beside the framework's own product; a decode step of them;\n"
        "sampling, norms",
        options=frozenset({"device", "framework", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        titled=False,
    )
)
