"""The figures of docs/learn: python -m ladder.figures [--folder FOLDER] [--png]

Needs NumPy and matplotlib. The same release of matplotlib writes the same bytes; each file names the release."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from .rung import ROOT

FOLDER = ROOT / "docs/learn/figures"


def _pictures():
    """The style and the helpers of docs/context_parallel/pictures.py."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/context_parallel/pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


P = _pictures()
canvas, box, write = P.canvas, P.box, P.write
BLUE, ORANGE, GREEN, PINK = P.RANKS
INK, FAINT, GREY, DARK = P.INK, P.FAINT, P.WORK, P.SUM
PALE = "#F2F2F2"


def rows_of(name: str) -> list[dict]:
    return json.loads((ROOT / f"docs/benchmarks/h200/{name}.json").read_text())["rows"]


def arrow(axes, begin, end, colour=INK, style="-|>"):
    more = {"arrowstyle": style, "color": colour, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=more)


def plot(width: float, height: float, left=0.09, bottom=0.16, right=0.98, top=0.93):
    """A figure with one pair of axes with two spines."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


# ---- the path ----


def path() -> Figure:
    """The rungs in the order in which the chapters add them, and how fast each is; CPU and GPU have two shapes."""
    sources = ("amd-epyc/languages", "h200/languages")
    measured = [json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text())["rows"] for name in sources]

    def speed(rows, system, seqlen):
        fixed = {"system": system, "pass": "fwd", "headdim": 128, "seqlen_q": seqlen, "causal": False}
        (row,) = (row for row in rows if all(row[key] == value for key, value in fixed.items())
                  and row["dtype"] == ("float32" if rows is measured[0] else "bfloat16"))  # fmt: skip
        return row["tflops"]

    figure, axes = plot(9, 4.6, left=0.25, bottom=0.12, top=0.96)
    steps = [(chapter, name, measured[0], 1024, BLUE) for chapter, name in PATH_CPU]
    steps += [(chapter, name, measured[1], 1024 if name == "naive" else 4096, GREEN) for chapter, name in PATH_GPU]
    from .rungs import rung

    for n, (_, name, rows, seqlen, colour) in enumerate(steps):
        tflops = speed(rows, name, seqlen)
        axes.barh(n, tflops, left=0, height=0.72, color=colour)
        shown = f"{tflops * 1000:.3g} GFLOP/s" if tflops < 1 else f"{tflops:.3g} TFLOP/s"
        inside = tflops > 1
        axes.text(tflops * (0.85 if inside else 1.2), n, f"{shown}: {rung(name).about}", va="center", fontsize=8.5,
                  ha="right" if inside else "left", color="white" if inside else INK)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(1e-3, 1000)
    axes.set_ylim(len(steps) - 0.4, -0.6)
    axes.set_yticks(range(len(steps)), [f"chapter {chapter}   {name}" for chapter, name, *_ in steps], fontsize=9)
    axes.axvline(989, color=ORANGE, linewidth=1.4)
    for n, note in enumerate(("blue: two CPU cores, float32", "green: one H200, bf16", "orange: its peak")):
        axes.text(850, n, note, ha="right", va="center", fontsize=8.5, color=DARK)
    axes.set_xlabel("TFLOP/s of the forward pass, head dim 128, full mask")
    return figure


PATH_CPU = (("1", "c_naive"), ("2", "numpy_v1"), ("3", "numpy_v2"), ("3", "c_vectors"), ("3", "c_tiles"),
            ("4", "c_register_tiles"), ("4", "c_threads"))  # fmt: skip
PATH_GPU = (("4", "naive"), ("4", "minimal"), ("5", "mma_sm80"), ("6", "triton"), ("6", "gluon_sm90"),
            ("6", "cute_sm90"), ("6", "wgmma_sm90"))  # fmt: skip

# ---- 1 ----


def formula() -> Figure:
    """The matrices of one head to scale: 2048 x 128 beside 2048 x 2048."""
    figure, axes = canvas(8.2, 3.6, (-2, 54.5), (-3, 21.5))
    n, d = 18.0, 18 / 16
    place = 0.0

    def matrix(name, rows, columns, colour, note):
        nonlocal place
        box(axes, place, (n - rows) / 2, columns, rows, colour)
        write(axes, place + columns / 2, (n - rows) / 2 - 0.9, name, weight="bold")
        write(axes, place + columns / 2, (n + rows) / 2 + 1.0, note, fontsize=8, color=DARK)
        place += columns

    def sign(text):
        nonlocal place
        write(axes, place + 1.3, n / 2, text, fontsize=12)
        place += 2.6

    matrix("Q", n, d, BLUE, "0.5 MB")
    sign("·")
    matrix("Kᵀ", d, n, ORANGE, "0.5 MB")
    sign("=")
    matrix("S, then P", n, n, GREY, "16 MB in float32, for every head")
    write(axes, place - n / 2, n / 2, "2048 queries × 2048 keys\nP = softmax of each row", fontsize=9)
    sign("·")
    matrix("V", n, d, GREEN, "0.5 MB")
    sign("=")
    matrix("O", n, d, PINK, "0.5 MB")
    return figure


# ---- 2 ----


def online() -> Figure:
    """One row of 32 scores in four tiles: the running maximum, and the running sum relative to it."""
    rng = np.random.default_rng(12)
    scores = np.clip(rng.standard_normal(32), -2, 1) + np.repeat([0.0, 1.2, 0.4, 2.2], 8)
    figure = Figure(figsize=(9, 4.2))
    top, low = figure.add_axes((0.08, 0.5, 0.9, 0.43)), figure.add_axes((0.08, 0.12, 0.9, 0.28))
    row_max, row_sum, x, ys = -np.inf, 0.0, [], []
    for tile in range(4):
        new = scores[8 * tile : 8 * tile + 8]
        raised = max(row_max, new.max())
        row_sum *= np.exp(row_max - raised)
        x.append(8 * tile - 0.5), ys.append(row_sum)
        row_sum += np.exp(new - raised).sum()
        row_max = raised
        x.append(8 * tile + 7.5), ys.append(row_sum)
        top.plot((8 * tile - 0.5, 8 * tile + 7.5), (row_max, row_max), color=ORANGE, linewidth=2)
        if tile:
            factor = ys[-2] / ys[-3]
            text = f"× {factor:.2f}" if factor < 0.995 else "× 1: the maximum stays"
            low.text(8 * tile - 0.2, 9, text, fontsize=9, color=DARK)
    top.plot(np.arange(32), scores, "o", color=BLUE, markersize=4)
    low.plot(x, ys, color=GREEN, linewidth=2)
    for axes, name in ((top, "score"), (low, "row_sum")):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(-1, 32)
        axes.set_ylabel(name)
        for edge in (7.5, 15.5, 23.5):
            axes.axvline(edge, color=FAINT, linewidth=0.8, linestyle=(0, (3, 2)))
    top.set_xticks([])
    low.set_xticks([3.5, 11.5, 19.5, 27.5], [f"tile {i}" for i in range(4)])
    low.set_ylim(0, 10.5)
    write(top, 31.5, row_max + 0.45, "row_max so far", color="#B36F00", ha="right", fontsize=9)
    return figure


# ---- 3 ----


def order() -> Figure:
    """The tiles of S in the order of the two loops, and what each order reads and writes repeatedly."""
    figure, axes = canvas(9, 3.7, (-3, 57), (-4.5, 20))
    for left, name, key_outside, lines in (
        (0, "v1: keys outside, queries inside", True, "read and written for every tile:\nO, row_max, row_sum"),
        (30, "v2: queries outside, keys inside", False, "read for every tile: K, V\nO is written once, at the end"),
    ):
        write(axes, left, -3.4, name, ha="left", weight="bold")
        write(axes, left + 8, -1.2, "tiles of keys", fontsize=9, color=DARK)
        write(axes, left - 1.2, 8, "tiles of queries", fontsize=9, color=DARK, rotation=90)
        for i in range(4):
            for j in range(4):
                n = 4 * j + i if key_outside else 4 * i + j
                box(axes, left + 4 * j, 4 * i, 4, 4, matplotlib.colors.to_hex((0.45 + 0.035 * (15 - n),) * 3))
                write(axes, left + 4 * j + 2, 4 * i + 2, str(n + 1), color="white" if n > 9 else INK)
        write(axes, left, 18.2, lines, ha="left", fontsize=9)
        if key_outside:
            arrow(axes, (left + 17, 0.5), (left + 17, 15.5), BLUE)
            write(axes, left + 17.7, 8, "inner loop", rotation=90, fontsize=9, color=BLUE)
        else:
            arrow(axes, (left + 17, 0.5), (left + 17, 15.5), GREEN)
            write(axes, left + 17.7, 8, "one block of threads each, in parallel", rotation=90, fontsize=9, color=GREEN)
    return figure


# ---- 4 ----


def memory() -> Figure:
    """The memory levels of an H200, with size and bandwidth."""
    figure, axes = canvas(9, 3.9, (0, 60), (-1, 24))
    levels = (
        ("registers", "256 KB on each of 132 SMs: 33 MB", "S, P, O of the rows at hand", 14, BLUE, "white"),
        ("shared memory", "228 KB on each SM: 30 MB, 128 bytes a clock each", "tiles of Q, K, V", 24, GREEN, "white"),
        ("L2 cache", "50 MB for all SMs", "K and V, read by many blocks", 34, ORANGE, "black"),
        ("HBM", "141 GB, 4.8 TB/s", "Q, K, V, O; never S", 44, PINK, "black"),
    )
    for n, (name, size, holds, width, colour, ink) in enumerate(levels):
        y = 6 * n
        box(axes, 23 - width / 2, y, width, 4, colour)
        write(axes, 23, y + 2, name, color=ink, weight="bold")
        write(axes, 47, y + 1.2, size, ha="left", fontsize=8.5)
        write(axes, 47, y + 3.0, holds, ha="left", fontsize=8.5, color=DARK)
        if n:
            arrow(axes, (23, y - 0.2), (23, y - 1.8))
    figure.set_size_inches(10.6, 3.9)
    axes.set_xlim(0, 70)
    return figure


def roofline() -> Figure:
    """TFLOP/s over FLOP per byte that must move, log-log, with the measured points."""
    figure, axes = plot(9, 4.6, left=0.08, bottom=0.13)
    x = np.array([0.5, 989 / 4.8, 2e4])
    axes.loglog(x, np.minimum(4.8 * x, 989), color=INK, linewidth=1.6)
    axes.text(600, 1060, "tensor cores, bf16: 989 TFLOP/s", fontsize=9)
    axes.text(1.6, 10.5, "HBM: 4.8 TB/s", rotation=37, fontsize=9)
    axes.loglog((67 / 4.8, 2e4), (67, 67), color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(30, 72, "float32 without tensor cores: 67 TFLOP/s", fontsize=9, color=DARK)

    def point(row, name, colour, dx=1.15, dy=1.0, ha="left"):
        pairs = row["batch"] * row["nheads"] * row["seqlen_q"] * row["seqlen_k"]
        work = 4 * pairs * row["headdim"]
        rows = row["seqlen_q"] * row["nheads"] + row["seqlen_k"] * row["nheads_k"]
        tflops, intensity = work / row["us"] * 1e-6, work / (4 * row["batch"] * row["headdim"] * rows)
        axes.loglog(intensity, tflops, "o", color=colour, markersize=6)
        axes.text(intensity * dx, tflops * dy, name, fontsize=9, ha=ha, va="center")

    for row in rows_of("ladder"):
        if row["system"] == "ours":
            point(row, row["kernel"], BLUE, dx=1.2)
    for row in rows_of("decode"):
        if row["system"] == "ours" and row["page_size"] == 0 and row["cache_dtype"] == "bfloat16":
            if (row["batch"], row["seqlen_k"], row["nheads"]) in ((1, 1024, 32), (64, 8192, 32)):
                point(row, f"decode, batch {row['batch']}, {row['seqlen_k']} keys", ORANGE, dx=1.25, dy=0.9)
    axes.set_xlim(0.5, 2e4)
    axes.set_ylim(0.7, 2500)
    axes.set_xlabel("FLOP for each byte of q, k, v, out")
    axes.set_ylabel("TFLOP/s")
    return figure


# ---- 5 ----


def fragments() -> Figure:
    """The values that each lane holds: two accumulator tiles of S are one A fragment of P V."""
    figure, axes = canvas(9.4, 5.0, (-3, 56), (-4.5, 27))
    colours = (BLUE, ORANGE, GREEN, PINK)
    inks = ("white", "black", "white", "black")

    def tile(left, columns, names):
        for row in range(16):
            for pair in range(columns // 2):
                lane, register = row % 8 * 4 + pair % 4, names[row // 8 + 2 * (pair // 4)]
                box(axes, left + 2.6 * pair, 1.5 * row, 2.6, 1.5, colours[pair % 4])
                at = left + 2.6 * pair + 1.3, 1.5 * row + 0.75
                write(axes, *at, f"{lane}:{register}", fontsize=7, color=inks[pair % 4])

    write(axes, 0, -3.4, "S: two accumulator tiles of 16 × 8", ha="left", weight="bold")
    tile(0, 8, ("c01", "c23"))
    tile(11.6, 8, ("c01'", "c23'"))
    for x, text in ((5.2, "keys 0 .. 7"), (16.8, "keys 8 .. 15"), (40.4, "keys 0 .. 15")):
        write(axes, x, -1.1, text, fontsize=9, color=DARK)
    write(axes, 26, 11, "pack", fontsize=9)
    arrow(axes, (24, 12), (28.4, 12))
    write(axes, 30, -3.4, "P: the A operand, 16 × 16", ha="left", weight="bold")
    tile(30, 16, ("a0", "a1", "a2", "a3"))
    write(axes, -1.3, 12, "16 queries of a warp", rotation=90, fontsize=9, color=DARK)
    text = (
        "lane:registers; a cell is two neighbouring values, c01 is c0 and c1. A row lies in four lanes, one a colour."
    )
    write(axes, 0, 25.7, text, ha="left", fontsize=9)
    return figure


def swizzle() -> Figure:
    """The places of the 16-byte pieces of eight rows, plain and swizzled; piece 2 of every row is marked."""
    figure, axes = canvas(9, 3.5, (-4, 52), (-4, 18.5))
    for left, name, flips in ((0, "plain", False), (28, "swizzled: piece ^ row % 8", True)):
        write(axes, left, -3.0, name, ha="left", weight="bold")
        for row in range(8):
            for place in range(8):
                piece = place ^ row if flips else place
                box(axes, left + 2.6 * place, 2 * row, 2.6, 2, ORANGE if piece == 2 else GREY)
                write(axes, left + 2.6 * place + 1.3, 2 * row + 1, str(piece), fontsize=9)
            write(axes, left - 1.6, 2 * row + 1, f"row {row}", fontsize=8.5, color=DARK)
        for place in range(8):
            write(axes, left + 2.6 * place + 1.3, -0.8, f"{4 * place}", fontsize=8, color=DARK)
        text = (
            "piece 2 of eight rows: all banks, one read" if flips else "piece 2 of eight rows: four banks, eight reads"
        )
        write(axes, left, 17.3, text, ha="left", fontsize=9)
    write(axes, -1.6, -0.8, "bank", fontsize=8, color=DARK)
    return figure


# ---- 6 ----


def pingpong() -> Figure:
    """The roles of a block over time: copies, and two consumer warpgroups that take turns."""
    figure, axes = canvas(9.4, 3.9, (-13, 45), (-1, 14.5))
    lanes = (("producer", "TMA"), ("warpgroup 1", "tensor cores"), ("", "softmax"), ("warpgroup 2", "tensor cores"),
             ("", "softmax"))  # fmt: skip
    y_of = (0, 3.0, 5.0, 8.4, 10.4)
    for (who, what), y in zip(lanes, y_of, strict=True):
        write(axes, -13, y + 0.9, who, ha="left", weight="bold", fontsize=9)
        write(axes, -0.5, y + 0.9, what, ha="right", fontsize=9, color=DARK)
        axes.plot((0, 45), (y + 1.85,) * 2, color=PALE, linewidth=0.8)
    copies = (("K 0", 0), ("K 1", 3), ("V 0", 6), ("V 1", 9), ("K 2", 12), ("K 3", 24), ("V 2", 27), ("K 4", 36),
              ("V 3", 39))  # fmt: skip
    for name, x in copies:
        box(axes, x, 0, 2.9, 1.8, GREY)
        write(axes, x + 1.5, 0.9, name, fontsize=8)
    for colour, ink, y, begin in ((BLUE, "white", 3.0, 3.0), (ORANGE, "black", 8.4, 9.0)):
        for n in range(3):
            x = begin + 12 * n
            box(axes, x, y, 2.9, 1.8, colour), write(axes, x + 1.5, y + 0.9, f"QK {n}", fontsize=8, color=ink)
            if n:
                (
                    box(axes, x + 3, y, 2.9, 1.8, colour),
                    write(axes, x + 4.5, y + 0.9, f"PV {n - 1}", fontsize=8, color=ink),
                )
            box(axes, x + 3, y + 2, 8, 1.8, colour), write(axes, x + 7, y + 2.9, f"softmax {n}", fontsize=8, color=ink)
    for x in (9, 15, 21, 27, 33):
        axes.plot((x, x), (2.6, 12.6), color=FAINT, linewidth=0.8, linestyle=(0, (3, 2)))
    text = "Two stages: K 2 takes the place of K 0 once both warpgroups have read it. Dashed: the turn passes on."
    write(axes, 0, 13.6, text, ha="left", fontsize=9)
    return figure


# ---- 7 ----


def fp8() -> Figure:
    """The e4m3 numbers on a logarithmic axis, and the ranges of them that the probabilities use."""
    figure, axes = canvas(9, 2.7, (-11.5, 10.2), (-1.3, 6.0))
    bits = np.arange(1, 127)
    numbers = np.where(bits // 8 == 0, bits % 8 * 2.0**-9, (1 + bits % 8 / 8) * 2.0 ** (bits // 8 - 7))
    for number in numbers:
        axes.plot((np.log2(number),) * 2, (0, 1), color=BLUE if number >= 2**-6 else ORANGE, linewidth=0.8)
    for power in range(-9, 10, 3):
        write(axes, power, 1.55, f"$2^{{{power}}}$", fontsize=9)
    write(axes, -11.3, 0.5, "e4m3", ha="left", weight="bold")
    write(axes, np.log2(448), -0.6, "448", fontsize=9)
    write(axes, -7.5, -0.6, "below 2⁻⁶ equal steps", fontsize=9, color="#B36F00")
    for y, begin, end, colour, text in (
        (2.5, -10, 6, GREEN, "P where the maximum stands 2⁶ below the largest score"),
        (3.7, 6, 8.75, PINK, "and as far a row may rise before O is rescaled"),
        (4.9, -10, 0, GREY, "P under the plain maximum"),
    ):
        box(axes, begin, y, end - begin, 0.8, colour)
        x, side = (begin - 0.2, "right") if begin > 0 else (begin + 0.2, "left")
        write(axes, x, y + 0.4, text, ha=side, fontsize=9, color="white" if colour == GREEN else INK)
    write(axes, 0.3, 5.3, "1 to 448 unused, and less than 2⁻¹⁰ lost", ha="left", fontsize=9, color=DARK)
    return figure


# ---- 8 ----


def backward() -> Figure:
    """The five products of a tile, and the direction in which each sum runs."""
    figure, axes = canvas(9.2, 4.2, (-4, 60), (-4, 22))
    write(axes, 0, -3, "a block owns a tile of keys", ha="left", weight="bold")
    for i in range(4):
        for j in range(4):
            box(axes, 4 * j, 4 * i, 4, 4, BLUE if j == 1 else PALE)
    write(axes, 8, -1, "keys", color=DARK, fontsize=9)
    write(axes, -1.2, 8, "queries", color=DARK, fontsize=9, rotation=90)
    arrow(axes, (6, 0.8), (6, 15.2), "white")
    arrow(axes, (6, 16.2), (6, 18.3), BLUE)
    write(axes, 6, 19.3, "dK, dV: sums of the\nblock's own, in registers", fontsize=9, va="top")
    for i in range(4):
        arrow(axes, (8.2, 4 * i + 2), (18, 4 * i + 2), ORANGE)
    write(axes, 18.6, 8, "dQ: a sum over all blocks,\nadded in memory", ha="left", fontsize=9)
    write(axes, 36, -3, "one tile, five products", ha="left", weight="bold")
    steps = (("S = Q Kᵀ", "again", GREY), ("P = exp(S − lse)", "", PALE), ("dP = dO Vᵀ", "", GREY),
             ("dS = P (dP − delta)", "", PALE), ("dV += Pᵀ dO", "", BLUE), ("dK += dSᵀ Q", "", BLUE),
             ("dQ += dS K", "", ORANGE))  # fmt: skip
    for n, (text, note, colour) in enumerate(steps):
        box(axes, 36, 2.9 * n, 17, 2.4, colour)
        write(axes, 44.5, 2.9 * n + 1.25, text, color="white" if colour == BLUE else INK)
        write(axes, 54, 2.9 * n + 1.25, note, ha="left", fontsize=9, color=DARK)
    return figure


# ---- 9 ----


def split() -> Figure:
    """One query over a long cache: one block for each key head, and the keys cut into pieces for all blocks."""
    figure, axes = canvas(9.2, 3.9, (-9.5, 50), (-3, 22.5))
    for top, name, pieces, note in (
        (0, "a block for each key head", 1, "4 SMs read, the others wait"),
        (11.5, "keys cut into pieces", 8, "32 SMs read; a second step merges"),
    ):
        write(axes, -9, top - 1.6, name, ha="left", weight="bold")
        write(axes, 40, top - 1.6, note, ha="right", fontsize=9, color=DARK)
        for head in range(4):
            write(axes, -0.6, top + 2 * head + 0.9, f"key head {head}", ha="right", fontsize=9)
            for piece in range(pieces):
                width = 40 / pieces
                box(axes, width * piece, top + 2 * head, width, 1.7, P.RANKS[piece % 4] if pieces > 1 else BLUE)
            if pieces > 1:
                arrow(axes, (40.4, top + 2 * head + 0.9), (43.4, top + 2 * head + 0.9))
                box(axes, 43.6, top + 2 * head, 5, 1.7, GREY)
                write(axes, 46.1, top + 2 * head + 0.85, "merge", fontsize=8.5)
    write(axes, 20, 21.2, "keys of the cache", fontsize=9, color=DARK)
    return figure


# ---- 11 ----


def budget() -> Figure:
    """Every measured answer of this library: its error as a share of the error allowed."""
    figure, axes = plot(9, 3.4, left=0.16, bottom=0.17)
    suites = ("ladder", "forward", "mma", "fp8", "float32", "short", "varlen", "prefill", "decode", "shapes",
              "backward", "backward_mma")  # fmt: skip
    for n, suite in enumerate(suites):
        shares = [row["max_err"] / row["err_budget"] for row in rows_of(suite)
                  if row["system"] == "ours" and row.get("err_budget")]  # fmt: skip
        spread = (np.arange(len(shares)) * 0.618 % 1 - 0.5) * 0.5
        axes.plot(shares, n + spread, ".", color=BLUE, markersize=4)
    axes.axvline(1, color=ORANGE, linewidth=1.6)
    axes.text(0.99, -0.9, "budget", color="#B36F00", ha="right", fontsize=9)
    axes.set_yticks(range(len(suites)), suites, fontsize=9)
    axes.set_ylim(len(suites) - 0.4, -1.4)
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("largest error of a call / error that it may have")
    return figure


FIGURES = {
    "path": path,
    "formula": formula,
    "online": online,
    "order": order,
    "memory": memory,
    "roofline": roofline,
    "fragments": fragments,
    "swizzle": swizzle,
    "pingpong": pingpong,
    "fp8": fp8,
    "backward": backward,
    "split": split,
    "budget": budget,
}


def draw(folder: Path, kind: str = "svg"):
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **P.STYLE}):
        for name, make in FIGURES.items():
            metadata = {"Date": None} if kind == "svg" else None
            make().savefig(folder / f"{name}.{kind}", format=kind, metadata=metadata, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ladder.figures", description="Draws the figures of docs/learn.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--png", action="store_true", help="PNG instead of SVG, to look at")
    arguments = parser.parse_args()
    draw(arguments.folder, "png" if arguments.png else "svg")
