"""The size of the tile: speed, registers, shared memory and blocks on an SM for pairs of queries and keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flash_attn_minimal import kernels

from ..bench.check import attend
from ..bench.figure import figure_of
from ..bench.machine import first_line
from ..bench.rows import number
from ..bench.suite import rounded, speed_text
from ..bench.systems import Shape
from ..bench.timing import interleave
from ..report import table as markdown_table
from ._counted import plain_v2
from ._measure import kernel, measure, summary
from ._traffic import Problem, Tile, v2
from ._variants import DTYPE, on_gpu
from .experiment import Experiment, Rows, Run, register
from .report import set_title, size

SIZES = (16, 32, 64, 128, 256)
NUMPY = "NumPy, v2's order"


def run(run: Run) -> None:
    (_gpu if run.gpu else _cpu)(run)


def _gpu(run: Run) -> None:
    variants = on_gpu(run)
    if variants is None:
        return
    found = [variant for variant in variants.of("block-size") if not variant.backward]
    groups = dict.fromkeys((v.kernel, v.headdim) for v in found if not run.quick or v.headdim == 128)
    jobs = [(*group, causal) for group in groups for causal in ((False,) if run.quick else (False, True))]
    with run.steps(len(jobs), "block-size"):
        for name, headdim, causal in jobs:
            mine = [v for v in found if (v.kernel, v.headdim) == (name, headdim)]
            seqlen, heads = (2048 if run.quick else 4096), 2048 // headdim
            shape = Shape(1 if name == "minimal" else 4, seqlen, heads, heads, headdim, causal, DTYPE)
            candidates = [kernel(name), *(variants.candidate(variant) for variant in mine)]
            rows = measure(run, shape, candidates, graphs=False)
            run.step(f"{name}, {shape}: {summary(rows)}")


def _cpu(run: Run) -> None:
    """One head in NumPy, float32, with every pair; and the library's CPU kernel with its own tiles."""
    seqlen, headdim = (512 if run.quick else 2048), 64
    sizes = SIZES[::2] if run.quick else SIZES
    shape = Shape(1, seqlen, 1, 1, headdim, False, "float32")
    xp = np.random.default_rng(run.seed)
    q, k, v = xp.standard_normal((3, seqlen, headdim), dtype=np.float32)
    rows = np.arange(0, seqlen, max(1, seqlen // 64))
    exact = attend(q[rows], k, v, rows, False)
    budget = 2 * float(np.abs(attend(q[rows], k, v, rows, False, "float32") - exact).max()) + 1e-6
    pairs = [Tile(m, n) for m in sizes for n in sizes]
    caches = cpu_caches()
    with run.steps(len(pairs) + 1, "block-size"):
        for tile in pairs:
            err = float(np.abs(plain_v2(q, k, v, tile)[rows] - exact).max())
            row = {"name": NUMPY, "tile_m": tile.m, "tile_n": tile.n, "max_err": err, "err_budget": budget}
            row |= {"pass": "fwd"} | shape.keys() | {"cache_bytes": footprint(tile, headdim), **caches}
            row |= {"model_bytes": v2(Problem(seqlen, headdim, itemsize=4), tile)}
            if not err <= budget:
                run.wrong(row)
                run.step(f"{tile.m} x {tile.n}: WRONG: error {err:.3g}, budget {budget:.3g}")
                continue
            [timing] = interleave(
                run.machine, [lambda i, tile=tile: plain_v2(q, k, v, tile)], run.protocol, run.meter, seed=run.seed
            )
            row |= timing.row(shape.flops / 1e12)
            run.outcome.rows.append(rounded(row))
            run.step(f"NumPy, {tile.m} x {tile.n}: {row['us']:.0f} us, {speed_text(row['tflops'])}")
        best = next(item["name"] for item in kernels() if item["device"] == "cpu")
        try:
            rows_of_kernel = measure(run, shape, [kernel(best)])
        except Exception as error:  # this build may not take the framework's arrays
            run.leave_out(best, shape, first_line(error))
            rows_of_kernel = []
        run.step(summary(rows_of_kernel))


def footprint(tile: Tile, headdim: int) -> int:
    """The float32 bytes of Q, O, K, V and S that a step of the loop touches."""
    return 4 * (2 * tile.m * headdim + 2 * tile.n * headdim + tile.m * tile.n)


def cpu_caches() -> dict[str, int]:
    """l1d_bytes and l2_bytes of the first core, as far as Linux reports them."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, text = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            count = int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
        except (OSError, ValueError):
            continue
        if kind in ("Data", "Unified") and level in ("1", "2"):
            found[f"l{level}{'d' if level == '1' else ''}_bytes"] = count
    return found


# ---- the page ----


def group(row: dict) -> str:
    name = row.get("variant_of", row["name"])
    return name if name == NUMPY else f"{name}, headdim {row['headdim']}" + (", causal" if row["causal"] else "")


def _tiled(rows: Rows) -> Rows:
    return [row for row in rows if "tile_m" in row]


def table(data: dict, rows: Rows) -> list[str]:
    lines = []
    gpu = "gpu" in data["machine"]
    for name in dict.fromkeys(group(row) for row in rows):
        mine = [row for row in rows if group(row) == name and "tile_m" in row]
        library = [row for row in rows if group(row) == name and "tile_m" not in row]
        lines += [f"### {name}", ""]
        if library:
            us = library[0]["us"]
            lines += [f"`{library[0]['kernel']}` of the library, with its own tiles: {us:.1f} us.", ""]
        if not mine:
            continue
        if gpu:
            head = ["queries x keys", "stages", "threads", "us", "TFLOP/s", "registers", "spilled", "shared memory",
                    "blocks an SM"]  # fmt: skip
            body = [
                [f"{r['tile_m']} x {r['tile_n']}", str(r["stages"]), str(r["threads"]), f"{r['us']:.1f}"]
                + [f"{r['tflops']:.1f}", str(r["registers"]), size(r["spill_bytes"]) if r["spill_bytes"] else ""]
                + [size(r["shared_bytes"]), str(r["blocks_per_sm"])]
                for r in mine
            ]
        else:
            head = ["queries x keys", "us", "GFLOP/s", "bytes of a step", "bytes by v2's formula"]
            body = [
                [f"{r['tile_m']} x {r['tile_n']}", f"{r['us']:.0f}", f"{r['tflops'] * 1e3:.1f}"]
                + [size(r["cache_bytes"]), size(r["model_bytes"])]
                for r in mine
            ]
        lines += [*markdown_table(head, body), ""]
    return lines


def findings(data: dict, rows: Rows) -> list[str]:
    found = []
    for name in dict.fromkeys(group(row) for row in _tiled(rows)):
        mine = sorted((row for row in _tiled(rows) if group(row) == name), key=lambda row: row["us"])
        best, worst = mine[0], mine[-1]
        text = (
            f"{name}: the fastest tile is {best['tile_m']} x {best['tile_n']} ({best['us']:.1f} us), the slowest "
            f"{worst['tile_m']} x {worst['tile_n']} takes {worst['us'] / best['us']:.1f} times as long"
        )
        if library := [row for row in rows if group(row) == name and "tile_m" not in row]:
            text += f"; the library's own kernel takes {library[0]['us'] / best['us']:.2f} times the best tile's time"
        if spilled := [row for row in mine if row.get("spill_bytes")]:
            text += (
                f"; {len(spilled)} of {len(mine)} tiles spill registers, the best of them at "
                f"{spilled[0]['us'] / best['us']:.2f} of the best time"
            )
        if best.get("blocks_per_sm"):
            text += f"; the fastest has {best['registers']} registers a thread and {best['blocks_per_sm']} blocks an SM"
        if best.get("l2_bytes") and best.get("cache_bytes"):
            text += (
                f"; a step of it touches {size(best['cache_bytes'])}, of a level-2 cache of {size(best['l2_bytes'])}"
            )
        found.append(text + ".")
    if found and "gpu" not in data["machine"]:
        small = min(_tiled(rows), key=lambda row: row["tile_m"] * row["tile_n"])
        found.append(
            "In NumPy small tiles are slow for another reason than memory: every tile costs a few calls of Python, "
            f"and {small['tile_m']} x {small['tile_n']} makes "
            f"{small['seqlen_q'] * small['seqlen_k'] // (small['tile_m'] * small['tile_n'])} tiles."
        )
    return found


def picture(data: dict, rows: Rows):
    """A heat map for each kernel, headdim and mask: speed over the two sizes; the best, if there are several
    variants."""
    rows = _tiled(rows)
    if not rows:
        return None
    groups = list(dict.fromkeys(group(row) for row in rows))
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure, axes = figure_of(lines, columns, max(5.5, 4.2 * columns), 1.2 + 3.4 * lines)
    gpu = "gpu" in data["machine"]
    for axis, name in zip(axes.flat, groups, strict=False):
        mine = [row for row in rows if group(row) == name]
        ms, ns = (sorted({row[x] for row in mine}) for x in ("tile_m", "tile_n"))
        grid = np.full((len(ms), len(ns)), np.nan)
        for row in mine:
            at = ms.index(row["tile_m"]), ns.index(row["tile_n"])
            grid[at] = np.nanmax([grid[at], row["tflops"] * (1 if gpu else 1e3)])
        axis.imshow(grid, origin="lower", cmap="viridis", vmin=0, aspect="auto")
        top = np.nanmax(grid)
        for (i, j), value in np.ndenumerate(grid):
            if np.isfinite(value):
                colour = "black" if value > 0.6 * top else "white"
                axis.text(j, i, number(value), ha="center", va="center", color=colour, fontsize=8)
        axis.set_xticks(range(len(ns)), ns)
        axis.set_yticks(range(len(ms)), ms)
        axis.set_xlabel("keys of a tile")
        axis.set_ylabel("queries of a tile")
        axis.set_title(name)
        axis.grid(visible=False)
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    set_title(figure, data, f"Tile sizes, {'TFLOP/s' if gpu else 'GFLOP/s'} (more is better)")
    return figure


register(
    Experiment(
        name="block-size",
        about="tiles of 16 to 256 queries and keys: speed, registers, shared memory, blocks on an SM",
        question="How large should a tile of queries and of keys be, and what stops it from being larger?",
        method="Large tiles read K and V less often: v2 moves S^2 d / tile_m numbers of each. They need registers and "
        "shared memory, of which an SM has 64 Ki and 228 KB. On a GPU the library of variants holds each kernel with "
        "many tiles (heads x headdim = 2048); a pair that spills, or leaves one block on an SM, is measured as well. "
        "On a CPU NumPy runs v2's order on one head of 64 with every pair, and the library's kernel runs beside it "
        "with its own tiles.",
        run=run,
        table=table,
        findings=findings,
        pictures={"": picture},
    )
)
