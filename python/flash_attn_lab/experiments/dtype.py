"""Speed and error of every dtype, on plain inputs and on inputs with outliers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flash_attn_minimal import (
    flash_attn_func,
    flash_attn_with_kvcache,
    kvcache_query,
    quantize_fp8,
    quantize_kvcache,
    query,
)
from flash_attn_minimal.errors import FlashAttnError

from ..bench.check import Exact, attend, largest, worst
from ..bench.figure import LINES, figure_of
from ..bench.machine import DTYPES, BenchError, first_line
from ..bench.rows import number
from ..bench.suite import rounded
from ..bench.systems import Shape
from ..bench.timing import interleave
from ..report import table as markdown_table
from .experiment import Experiment, Rows, Run, register
from .report import set_title

OUTLIERS, TIMES = 0.001, 50.0  # the share of outliers among the entries, and their factor
EDGE = 3.2905  # a normal number has a larger magnitude with probability OUTLIERS
HEADS, ROWS = 2, 256  # heads, and rows of each, whose error is measured
INPUTS = ("normal", "outliers")
SLACK = {
    "normal": 1,
    "outliers": 4,
}  # outliers give scores of thousands; one ulp of such a score changes P, and sums differ in their order
SAID = {"normal": "on normal inputs", "outliers": "with outliers"}
GROUPS = {"attention": "Attention", "cache": "One query over a cache"}
FLOOR = 2e-5  # of the cache's budget, as in the suite decode


@dataclass
class Case:
    """One way to compute the answer: its call and its checks."""

    name: str
    group: str  # "attention" or "cache"
    kernel: str
    launch: Callable[[], Any]
    answer_of: Callable[[Any, int, int], np.ndarray]  # answer, b, h -> (rows, headdim)
    judge: Callable[[Any], tuple[float, float]]
    row: dict[str, Any] = field(default_factory=dict)


def made(machine, shape: tuple[int, ...], seed: int, outliers: bool) -> Any:
    """A normal float32 array; with outliers one entry in a thousand is 50 times as large."""
    x = machine.random(shape, "float32", seed)
    if outliers:
        far = abs(machine.random(shape, "float32", seed + 1000)) > EDGE
        x = x * (1 + (TIMES - 1) * machine.cast(far, "float32"))
    return x


def run(run: Run) -> None:
    if run.gpu:
        shape = Shape(1 if run.quick else 4, 2048 if run.quick else 4096, 16, 16, 128, False, "float32")
        cache = (2, 2048) if run.quick else (16, 8192)
    else:
        shape = Shape(1, 128 if run.quick else 1024, 8, 8, 64, False, "float32")
        cache = (2, 256 if run.quick else 2048)
    with run.steps(2 * len(INPUTS), "dtype"):
        for inputs in INPUTS:
            _attention(run, shape, inputs)
            _cache(run, cache, inputs)


def _time(
    run: Run, shape: Any, inputs: str, cases: list[Case], exact: Callable[[int, int], np.ndarray], where, work
) -> None:
    """Checks all cases, measures their errors against float64 of the unrounded inputs, then times them in turns."""
    right: list[tuple[Case, dict]] = []
    for case in cases:
        answer = case.launch()
        run.machine.synchronize()
        err, budget = case.judge(answer)
        budget *= SLACK[inputs]
        row: dict[str, Any] = {
            "name": case.name,
            "group": case.group,
            "kernel": case.kernel,
            "inputs": inputs,
            "pass": "fwd",
        }
        row |= case.row | {"max_err": err, "err_budget": budget}
        squares, whole, most, count = 0.0, 0.0, 0.0, 0
        for b, h in where:
            true = exact(b, h)
            difference = case.answer_of(answer, b, h) - true
            squares, whole = squares + float((difference**2).sum()), whole + float((true**2).sum())
            most, count = largest((most, np.abs(difference).max())), count + true.size
        row |= {"rms": (squares / whole) ** 0.5, "largest": most / (whole / count) ** 0.5}
        del answer
        if err <= budget:
            right.append((case, row))
        else:
            run.wrong(row)
    launches = [lambda i, case=case: case.launch() for case, _ in right]
    timings = interleave(run.machine, launches, run.protocol, run.meter, seed=run.seed)
    texts = []
    for (case, row), timing in zip(right, timings, strict=True):
        row = row | timing.row(work / 1e12)
        run.outcome.rows.append(rounded(row))
        texts.append(f"{case.name} {row['us']:.1f} us, rms {row['rms']:.1e}")
    run.machine.release()
    run.step(f"{shape}, {inputs} inputs: " + "; ".join(texts))


# ---- attention ----


def _attention(run: Run, shape: Shape, inputs: str) -> None:
    machine = run.machine
    whole = [made(machine, shape.sizes[0], run.seed + i, inputs == "outliers") for i in range(3)]
    cases = []
    ways: list[tuple[str, str, dict[str, Any]]] = [("float32", "float32", {})]
    ways += [("tf32", "float32", {"allow_tf32": True})] * run.gpu
    ways += [("bfloat16", "bfloat16", {}), ("float16", "float16", {})]
    ways += [
        ("float8", "float8_e4m3fn", {}),
        ("float8, sums in the tensor cores", "float8_e4m3fn", {"fast_accum": True}),
    ]
    ways += [("float8, q and k rotated", "float8_e4m3fn", {"hadamard": True})]
    for name, dtype, options in ways:
        try:
            cases.append(_case(machine, shape, whole, name, dtype, dict(options)))
        except (FlashAttnError, ImportError, TypeError) as error:
            run.leave_out(name, shape, first_line(error))
    where = [(0, 0), (shape.batch - 1, shape.nheads - 1)][:HEADS]
    rows = np.linspace(0, shape.seqlen - 1, min(ROWS, shape.seqlen)).astype(int)

    @functools.cache
    def exact(b: int, h: int) -> np.ndarray:
        q, k, v = (machine.host(x[b, :, h]) for x in whole)
        return attend(q[rows], k, v, rows, False)

    for case in cases:
        case.answer_of = lambda answer, b, h: machine.host(answer[b, :, h])[rows].astype(np.float64)
    _time(run, shape, inputs, cases, exact, where, shape.flops)


def _case(machine, shape: Shape, whole: list, name: str, dtype: str, options: dict[str, Any]) -> Case:
    hadamard = options.pop("hadamard", False)
    of = replace(shape, dtype=dtype, allow_tf32=bool(options.get("allow_tf32")))
    if dtype == "float8_e4m3fn":
        if machine.framework == "numpy":
            import ml_dtypes  # noqa: F401  (NumPy knows float8_e4m3fn after this)
        pairs = [quantize_fp8(x, hadamard=hadamard and i < 2) for i, x in enumerate(whole)]
        arrays = [x for x, _ in pairs]
        options |= {f"{letter}_descale": factor for letter, (_, factor) in zip("qkv", pairs, strict=True)}
        stand_for = [machine.cast(x, "float32") * factor[:, None, :, None] for x, factor in pairs]
    else:
        arrays = [machine.cast(x, dtype) for x in whole]
        stand_for = arrays
    plan = query(*arrays, **options)
    if plan.status != "FA_OK":
        raise BenchError(plan.error)
    judge = Exact(machine, of, *stand_for)
    return Case(
        name, "attention", plan.kernel, lambda: flash_attn_func(*arrays, **options), lambda *_: np.empty(0),
        lambda answer: judge.judge(answer, "tf32" if of.allow_tf32 else dtype), of.keys() | {"dtype": name},
    )  # fmt: skip


# ---- caches ----


def _cache(run: Run, size: tuple[int, int], inputs: str) -> None:
    """One query of every sequence over its keys."""
    machine, (batch, keys) = run.machine, size
    nheads, nheads_k, headdim = (32, 8, 128) if run.gpu else (8, 4, 64)
    dtype = "float32" if not run.gpu else "bfloat16" if machine.framework == "torch" else "float16"
    outliers = inputs == "outliers"
    q = machine.cast(made(machine, (batch, 1, nheads, headdim), run.seed + 10, outliers), dtype)
    k, v = (made(machine, (batch, keys, nheads_k, headdim), run.seed + i, outliers) for i in (11, 12))
    lengths = machine.int32([keys] * batch)
    shape = f"batch {batch}, {keys} keys, heads {nheads}/{nheads_k}, headdim {headdim}"
    group = nheads // nheads_k
    where = [(0, 0), (batch - 1, nheads - 1)]
    only = np.zeros(1, int)

    @functools.cache
    def exact(b: int, h: int) -> np.ndarray:
        return attend(*(machine.host(x) for x in (q[b, :, h], k[b, :, h // group], v[b, :, h // group])), only, False)

    def case(name: str, arrays: tuple, scales: tuple) -> Case:
        options = {"cache_seqlens": lengths} | dict(zip(("k_scale", "v_scale"), scales, strict=False))
        plan = kvcache_query(q, *arrays, **options)
        if plan.status != "FA_OK":
            raise BenchError(plan.error)

        def judge(answer) -> tuple[float, float]:
            verdicts = []
            for b, h in where:
                given = [machine.host(x[b, :, h // group]) for x in arrays]
                for i, scale in enumerate(scales):
                    factors = machine.host(scale)
                    given[i] = given[i] * (
                        factors[h // group] if factors.ndim == 1 else factors[b, :, h // group, None]
                    )
                one = machine.host(q[b, :, h])
                true, plain = attend(one, *given, only, False), attend(one, *given, only, False, dtype)
                error = float(np.abs(machine.host(answer[b, :, h]) - true).max())
                budget = 2 * float(np.abs(plain - true).max()) + FLOOR * max(1.0, float(np.abs(true).max()))
                verdicts.append((error, budget))
            return worst(verdicts)

        row = {"dtype": name, "seqlen_q": 1, "seqlen_k": keys, "batch": batch, "nheads": nheads, "nheads_k": nheads_k}
        row |= {"headdim": headdim, "bytes": 2 * batch * keys * nheads_k * headdim * _itemsize(name)}
        return Case(
            name, "cache", plan.kernel, lambda: flash_attn_with_kvcache(q, *arrays, **options),
            lambda answer, b, h: machine.host(answer[b, :, h]).astype(np.float64), judge, row,
        )  # fmt: skip

    cases = []
    plain = tuple(machine.cast(x, dtype) for x in (k, v))
    for name, eight, factors in (
        (dtype, "", ""),
        ("float8, a factor for every token", "float8_e4m3fn", "token"),
        ("float8, a factor for every head", "float8_e4m3fn", "head"),
        ("int8, a factor for every token", "int8", "token"),
        ("int8, a factor for every head", "int8", "head"),
    ):
        try:
            if not eight:
                cases.append(case(name, plain, ()))
                continue
            if machine.framework == "numpy" and eight != "int8":
                import ml_dtypes  # noqa: F401
            k8, v8, k_scale, v_scale = quantize_kvcache(*plain, dtype=eight, factors=factors)
            cases.append(case(name, (k8, v8), (k_scale, v_scale)))
        except (FlashAttnError, ImportError, TypeError) as error:
            run.leave_out(name, shape, first_line(error))
    _time(run, shape, inputs, cases, exact, where, 4.0 * batch * nheads * keys * headdim)


def _itemsize(name: str) -> int:
    return DTYPES.get(name, 1)


# ---- the page ----


def table(data: dict, rows: Rows) -> list[str]:
    lines = []
    scale, unit = (1, "TFLOP/s") if "gpu" in data["machine"] else (1e3, "GFLOP/s")
    for group, title in GROUPS.items():
        mine = [row for row in rows if row["group"] == group]
        if not mine:
            continue
        one = mine[0]
        what = f"### {title}: batch {one['batch']}, "
        what += f"{one['seqlen_k']} keys, {one['nheads']}/{one['nheads_k']} heads, headdim {one['headdim']}"
        head = ["dtype", "kernel", "us", unit if group == "attention" else "GB/s of K and V"]
        head += [f"{measure}, {inputs}" for inputs in INPUTS for measure in ("RMS error", "largest")]
        body = []
        for name in dict.fromkeys(row["name"] for row in mine):
            found = {row["inputs"]: row for row in mine if row["name"] == name}
            row = found.get("normal") or next(iter(found.values()))
            rate = row["tflops"] * scale if group == "attention" else row["bytes"] / row["us"] * 1e-3
            cells = [name, row["kernel"], f"{row['us']:.1f}", number(rate)]
            for inputs in INPUTS:
                cells += [f"{found[inputs][x]:.1e}" if inputs in found else "" for x in ("rms", "largest")]
            body.append(cells)
        lines += [what, "", *markdown_table(head, body), ""]
    lines += [
        "Errors are against float64 attention of the inputs before they were rounded, over the RMS of that answer."
    ]
    return lines


def _find(rows: Rows, group: str, name: str, inputs: str) -> dict | None:
    return next((r for r in rows if (r["group"], r["name"], r["inputs"]) == (group, name, inputs)), None)


def findings(data: dict, rows: Rows) -> list[str]:
    found = []
    for group, what in GROUPS.items():
        normal = [row for row in rows if row["group"] == group and row["inputs"] == "normal"]
        if len(normal) > 1:
            fast, slow = min(normal, key=lambda r: r["us"]), max(normal, key=lambda r: r["us"])
            found.append(
                f"{what}: the fastest is {fast['name']}, {slow['us'] / fast['us']:.1f} times as fast as "
                f"{slow['name']}; their RMS errors are {fast['rms']:.1e} and {slow['rms']:.1e}."
            )
        grown = []
        for row in normal:
            other = _find(rows, group, row["name"], "outliers")
            if other and row["rms"] > 0:
                grown.append((other["rms"] / row["rms"], row["name"]))
        if grown:
            texts = [f"{ratio:.2g} ({name})" for ratio, name in sorted(grown)]
            found.append(f"{what}: outliers multiply the RMS error by {', '.join(texts)}.")
    rotated = [_find(rows, "attention", name, "outliers") for name in ("float8", "float8, q and k rotated")]
    if rotated[0] and rotated[1]:
        found.append(
            "Rotating q and k before they are rounded to float8 multiplies the RMS error with outliers by "
            f"{rotated[1]['rms'] / rotated[0]['rms']:.2f}: an outlier is spread over its row."
        )
    for inputs in INPUTS:
        both = [_find(rows, "attention", name, inputs) for name in ("bfloat16", "float16")]
        if both[0] and both[1]:
            found.append(
                f"float16 has three more bits of mantissa than bfloat16: {SAID[inputs]} its RMS error is "
                f"{both[0]['rms'] / both[1]['rms']:.1f} times smaller."
            )
    for kind in ("float8", "int8"):
        shares = []
        for inputs in INPUTS:
            both = [_find(rows, "cache", f"{kind}, a factor for every {of}", inputs) for of in ("head", "token")]
            if both[0] and both[1]:
                shares.append(f"{both[0]['rms'] / both[1]['rms']:.2g} {SAID[inputs]}")
        if shares:
            found.append(
                f"A cache in {kind} with one factor for a head has the RMS error of one with a factor for every token "
                f"times {', '.join(shares)}."
                + (
                    " An integer has the same step everywhere, and one outlier sets it for all."
                    if kind == "int8"
                    else ""
                )
            )
    return found


def picture(data: dict, rows: Rows):
    """RMS error over time, a panel for attention and one for caches. Hollow marks: inputs with outliers."""
    groups = [group for group in GROUPS if any(row["group"] == group for row in rows)]
    figure, axes = figure_of(1, len(groups), max(6.5, 5.6 * len(groups)), 5)
    for axis, group in zip(axes[0], groups, strict=True):
        mine = [row for row in rows if row["group"] == group]
        for name, colour in zip(dict.fromkeys(row["name"] for row in mine), LINES, strict=False):
            points = {row["inputs"]: row for row in mine if row["name"] == name}
            xs, ys = [r["us"] for r in points.values()], [max(r["rms"], 1e-9) for r in points.values()]
            axis.plot(xs, ys, "-", color=colour, linewidth=0.8)
            for inputs, row in points.items():
                face = colour if inputs == "normal" else "white"
                label = name if inputs == next(iter(points)) else None
                axis.plot(
                    row["us"], max(row["rms"], 1e-9), "o", color=colour, markerfacecolor=face, markersize=7, label=label
                )
        axis.set_yscale("log")
        times = [row["us"] for row in mine]
        if max(times) > 10 * min(times):
            axis.set_xscale("log")
            axis.set_xlabel("µs a call, logarithmic")
        else:
            axis.set_xlim(left=0)
            axis.set_xlabel("µs a call")
        axis.set_title(GROUPS[group])
        axis.legend(fontsize=8, loc="best")
    axes[0][0].set_ylabel("RMS error over the RMS of the answer")
    set_title(figure, data, "Error against time, filled: normal inputs, hollow: with outliers")
    return figure


register(
    Experiment(
        name="dtype",
        about="speed and error of float32, tf32, 16-bit, float8, and 8-bit caches, with and without outliers",
        question="What does a narrower type gain, what does it cost in accuracy, and what do outliers do to it?",
        method=f"Inputs are normal numbers; with outliers one entry in {1 / OUTLIERS:.0f} of q, k and v is "
        f"{TIMES:.0f} times as large. Every dtype gets the same numbers, rounded or quantised. Two checks: against "
        "float64 on the rounded inputs with the budget of the precision, which must hold; and against float64 on the "
        "inputs before rounding, which is the error shown. All dtypes run in shuffled turns.",
        run=run,
        table=table,
        findings=findings,
        pictures={"": picture},
    )
)
