"""Bytes that attention moves, in the order of each paper: by formula, counted in NumPy, and counted by the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..bench.check import attend
from ..bench.figure import LINES, figure_of
from ..bench.systems import Shape
from ..report import table as markdown_table
from . import _counted, _ncu, _traffic
from ._calls import call_of
from ._tiles import BLOCKS_PER_SM, multiprocessors, tile_of
from ._traffic import Problem, Tile
from ._variants import DTYPE, Variant, on_gpu
from .experiment import Experiment, Rows, Run, register
from .report import set_title, size

HEADDIM, HEADS = 128, 16
SEQLENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK = (256, 512, 1024)
COUNTED_SEQLENS = (1024, 2048, 4096, 8192, 16384)  # by the GPU
TILE = Tile(128, 128)
SMALL = (8, 16, 32, 64, 128, 256)  # KiB of the small memory, for the second picture
SMALL_SEQLEN = 4096
COUNTED_HEADDIM, COUNTED_TILE = 64, Tile(64, 64)
H200 = {"l2": 50 << 20, "sms": 132}  # assumed by the model if there is no GPU
# The order of the loops in each kernel of the library, which is also the kernel's curve.
ORDER = {"naive": "standard", "minimal": "v2", "mma_sm80": "v2", "wgmma_sm90": "v2"}
CURVES = ("standard", "v1", "v2", "v2 + L2", "once")
MOST_SCORES = 5 << 30  # bytes of S that naive may take under ncu, because ncu keeps a copy


def modelled(p: Problem, tile: Tile, cache: int, blocks: int) -> dict[str, int]:
    """The bytes for each of CURVES."""
    return {
        "standard": _traffic.standard(p),
        "v1": _traffic.v1(p, tile),
        "v2": _traffic.v2(p, tile),
        "v2 + L2": _traffic.v2_cached(p, tile, cache, blocks),
        "once": _traffic.once(p),
    }


def run(run: Run) -> None:
    seqlens = QUICK if run.quick else SEQLENS
    cache = run.machine.l2_bytes if run.gpu else H200["l2"]
    sms = multiprocessors(run.machine) if run.gpu else H200["sms"]
    counted = (64, 128) if run.quick else (128, 256, 512, 1024)
    kernels = dict.fromkeys(ORDER) | _variants(run) if run.gpu else {}
    steps = len(seqlens) + len(SMALL) + 3 * len(counted) + len(kernels)
    with run.steps(steps, "traffic"):
        for seqlen in seqlens:
            p = Problem(seqlen, HEADDIM, heads=HEADS)
            found = modelled(p, TILE, cache, 2 * sms)
            row = {"level": "model", "seqlen": seqlen, "headdim": HEADDIM, "heads": HEADS, "l2": cache, "sms": sms}
            run.add(row | {"tile_m": TILE.m, "tile_n": TILE.n, "bytes": found, "flops": p.flops})
            run.step(f"model, seqlen {seqlen}: " + ", ".join(f"{name} {size(n)}" for name, n in found.items()))
        for kib in SMALL:
            p = Problem(SMALL_SEQLEN, HEADDIM, heads=HEADS)
            tile = _traffic.tile_of(kib * 1024 // p.itemsize, HEADDIM)
            found = {
                "standard": _traffic.standard(p),
                "v1": _traffic.v1(p, tile),
                "v2": _traffic.v2(p, Tile(tile.n, tile.n)),
            }
            row = {"level": "small memory", "kib": kib, "seqlen": SMALL_SEQLEN, "headdim": HEADDIM, "heads": HEADS}
            run.add(row | {"tile_m": tile.m, "tile_n": tile.n, "bytes": found})
            run.step(f"model, {kib} KiB of small memory: v1 {size(found['v1'])}, v2 {size(found['v2'])}")
        for seqlen in counted:
            for order in ("standard", "v1", "v2"):
                run.step(_count(run, order, seqlen))
        if kernels:
            _profile(run, COUNTED_SEQLENS[: 2 if run.quick else None], kernels)


# ---- counted in NumPy ----


def _count(run: Run, order: str, seqlen: int) -> str:
    """Counts the bytes of one head in float32. Checks the answer and the formula. Returns a line of progress."""
    tile, p = COUNTED_TILE, Problem(seqlen, COUNTED_HEADDIM, itemsize=4)
    q, k, v = np.random.default_rng(run.seed).standard_normal((3, seqlen, COUNTED_HEADDIM), dtype=np.float32)
    memory, out, lse = _counted.Memory(), np.full_like(q, np.nan), np.empty(seqlen, np.float32)
    function: Callable[..., None] = getattr(_counted, order)
    function(memory, q, k, v, out, lse, *(() if order == "standard" else (tile,)))
    exact = attend(q, k, v, np.arange(seqlen), False)
    plain = attend(q, k, v, np.arange(seqlen), False, "float32")
    err, budget = float(np.abs(out - exact).max()), 2 * float(np.abs(plain - exact).max()) + 1e-6
    bytes_of = _traffic.standard(p) if order == "standard" else getattr(_traffic, order)(p, tile)
    row: dict[str, Any] = {"level": "counted", "order": order, "seqlen": seqlen, "headdim": COUNTED_HEADDIM, "heads": 1}
    row |= {"tile_m": tile.m, "tile_n": tile.n, "max_err": err, "err_budget": budget}
    row |= {"bytes": {order: memory.moved}, "model_bytes": bytes_of}
    if not err <= budget or memory.moved != bytes_of:
        run.wrong(row)
        return f"{order}, seqlen {seqlen}: WRONG: error {err:.3g}, {memory.moved} bytes for {bytes_of}"
    run.add(row)
    return f"counted, {order}, seqlen {seqlen}: {size(memory.moved)}, as the formula says"


# ---- counted by the GPU ----


def _variants(run: Run) -> dict[str, Variant | None]:
    """The variants of this experiment by name."""
    found = on_gpu(run)
    return {} if found is None else {v.name: v for v in found.of("traffic", HEADDIM)}


def _profile(run: Run, seqlens: tuple[int, ...], kernels: dict[str, Variant | None]) -> None:
    """Runs one profiled process for each kernel. After two failures no more are started."""
    failures = 0
    for kernel, variant in kernels.items():
        order = ORDER.get(kernel) or ("v1" if "v1" in kernel else "v2")
        dtype = DTYPE if variant or run.machine.framework == "torch" else "float16"
        shapes = [Shape(1, seqlen, HEADS, HEADS, HEADDIM, False, dtype) for seqlen in seqlens]
        if order == "standard":
            for shape in shapes:
                if scores_of(shape) > MOST_SCORES:
                    run.leave_out(kernel, shape, f"S takes {size(scores_of(shape))}")
            shapes = [shape for shape in shapes if scores_of(shape) <= MOST_SCORES]
        if failures > 1:
            run.leave_out(kernel, "every seqlen", "not tried after two failures of ncu")
            run.step(f"{kernel}: not tried")
            continue
        calls = [call_of(kernel, shape, variant is not None) for shape in shapes]
        try:
            counted = _ncu.profile(_ncu.TRAFFIC_METRICS, run.machine.framework, calls)
        except _ncu.NcuError as error:
            failures += 1
            run.leave_out(kernel, "every seqlen", error)
            run.step(f"{kernel}: {error}")
            continue
        texts = [
            _counted_by_gpu(run, kernel, variant, order, shape, found)
            for shape, found in zip(shapes, counted, strict=True)
        ]
        run.step(f"{kernel}: HBM {', '.join(texts)}")


def scores_of(shape: Shape) -> int:
    """Bytes of S in float32."""
    return shape.nheads * shape.seqlen**2 * 4


def _counted_by_gpu(
    run: Run, kernel: str, variant: Variant | None, order: str, shape: Shape, kernels: list[dict[str, float]]
) -> str:
    found = _ncu.traffic(kernels)
    if not found:
        run.leave_out(kernel, shape, "it launched nothing, or ncu read nothing")
        return "not counted"
    p = Problem(shape.seqlen, HEADDIM, heads=HEADS)
    row = {"level": "ncu", "kernel": kernel, "order": order, "seqlen": shape.seqlen, "headdim": HEADDIM, "heads": HEADS}
    row |= {"dtype": shape.dtype, "launches": len(kernels), **found}
    tile = Tile(variant.tile_m, variant.tile_n) if variant else tile_of(kernel, HEADDIM, shape.seqlen, False)
    if tile:
        at_once = max(1, variant.blocks_per_sm) if variant else BLOCKS_PER_SM.get(kernel, 2)
        wanted = modelled(p, tile, run.machine.l2_bytes, multiprocessors(run.machine) * at_once)
        row |= {"tile_m": tile.m, "tile_n": tile.n, "model_l2_bytes": wanted[order]}
        if order == "v2":  # how much of v1's sums reaches HBM depends on how much of them L2 keeps
            row["model_dram_bytes"] = wanted["v2 + L2"]
    else:
        row |= {"model_l2_bytes": _traffic.standard(p), "model_dram_bytes": _traffic.standard(p)}
    run.add(row)
    return size(found["dram_bytes"]) if "dram_bytes" in found else "unknown"


# ---- the page ----


def _level(rows: Rows, level: str) -> Rows:
    return [row for row in rows if row["level"] == level]


def table(data: dict, rows: Rows) -> list[str]:
    lines = []
    if model := _level(rows, "model"):
        first = model[0]
        lines += [
            f"By formula: {first['heads']} heads of headdim {first['headdim']}, 16 bits, S, P and the sums of v1 in "
            f"float32, tiles of {first['tile_m']} x {first['tile_n']}, L2 of {first['l2'] / 2**20:.0f} MiB, "
            f"{first['sms']} SMs. `once`: every input read once, every output written once.",
            "",
            *markdown_table(
                ["seqlen", *CURVES, "standard / v2", "v1 / v2"],
                [
                    [str(row["seqlen"]), *(size(row["bytes"][name]) for name in CURVES)]
                    + [f"{row['bytes'][x] / row['bytes']['v2']:.1f}" for x in ("standard", "v1")]
                    for row in model
                ],
            ),
            "",
        ]
    if small := _level(rows, "small memory"):
        lines += [
            f"The size of the small memory at seqlen {small[0]['seqlen']}: algorithm 1's tiles of M / 4d keys; v2 "
            "with as many queries.",
            "",
            *markdown_table(
                ["small memory", "tile of v1", "standard", "v1", "v2"],
                [
                    [f"{row['kib']} KiB", f"{row['tile_m']} x {row['tile_n']}"]
                    + [size(row["bytes"][x]) for x in ("standard", "v1", "v2")]
                    for row in small
                ],
            ),
            "",
        ]
    if counted := _level(rows, "counted"):
        lines += [
            f"Counted in NumPy, one head of headdim {counted[0]['headdim']} in float32, tiles of "
            f"{counted[0]['tile_m']} x {counted[0]['tile_n']}; answers checked against float64.",
            "",
            *markdown_table(
                ["order", "seqlen", "bytes counted", "bytes by formula"],
                [
                    [r["order"], str(r["seqlen"]), f"{r['bytes'][r['order']]:,}", f"{r['model_bytes']:,}"]
                    for r in counted
                ],
            ),
            "",
        ]
    if ncu := _level(rows, "ncu"):
        head = ["kernel", "seqlen", "HBM", "model", "L2", "model", "shared memory (load-store unit)", "us under ncu"]
        lines += [
            f"Counted by the GPU, one call of each kernel, {ncu[0]['heads']} heads of headdim {ncu[0]['headdim']}, "
            f"{ncu[0]['dtype']}.",
            "",
            *markdown_table(
                head,
                [
                    [
                        row["kernel"],
                        str(row["seqlen"]),
                        *(
                            size(row[name]) if name in row else ""
                            for name in ("dram_bytes", "model_dram_bytes", "l2_bytes", "model_l2_bytes",
                                         "shared_bytes_moved")
                        ),
                        f"{row['ncu_us']:.1f}" if "ncu_us" in row else "",
                    ]
                    for row in ncu
                ],
            ),
        ]  # fmt: skip
    return lines


def growth(points: list[tuple[int, float]]) -> float:
    """The power of S with which the bytes grow, from the two longest sequences."""
    (s0, b0), (s1, b1) = sorted(points)[-2:]
    return float(np.log(b1 / b0) / np.log(s1 / s0))


def findings(data: dict, rows: Rows) -> list[str]:
    found = []
    model = _level(rows, "model")
    if len(model) > 1:
        powers = {name: growth([(row["seqlen"], row["bytes"][name]) for row in model]) for name in CURVES}
        found.append(
            "Between the two longest sequences the bytes grow with S to the power of "
            + ", ".join(f"{power:.2f} ({name})" for name, power in powers.items())
            + ". Every order without a cache is quadratic, FlashAttention's too: its gain is the factor. Linear are "
            "the memory that it needs and, while K and V of the heads at work fit, the traffic behind a cache."
        )
        last = model[-1]
        p, tile = Problem(last["seqlen"], last["headdim"], heads=last["heads"]), Tile(last["tile_m"], last["tile_n"])
        ratio = last["bytes"]["standard"] / last["bytes"]["v2"]
        found.append(
            f"At seqlen {last['seqlen']} the three steps move {ratio:.1f} times the bytes of v2 (in the limit "
            f"{_traffic.ratio_at_length(p, tile):.0f} times: four passes of 4 bytes over a score, against K and V of 2 "
            f"bytes shared by {tile.m} rows), and v1 {last['bytes']['v1'] / last['bytes']['v2']:.1f} times, because "
            "its O, in float32, comes and goes with every tile of keys."
        )
        cached = last["bytes"]["v2"] / last["bytes"]["v2 + L2"]
        found.append(f"A cache behind v2 takes {cached:.0f} times fewer bytes from the large memory there.")
        intensity = last["flops"] / last["bytes"]["v2 + L2"]
        found.append(
            f"That makes {intensity:.0f} operations a byte of large memory, and "
            f"{last['flops'] / last['bytes']['v2']:.0f} a byte of what v2's blocks ask for, where the three steps have "
            f"{last['flops'] / last['bytes']['standard']:.0f}."
        )
    small = _level(rows, "small memory")
    if len(small) > 1:
        a, b = small[0], small[-1]
        found.append(
            f"{b['kib'] // a['kib']} times the small memory divides v1's bytes by "
            f"{a['bytes']['v1'] / b['bytes']['v1']:.1f} (theorem 2: S^2 d^2 / M) and v2's by "
            f"{a['bytes']['v2'] / b['bytes']['v2']:.1f}; the three steps' bytes stay. With {a['kib']} KiB v1 moves "
            f"{a['bytes']['v1'] / a['bytes']['standard']:.1f} times what they do, with {b['kib']} KiB "
            f"{b['bytes']['v1'] / b['bytes']['standard']:.2f} times."
        )
    counted = _level(rows, "counted")
    if counted:
        found.append(f"The formulas hold to the byte: {len(counted)} counts in NumPy equal them.")
    ncu = _level(rows, "ncu")
    for kernel in dict.fromkeys(row["kernel"] for row in ncu):
        mine = sorted((row for row in ncu if row["kernel"] == kernel), key=lambda row: row["seqlen"])
        parts = []
        for name, level in (("dram", "HBM"), ("l2", "L2")):
            points = [row for row in mine if f"{name}_bytes" in row]
            if len(points) > 1:
                power = growth([(row["seqlen"], row[f"{name}_bytes"]) for row in points])
                text = f"{level} bytes grow with S to the power of {power:.2f}"
                if wanted := points[-1].get(f"model_{name}_bytes"):
                    text += f" and are {points[-1][f'{name}_bytes'] / wanted:.2f} times the model's at the end"
                parts.append(text)
        if parts:
            found.append(f"`{kernel}` on the GPU, up to seqlen {mine[-1]['seqlen']}: {'; '.join(parts)}.")
    return found


def picture(data: dict, rows: Rows):
    """Left: bytes over seqlen, log-log; lines by formula, marks counted. Right: bytes over the size of the small
    memory."""
    model, small, counted, ncu = (_level(rows, level) for level in ("model", "small memory", "counted", "ncu"))
    figure, axes = figure_of(1, 2, 10.5, 4.8)
    left, right = axes[0]
    colours = dict(zip(CURVES, LINES, strict=False))
    for name in CURVES:
        points = [(row["seqlen"], row["bytes"][name]) for row in model]
        if points:
            style = ":" if name == "once" else "-"
            left.plot(*zip(*points, strict=True), style, color=colours[name], label=f"{name}, by formula")
    if model:  # slopes to compare with
        first, last = model[0], model[-1]
        for power, name in ((2, "standard"), (1, "once")):
            end = last["bytes"][name] * (2.2 if power == 2 else 0.45)
            start = end * (first["seqlen"] / last["seqlen"]) ** power
            left.plot([first["seqlen"], last["seqlen"]], [start, end], "--", color="#9A9A9A", linewidth=1)
            left.annotate(f"S^{power}".replace("S^1", "S"), (last["seqlen"], end), color="#7F7F7F", fontsize=9)
    markers = dict(zip(dict.fromkeys(row["kernel"] for row in ncu), "osD^v", strict=False))
    for kernel, marker in markers.items():
        for name, face in (("dram_bytes", True), ("l2_bytes", False)):
            points = [(row["seqlen"], row[name]) for row in ncu if row["kernel"] == kernel and name in row]
            if points:
                colour = colours[next(row["order"] for row in ncu if row["kernel"] == kernel)]
                left.plot(
                    *zip(*points, strict=True), marker, color=colour, markerfacecolor=colour if face else "white",
                    linestyle="none", markersize=6, label=f"{kernel}, {'HBM' if face else 'L2'}",
                )  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xlabel("sequence length")
    left.set_ylabel("bytes")
    if model:
        left.set_title(f"{model[0]['heads']} heads, headdim {model[0]['headdim']}")
    for name in ("standard", "v1", "v2"):
        points = [(row["kib"], row["bytes"][name]) for row in small]
        if points:
            right.plot(
                *zip(*points, strict=True), marker="o", markersize=4, color=colours[name], label=f"{name}, by formula"
            )
    if small:
        right.set_title(f"seqlen {small[0]['seqlen']}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xlabel("small memory, KiB")
    if counted and not ncu:
        left.plot([], [], " ", label=f"({len(counted)} counts in NumPy equal the formulas)")
    set_title(figure, data, "Bytes moved by attention (less is better)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure


register(
    Experiment(
        name="traffic",
        about="bytes moved by the three steps and by each FlashAttention: formula, NumPy, counters of the GPU",
        question="How many bytes does attention move between large and small memory, in the order of each paper, and "
        "do the kernels move as many?",
        method="The formulas of the papers (FlashAttention, theorem 2; FlashAttention-2) are written out in whole "
        "tiles, in bytes. *standard*: S and P go to memory and come back. *v1*: a tile of keys stays, and queries "
        "come by with their O and its statistics. *v2*: a tile of queries stays with O, and keys come by. *v2 + L2*: "
        "a cache in between serves blocks that run at the same time. NumPy implementations of the first three count "
        "every byte that passes, and "
        "have to agree with the formula and with float64.\n\n"
        "On a GPU Nsight Compute counts the bytes of one call of each kernel, in HBM, in L2, and in wavefronts of "
        "128 bytes of shared memory, between cold caches.",
        run=run,
        table=table,
        findings=findings,
        pictures={"": picture},
        framework=None,
        portable=lambda device: device == "cpu",
    )
)
