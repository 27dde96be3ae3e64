"""Sweeps over one size of the call at a time: the sequence length, the number of heads; and the causal mask."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..bench.figure import LINES, MASKS, figure_of, plain_log
from ..bench.rows import number
from ..bench.systems import Shape
from ..report import table as markdown_table
from ._measure import Candidate, kernel, measure, summary
from ._tiles import BLOCKS_PER_SM, multiprocessors, tile_of
from .experiment import Experiment, Rows, Run, register
from .report import set_title, speed

FULL = 0.9  # a machine counts as full from this share of the best speed on
GPU_KERNELS = ("mma_sm80", "wgmma_sm90")  # measured besides the library's choice


def sweep(run: Run, title: str, shapes: list[Shape], candidates: list[Candidate]) -> None:
    """Measures all candidates on all shapes. Rows of kernels with known tiles get their blocks and waves."""
    sms = multiprocessors(run.machine) if run.gpu else 0
    with run.steps(len(shapes), title):
        for shape in shapes:
            rows = measure(run, shape, candidates)
            for row in rows:
                row |= waves(row["kernel"], shape, sms)
            run.step(f"{shape}: {summary(rows)}")


def waves(name: str, shape: Shape, sms: int) -> dict[str, float]:
    """blocks: tiles of queries in the call. waves: blocks, divided by the number that the GPU runs at a time."""
    tile = tile_of(name, shape.headdim, shape.seqlen, shape.causal)
    if tile is None or not sms:
        return {}
    blocks = math.ceil(shape.seqlen / tile.m) * shape.nheads * shape.batch
    at_once = sms * BLOCKS_PER_SM[name]
    return {"tile_m": tile.m, "sms": sms, "blocks": blocks, "waves": round(blocks / at_once, 3)}


def _dtype(run: Run) -> str:
    return "float32" if not run.gpu else "bfloat16" if run.machine.framework == "torch" else "float16"


def _candidates(run: Run) -> list[Candidate]:
    return [kernel(None), *(kernel(name) for name in GPU_KERNELS if run.gpu)]


# ---- shared by the tables and pictures ----


def lines_of(rows: Rows) -> dict[str, Rows]:
    """The rows of each line of a picture."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(name_of(row), []).append(row)
    return found


def name_of(row: dict) -> str:
    return "the library's choice" if row["name"] == "best" else row["name"]


def _table(axis: str, rows: Rows) -> list[str]:
    gpu = any("waves" in row for row in rows)
    head = [
        axis.replace("_q", ""),
        "asked for",
        "kernel",
        "us",
        "TFLOP/s" if rows[0]["tflops"] > 0.5 or gpu else "GFLOP/s",
    ]
    scale = 1 if head[-1] == "TFLOP/s" else 1e3
    head += ["tiles of queries", "waves"] * gpu
    body = []
    for row in rows:
        cells = [str(row[axis]), name_of(row), row["kernel"], f"{row['us']:.1f}", number(row["tflops"] * scale)]
        if gpu:
            cells += [f"{row['blocks']} x {row['tile_m']}", f"{row['waves']:.2f}"] if "waves" in row else ["", ""]
        body.append(cells)
    return markdown_table(head, body)


def _shape_of(rows: Rows, *, without: str) -> str:
    row = rows[0]
    parts = {
        "seqlen_q": f"seqlen {row['seqlen_q']}",
        "nheads": f"{row['nheads']} heads",
        "headdim": f"headdim {row['headdim']}",
        "batch": f"batch {row['batch']}",
        "dtype": row["dtype"],
    }
    return ", ".join(text for name, text in parts.items() if name != without)


def _curves(data: dict, rows: Rows, axis: str, title: str, xlabel: str, log: bool, mark: Callable | None):
    """Time and speed over one size, side by side."""
    figure, axes = figure_of(1, 2, 10, 4.2)
    left, right = axes[0]
    scale = 1 if max(row["tflops"] for row in rows) > 0.5 else 1e3
    for (name, mine), colour in zip(lines_of(rows).items(), LINES, strict=False):
        mine = sorted(mine, key=lambda row: row[axis])
        xs = [row[axis] for row in mine]
        left.plot(xs, [row["us"] for row in mine], marker="o", markersize=4, color=colour, label=name)
        right.plot(xs, [row["tflops"] * scale for row in mine], marker="o", markersize=4, color=colour, label=name)
        if mark:
            mark(left, mine, colour)
            mark(right, mine, colour)
    for panel in (left, right):
        panel.set_xlabel(xlabel)
        if log:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if log:
        left.set_yscale("log")
        plain_log(left.yaxis)
    else:
        left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.set_ylabel("µs a call")
    right.set_ylabel("TFLOP/s" if scale == 1 else "GFLOP/s")
    set_title(figure, data, title)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


# ---- seqlen ----


def _run_seqlen(run: Run) -> None:
    seqlens = [2**i for i in (range(4, 16) if run.gpu else range(3, 13))]
    if run.quick:
        seqlens = seqlens[:8:3]
    heads, headdim = (16, 128) if run.gpu else (8, 64)
    shapes = [Shape(1, n, heads, heads, headdim, False, _dtype(run)) for n in seqlens]
    sweep(run, "seqlen", shapes, _candidates(run))


def _seqlen_table(data: dict, rows: Rows) -> list[str]:
    return [f"{_shape_of(rows, without='seqlen_q')}, full.", "", *_table("seqlen_q", rows)]


def _seqlen_findings(data: dict, rows: Rows) -> list[str]:
    found = []
    for name, mine in lines_of(rows).items():
        mine = sorted(mine, key=lambda row: row["seqlen_q"])
        floor, best = min(row["us"] for row in mine), max(row["tflops"] for row in mine)
        flat = [row for row in mine if row["us"] <= 2 * floor]
        full = next((row for row in mine if row["tflops"] >= FULL * best), mine[-1])
        text = (
            f"{name}: no call takes less than {floor:.1f} us, and up to seqlen {flat[-1]['seqlen_q']} none takes more "
            "than "
        )
        text += (
            "twice that: there the launch and the way to the first tile dominate, not the work. The machine is full "
        )
        text += f"({FULL:.0%} of the best speed here, {speed(best)}) from seqlen {full['seqlen_q']} on"
        if "waves" in full:
            text += f", with {full['waves']:.1f} waves of blocks on {full['sms']} SMs"
            if one := [row for row in mine if row.get("waves", 2) <= 1]:
                text += f"; up to seqlen {one[-1]['seqlen_q']} all blocks run at once"
        found.append(text + ".")
    if len(mine := sorted(lines_of(rows).popitem()[1], key=lambda row: row["seqlen_q"])) > 1:
        a, b = mine[-2:]
        power = math.log(b["us"] / a["us"]) / math.log(b["seqlen_q"] / a["seqlen_q"])
        found.append(f"Between the two longest sequences the time grows with seqlen to the power of {power:.2f}.")
    return found


def _mark_first_wave(panel, mine: Rows, colour) -> None:
    """Draws a line where the call has exactly one wave of blocks."""
    pairs = [(row["waves"], row["seqlen_q"]) for row in mine if "waves" in row]
    for (w0, n0), (w1, n1) in zip(pairs, pairs[1:], strict=False):
        if w0 <= 1 < w1:
            place = n0 * (n1 / n0) ** (math.log(1 / w0) / math.log(w1 / w0))
            panel.axvline(place, color=colour, linestyle=":", linewidth=1)
            panel.annotate(
                "1 wave", (place, 0.02), xycoords=("data", "axes fraction"), color=colour, fontsize=8, rotation=90
            )


register(
    Experiment(
        name="seqlen",
        about="time and speed over the sequence length: launches, the first wave, the full machine",
        question="From which length on is the machine full, and below which is a call nothing but a launch?",
        method="One sequence with a fixed number of heads, and lengths doubling. A block of threads takes a tile of "
        "queries; a wave is as many blocks as the GPU runs at a time. Times on a GPU are of CUDA graphs where calls "
        "are short, so the host's share is not in them.",
        run=_run_seqlen,
        table=_seqlen_table,
        findings=_seqlen_findings,
        pictures={
            "": lambda data, rows: _curves(
                data, rows, "seqlen_q", "Attention over the sequence length", "sequence length", True, _mark_first_wave
            )
        },
    )
)


# ---- heads ----


def _run_heads(run: Run) -> None:
    if run.gpu:
        heads, shape = [*range(1, 9), *range(10, 50, 2), 56, 64, 96, 128], (1024, 128)
    else:
        heads, shape = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16], (512, 64)
    if run.quick:
        heads = heads[::6] if run.gpu else heads[:4:2]
    seqlen, headdim = shape
    sweep(run, "heads", [Shape(1, seqlen, n, n, headdim, False, _dtype(run)) for n in heads], _candidates(run))


def _heads_table(data: dict, rows: Rows) -> list[str]:
    return [f"{_shape_of(rows, without='nheads')}, full.", "", *_table("nheads", rows)]


def _heads_findings(data: dict, rows: Rows) -> list[str]:
    found = []
    for name, mine in lines_of(rows).items():
        mine = sorted(mine, key=lambda row: row["nheads"])
        first, last = mine[0], mine[-1]
        text = (
            f"{name}: {last['nheads'] // first['nheads']} times the heads take {last['us'] / first['us']:.1f} times as "
            "long"
        )
        waved = [row for row in mine if "waves" in row]
        if waved:
            one = [row for row in waved if row["waves"] <= 1]
            if len(one) > 1:
                text += (
                    f". Up to {one[-1]['nheads']} heads all {one[-1]['blocks']} blocks run at once: "
                    f"{one[-1]['nheads'] / one[0]['nheads']:.0f} times the heads of the first call take "
                    f"{one[-1]['us'] / one[0]['us']:.1f} times as long"
                )
            pairs = [
                (a, b) for a, b in zip(waved, waved[1:], strict=False) if math.ceil(a["waves"]) < math.ceil(b["waves"])
            ]
            if pairs:
                a, b = min(pairs, key=lambda pair: pair[1]["tflops"] / pair[0]["tflops"])
                text += (
                    f". The steepest step is from {a['nheads']} to {b['nheads']} heads, {a['waves']:.2f} to "
                    f"{b['waves']:.2f} waves: {b['us'] / a['us']:.2f} times the time for "
                    f"{b['nheads'] / a['nheads']:.2f} times the work"
                )
        found.append(text + ".")
    if "gpu" not in data["machine"]:
        found.append(
            "A CPU's threads take small tiles of rows as they come, so there are no waves: time follows the work once "
            "every thread has a tile."
        )
    return found


def _mark_waves(panel, mine: Rows, colour) -> None:
    """Draws a line at each whole number of waves, up to eight."""
    waved = [row for row in mine if "waves" in row]
    if not waved:
        return
    per_head = waved[-1]["waves"] / waved[-1]["nheads"]
    for wave in range(1, min(8, math.floor(waved[-1]["waves"])) + 1):
        panel.axvline(wave / per_head, color=colour, linestyle=":", linewidth=0.9)


register(
    Experiment(
        name="heads",
        about="time over the number of heads: stairs, a step for every wave of blocks",
        question="What does one head more cost? As long as some SMs are idle, nothing; one block beyond a full wave, "
        "a whole round.",
        method="One short sequence, and heads one by one. blocks = heads x tiles of queries; waves = blocks / (SMs x "
        "blocks an SM). Dotted lines mark whole waves of the kernel of their colour.",
        run=_run_heads,
        table=_heads_table,
        findings=_heads_findings,
        pictures={
            "": lambda data, rows: _curves(
                data, rows, "nheads", "Attention over the number of heads", "heads", False, _mark_waves
            )
        },
    )
)


# ---- causal ----


def _run_causal(run: Run) -> None:
    seqlens = [2**i for i in (range(6, 15) if run.gpu else range(5, 12))]
    if run.quick:
        seqlens = seqlens[:6:2]
    heads, headdim = (16, 128) if run.gpu else (8, 64)
    shapes = [Shape(1, n, heads, heads, headdim, causal, _dtype(run)) for n in seqlens for causal in (False, True)]
    sweep(run, "causal", shapes, _candidates(run))


def ratios(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """(seqlen, causal time over full time) of each line."""
    found = {}
    for name, mine in lines_of(rows).items():
        times = {(row["seqlen_q"], row["causal"]): row["us"] for row in mine}
        pairs = [(n, times[n, True] / times[n, False]) for n, causal in sorted(times) if causal and (n, False) in times]
        if pairs:
            found[name] = pairs
    return found


def needed(seqlen: int, tile_m: int, tile_n: int) -> float:
    """The share of a full call's tiles that a causal mask does not skip."""
    tiles = [math.ceil(min(first + tile_m, seqlen) / tile_n) for first in range(0, seqlen, tile_m)]
    return sum(tiles) / (len(tiles) * math.ceil(seqlen / tile_n))


def _causal_table(data: dict, rows: Rows) -> list[str]:
    found = ratios(rows)
    seqlens = sorted({n for pairs in found.values() for n, _ in pairs})
    times = {(name_of(r), r["seqlen_q"], r["causal"]): r["us"] for r in rows}
    body = []
    for name, pairs in found.items():
        share = dict(pairs)
        for n in seqlens:
            if n in share:
                full, causal = times[name, n, False], times[name, n, True]
                cells = [name, str(n), f"{full:.1f}", f"{causal:.1f}", f"**{share[n]:.2f}**"]
                body.append([*cells, f"{needed(n, 128, 128):.2f}"])
    head = ["asked for", "seqlen", "us, full", "us, causal", "causal / full", "tiles of 128 x 128 left"]
    return [f"{_shape_of(rows, without='seqlen_q')}.", "", *markdown_table(head, body)]


def _causal_findings(data: dict, rows: Rows) -> list[str]:
    found = []
    for name, pairs in ratios(rows).items():
        (n0, r0), (n1, r1) = pairs[0], pairs[-1]
        text = f"{name}: causal takes {r0:.2f} of the time of full at seqlen {n0} and {r1:.2f} at {n1}"
        below = [n for n, ratio in pairs if ratio <= 0.6]
        text += f"; at most 0.6 first at {below[0]}" if below else "; never 0.6 or less here"
        found.append(text + ".")
    if rows:
        n = max(row["seqlen_q"] for row in rows)
        found.append(
            "The mask hides half of the scores, but work is skipped in whole tiles: of tiles of 128 x 128 a sequence "
            f"of 128 has one, which stays, and one of {n} keeps {needed(n, 128, 128):.3f}. A causal call also has rows "
            "of unequal length, which the scheduling must even out, and a launch that costs the same."
        )
    return found


def _causal_picture(data: dict, rows: Rows):
    found = ratios(rows)
    if not found:
        return None
    figure, axes = figure_of(1, 2, 10, 4.2)
    left, right = axes[0]
    for (name, mine), colour in zip(lines_of(rows).items(), LINES, strict=False):
        for causal, style in ((False, "-"), (True, "--")):
            points = sorted((row["seqlen_q"], row["us"]) for row in mine if row["causal"] == causal)
            if points:
                label = f"{name}, {MASKS[causal]}"
                left.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=colour, label=label)
        if name in found:
            right.plot(*zip(*found[name], strict=True), marker="o", markersize=4, color=colour)
    seqlens = sorted({row["seqlen_q"] for row in rows})
    model = [needed(n, 128, 128) for n in seqlens]
    left.plot([], [], ":", color="#7F7F7F", label="tiles of 128 x 128 that the mask leaves")
    right.plot(seqlens, model, ":", color="#7F7F7F")
    right.axhline(0.5, color="#C0C0C0", linewidth=1)
    right.set_ylim(bottom=0)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.set_xlabel("sequence length")
    left.set_yscale("log")
    plain_log(left.yaxis)
    left.set_ylabel("µs a call")
    right.set_ylabel("time causal / full")
    set_title(figure, data, "What a causal mask saves")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


register(
    Experiment(
        name="causal",
        about="time of a causal call over that of a full one, over the sequence length",
        question="A causal mask hides half of the scores. From which length on does it save half of the time?",
        method="The same calls with and without the mask, in shuffled turns.",
        run=_run_causal,
        table=_causal_table,
        findings=_causal_findings,
        pictures={"": _causal_picture},
    )
)
