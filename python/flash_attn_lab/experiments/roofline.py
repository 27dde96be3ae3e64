"""Every kernel under the roofs of the machine, and its speed per watt."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from flash_attn_minimal import kernels

from ..bench.attention import roofs as measured_roofs
from ..bench.figure import LINES, figure_of, plain_log
from ..bench.rows import number
from ..bench.systems import Shape
from ..report import table as markdown_table
from . import _traffic
from ._measure import kernel, measure, summary
from ._tiles import tile_of
from ._traffic import Problem, Tile
from .experiment import Experiment, Rows, Run, register, roofs
from .report import set_title, size, speed

DEFAULT_TILE = Tile(64, 64)  # for a kernel whose tile is not known, such as those of a CPU


def run(run: Run) -> None:
    gpu = run.gpu
    dtype = "float32" if not gpu else "bfloat16" if run.machine.framework == "torch" else "float16"
    run.protocol = replace(run.protocol, sustained=gpu)
    headdim, heads = (128, 16) if gpu else (64, 8)
    seqlens = ((4096,) if run.quick else (1024, 4096, 16384)) if gpu else ((256,) if run.quick else (512, 2048))
    names = [item["name"] for item in reversed(kernels()) if item["device"] == run.machine.device]
    names = [name for name in names if not name.startswith(("decode_", "fp8_", "mma_tf32"))]
    with run.steps(1 + len(seqlens), "roofline"):
        options = SimpleNamespace(dtype=dtype, quick=run.quick, suite="roofline", allow_tf32=False)
        run.outcome.rows += measured_roofs(options, run.machine, run.protocol, run.meter)
        run.step("the roofs: a product and a copy")
        for seqlen in seqlens:
            shape = Shape(1, seqlen, heads, heads, headdim, False, dtype)
            rows = measure(run, shape, [kernel(name) for name in names if not too_large(name, shape)])
            for name in names:
                if too_large(name, shape):
                    run.leave_out(name, shape, "S in memory would take most of the time of this run")
            for row in rows:
                row |= modelled(row["kernel"], shape)
            run.step(f"{shape}: {summary(rows)}")


def too_large(name: str, shape: Shape) -> bool:
    return name in ("naive", "cpu_naive") and shape.nheads * shape.seqlen**2 * 4 > 8 << 30


def modelled(name: str, shape: Shape) -> dict[str, float]:
    """Bytes of large memory by the model of the kernel's order, and operations per byte."""
    p = Problem(
        shape.seqlen, shape.headdim, shape.causal, 4 if shape.dtype == "float32" else 2, shape.batch * shape.nheads
    )
    if name in ("naive", "cpu_naive"):
        found = _traffic.standard(p)
        asked = found
    else:
        tile = tile_of(name, shape.headdim, shape.seqlen, shape.causal) or DEFAULT_TILE
        found, asked = _traffic.once(p), _traffic.v2(p, tile)
    return {
        "model_bytes": found,
        "asked_bytes": asked,
        "intensity": p.flops / found,
        "asked_intensity": p.flops / asked,
    }


# ---- the page ----


def per_watt(row: dict) -> float | None:
    """TFLOP/s per watt, while the kernel ran for a third of a second; None without a reading of the power."""
    return row["sustained_tflops"] / row["sustained_w"] if row.get("sustained_w") else None


def table(data: dict, rows: Rows) -> list[str]:
    found, gpu = roofs(data), "gpu" in data["machine"]
    scale = 1 if gpu else 1e3
    head = ["kernel", "seqlen", "model bytes", "operations a byte", "TFLOP/s" if gpu else "GFLOP/s", "of the product"]
    head += ["sustained", "W", "MHz", "GFLOP/s a W"] * any("sustained_w" in row for row in rows)
    body = []
    for row in rows:
        share = f"{row['tflops'] / found['linear']['tflops']:.0%}" if "linear" in found else ""
        cells = [row["kernel"], str(row["seqlen_q"]), size(row["model_bytes"]), f"{row['intensity']:.0f}"]
        cells += [number(row["tflops"] * scale), share]
        if "sustained_w" in row:
            watt = per_watt(row)
            cells += [
                number(row["sustained_tflops"] * scale),
                f"{row['sustained_w']:.0f}",
                f"{row['sustained_mhz']:.0f}",
            ]
            cells.append(f"{watt * 1e3:.0f}" if watt else "")
        elif len(head) > 6:
            cells += [""] * 4
        body.append(cells)
    return markdown_table(head, body)


def findings(data: dict, rows: Rows) -> list[str]:
    found, known = [], roofs(data)
    if {"linear", "copy"} <= known.keys():
        ridge = known["linear"]["tflops"] / known["copy"]["tbps"]
        below = sorted({row["kernel"] for row in rows if row["intensity"] < ridge})
        text = f"The roofs meet at {ridge:.0f} operations a byte. "
        if below:
            text += f"With fewer, memory is the limit, whatever the arithmetic: {', '.join(below)}."
        else:
            text += "All kernels have more, so that arithmetic is the limit, if the data come in time."
        found.append(text)
        over = [row for row in rows if row["intensity"] * known["copy"]["tbps"] < row["tflops"]]
        if over:
            names = ", ".join(sorted({row["kernel"] for row in over}))
            found.append(
                f"{names} is faster than its model bytes allow: its scores stay in a cache, and never reach the memory "
                "whose speed the copy measures."
            )
    best = max(rows, key=lambda row: row["tflops"])
    text = f"The fastest is {best['kernel']} at seqlen {best['seqlen_q']}: {speed(best['tflops'])}"
    if "linear" in known:
        text += f", {best['tflops'] / known['linear']['tflops']:.0%} of what a large product reaches"
    found.append(text + ".")
    with_power = [row for row in rows if per_watt(row)]
    if with_power:
        ranked = sorted(with_power, key=lambda row: per_watt(row) or 0)
        low, high = ranked[0], ranked[-1]
        found.append(
            f"A watt buys {per_watt(low) * 1e3:.1f} GFLOP/s with {low['kernel']} and {per_watt(high) * 1e3:.0f} with "
            f"{high['kernel']}. The board takes {min(r['sustained_w'] for r in ranked):.0f} to "
            f"{max(r['sustained_w'] for r in ranked):.0f} W: what a kernel moves costs energy, not only what it "
            "computes."
        )
    return found


def picture(data: dict, rows: Rows):
    """Left: speed over the model's operations per byte, under the measured roofs. Right: speed per watt."""
    known, gpu = roofs(data), "gpu" in data["machine"]
    scale, unit = (1, "TFLOP/s") if gpu else (1e3, "GFLOP/s")
    with_power = [row for row in rows if per_watt(row)]
    figure, axes = figure_of(1, 2 if with_power else 1, 11 if with_power else 7.5, 5)
    left = axes[0][0]
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    colours = dict(zip(names, LINES * 3, strict=False))
    xs = [row["intensity"] for row in rows]
    if {"linear", "copy"} <= known.keys():
        peak, bandwidth = known["linear"]["tflops"], known["copy"]["tbps"]
        xs.append(peak / bandwidth)
        grid = [min(xs) / 3, peak / bandwidth, max(xs) * 3]
        label = f"measured: product {peak * scale:.0f} {unit}, copy {bandwidth * 1e3:.0f} GB/s"
        left.plot(grid, [min(peak, x * bandwidth) * scale for x in grid], color="#333333", label=label)
    for name in names:
        mine = [(row["intensity"], row["tflops"] * scale) for row in rows if row["kernel"] == name]
        left.plot(*zip(*mine, strict=True), "o-", color=colours[name], markersize=6, linewidth=0.8, label=name)
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    left.set_yscale("log")
    plain_log(left.yaxis)
    left.set_xlabel("operations a byte of large memory, by the model")
    left.set_ylabel(unit)
    if with_power:
        right = axes[0][1]
        longest = {row["kernel"]: row for row in sorted(with_power, key=lambda row: row["seqlen_q"])}
        values = [1e3 * (per_watt(row) or 0) for row in longest.values()]
        bars = right.barh(range(len(longest)), values, color=[colours[name] for name in longest])
        texts = [
            f" {number(value)} ({row['sustained_w']:.0f} W)"
            for value, row in zip(values, longest.values(), strict=True)
        ]
        right.bar_label(bars, texts, fontsize=8)
        right.set_yticks(range(len(longest)), list(longest))
        right.set_xlim(0, 1.35 * max(values))
        right.grid(axis="y", visible=False)
        right.set_xlabel("GFLOP/s a watt, longest sequence of each")
    set_title(figure, data, "Kernels under the roofs")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


register(
    Experiment(
        name="roofline",
        about="every kernel by operations a byte and speed, under measured roofs, and by speed a watt",
        question="Which kernels does memory hold back, which the arithmetic units, and what does a kernel get out of "
        "a watt?",
        method="Operations are 4 S^2 d for each head. The bytes are the model's of the experiment `traffic`: S and P "
        "whole for the three steps, every input and output once for the others. The roofs are a large product and a "
        "large copy in the same run. On a GPU every kernel also runs for a third of a second four times, while power "
        "and clock are sampled.",
        run=run,
        table=table,
        findings=findings,
        pictures={"": picture},
    )
)
