"""The pictures of docs/context_parallel.md: python docs/context_parallel/pictures.py [--folder FOLDER] [--png]

Needs matplotlib alone. The same release of matplotlib writes the same bytes; each file names the release."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

LAYOUTS = ("contiguous", "zigzag", "flat")
# Okabe and Ito's colours, which colour-blind readers can tell apart.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
ON_RANKS = ("white", "black", "white", "black")
INK, FAINT, WORK, SUM = "#222222", "#8A8A8A", "#D9D9D9", "#555555"
STYLE = {
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "figure.facecolor": "white",  # opaque: readable on a dark page too
    "svg.hashsalt": "flash-attn-minimal",
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
}


def segments(layout: str, rank: int, size: int, cu_seqlens: list[int]) -> list[tuple[int, int, int]]:
    """(sequence, begin, end) of what a rank holds, in the order of its rows: fa_distributed_segments, written again."""
    found = []
    total = cu_seqlens[-1]
    for b, (start, stop) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        length = stop - start
        if layout == "flat":
            first, last = rank * total // size, (rank + 1) * total // size
            found.append((b, max(first, start) - start, min(last, stop) - start))
            continue
        chunks = 2 * size if layout == "zigzag" else size
        for chunk in (rank, chunks - 1 - rank) if layout == "zigzag" else (rank,):
            found.append((b, chunk * length // chunks, (chunk + 1) * length // chunks))
    return [(b, begin, end) for b, begin, end in found if begin < end]


def owners(layout: str, size: int, cu_seqlens: list[int]) -> list[int]:
    """The rank of every token."""
    rank_of = [-1] * cu_seqlens[-1]
    for rank in range(size):
        for b, begin, end in segments(layout, rank, size, cu_seqlens):
            rank_of[cu_seqlens[b] + begin : cu_seqlens[b] + end] = [rank] * (end - begin)
    return rank_of


def runs(rank_of: list[int], bounds: list[int]) -> list[tuple[int, int]]:
    """(begin, end) of neighbouring tokens of one rank and one document."""
    starts = [i for i in range(len(rank_of)) if i in bounds or rank_of[i] != rank_of[i - 1]]
    return list(zip(starts, [*starts[1:], len(rank_of)], strict=True))


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]):
    """A figure of that many inches and its one pair of axes, without frame; y grows downwards."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(*x)
    axes.set_ylim(y[1], y[0])
    return figure, axes


def box(axes, x, y, width, height, colour):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.8, clip_on=False))


def write(axes, x, y, text, **more):
    axes.text(x, y, text, **({"ha": "center", "va": "center"} | more))


def key_of_ranks(axes, x, y, size, step):
    for rank in range(size):
        box(axes, x + rank * step, y - 0.4, 0.9, 0.8, RANKS[rank])
        write(axes, x + rank * step + 1.15, y, f"rank {rank}", ha="left")


def layouts() -> Figure:
    """Every token of two batches, coloured by its rank."""
    batches = {"one sequence of 24 tokens": [0, 24], "three documents of 7, 11 and 5 tokens, packed": [0, 7, 18, 23]}
    figure, axes = canvas(9, 3.75, (-8, 58), (-2.2, 12.8))
    left = 0.0
    for title, cu_seqlens in batches.items():
        write(axes, left, -1.4, title, ha="left", weight="bold")
        y = 0.0
        for size in (2, 4):
            for layout in LAYOUTS:
                if not left:
                    write(axes, -1, y + 0.45, layout, ha="right")
                rank_of = owners(layout, size, cu_seqlens)
                for begin, end in runs(rank_of, cu_seqlens):
                    rank = rank_of[begin]
                    x = left + begin + sum(begin >= start for start in cu_seqlens[1:])  # a gap between documents
                    box(axes, x, y, end - begin, 0.95, RANKS[rank])
                    for token in range(1, end - begin):
                        axes.plot((x + token,) * 2, (y, y + 0.95), color="white", linewidth=0.8, clip_on=False)
                    write(axes, x + (end - begin - 1) // 2 + 0.5, y + 0.48, str(rank), color=ON_RANKS[rank], fontsize=8)
                y += 1.4
            if not left:
                write(axes, -7.3, y - 2.35, f"{size} ranks", rotation=90, weight="bold")
            y += 1.2
        left += 29.0
    key_of_ranks(axes, 0, 11.9, 4, 6.5)
    return figure


def balance() -> Figure:
    """The pairs of query and key under a causal mask, coloured by the rank of the query, and the share of each."""
    size, tokens = 4, 32
    figure, axes = canvas(9, 4.2, (-4, 80), (-5, 33))
    for left, layout in ((0.0, "contiguous"), (44.0, "zigzag")):
        rank_of = owners(layout, size, [0, tokens])
        work = [sum(i + 1 for i in range(tokens) if rank_of[i] == rank) for rank in range(size)]
        box(axes, left, 0, tokens, tokens, "#F2F2F2")
        for begin, end in runs(rank_of, [0]):
            stairs = [(left + i + 1, i + step) for i in range(begin, end) for step in (0, 1)]
            colour = RANKS[rank_of[begin]]
            axes.add_patch(Polygon([(left, begin), *stairs, (left, end)], facecolor=colour, clip_on=False))
        write(axes, left, -3.4, layout, ha="left", weight="bold")
        write(axes, left + tokens / 2, -1.2, "keys", color=SUM)
        write(axes, left - 1.3, tokens / 2, "queries", rotation=90, color=SUM)
        # One bar a rank, over the hidden half. The longest one is how long all ranks wait.
        x = left + 18.5
        write(axes, x, 1.2, "share of the work", ha="left", fontsize=9, color=SUM)
        for rank in range(size):
            share, y = work[rank] / sum(work), 2.4 + 2.5 * rank
            box(axes, x, y, 20 * share, 2, RANKS[rank])
            write(axes, x - 0.5, y + 1.05, f"rank {rank}", ha="right", fontsize=9)
            write(axes, x + 20 * share + 0.5, y + 1.05, f"{100 * share:.0f} %", ha="left", fontsize=9)
    return figure


class TimeLine:
    """Blocks on lanes. A block begins where its lane is free and what it waits for has ended."""

    def __init__(self, ranks: int):
        self.free = {(lane, rank): 0.0 for rank in range(ranks) for lane in ("copies", "SMs")}
        self.blocks, self.arrows = [], []

    def copy(self, rank, source, length, text, after=0.0, arrow_from=None) -> float:
        begin, end = self._put("copies", rank, length, text, RANKS[source], ON_RANKS[source], after)
        if arrow_from is not None:
            self.arrows.append((arrow_from, (rank, begin)))
        return end

    def work(self, rank, length, text, after=0.0, colour=WORK) -> float:
        return self._put("SMs", rank, length, text, colour, INK if colour == WORK else "white", after)[1]

    def _put(self, lane, rank, length, text, colour, ink, after):
        begin = max(self.free[lane, rank], after)
        self.free[lane, rank] = begin + length
        self.blocks.append((lane, rank, begin, length, text, colour, ink))
        return begin, begin + length

    def draw(self, axes, top, title):
        write(axes, -2.6, top, title, ha="left", weight="bold")
        end = max(self.free.values())
        place = {}
        for rank in range(len(self.free) // 2):
            y = top + 0.75 + 2.5 * rank
            write(axes, -2.6, y + 1.0, f"rank {rank}", ha="left")
            for n, lane in enumerate(("copies", "SMs")):
                place[lane, rank] = y + 1.05 * n
                write(axes, -0.25, place[lane, rank] + 0.47, lane, ha="right", color=SUM, fontsize=9)
                axes.plot((0, end), (place[lane, rank] + 0.95,) * 2, color=FAINT, linewidth=0.6)
        for lane, rank, begin, length, text, colour, ink in self.blocks:
            box(axes, begin, place[lane, rank], length, 0.95, colour)
            write(axes, begin + length / 2, place[lane, rank] + 0.49, text, color=ink, fontsize=8.5)
        for (source, left), (target, begin) in self.arrows:
            axes.annotate(
                "",
                (begin, place["copies", target] + (0.95 if source > target else 0.2)),
                (left, place["SMs", source] + (0.0 if source > target else 0.95)),
                arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0},
            )
        for x, text, side in ((0, "hosts meet", "left"), (end, "all have read", "right")):
            axes.plot((x, x), (top + 0.45, y + 2.1), color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
            write(axes, x, top + 0.1, text, fontsize=8.5, color=SUM, ha=side)


def time_lines(forward: TimeLine, backward: TimeLine) -> Figure:
    figure, axes = canvas(9, 4.7, (-2.8, 19.4), (-0.5, 14.1))
    forward.draw(axes, 0.1, "forward")
    backward.draw(axes, 6.7, "backward")
    used = {block[5] for block in forward.blocks + backward.blocks}
    names = {colour: f"from rank {rank}" for rank, colour in enumerate(RANKS)} | {
        WORK: "attention",
        SUM: "sums in float32",
    }
    x = 0.0
    for colour, name in names.items():
        if colour in used:
            box(axes, x, 13.2, 0.45, 0.6, colour)
            write(axes, x + 0.6, 13.5, name, ha="left", fontsize=8.5)
            x += 2.7
    return figure


def gather() -> Figure:
    forward, backward = TimeLine(2), TimeLine(2)
    done = []
    for rank in (0, 1):
        first = forward.copy(rank, 1 - rank, 1.3, "K V 1")
        second = forward.copy(rank, 1 - rank, 2.4, "K V 2")
        forward.work(rank, 2.9, "piece 1", first)
        forward.work(rank, 12.5, "piece 2", second)
        begin = backward.copy(rank, 1 - rank, 2.0, "K V")
        backward.work(rank, 5.2, "first chunks", begin)
        done.append(backward.work(rank, 6.6 - 0.5 * rank, "second chunks"))
    for rank in (0, 1):
        other = done[1 - rank]
        parts = backward.copy(rank, 1 - rank, 2.6, "dk dv parts", other, arrow_from=(1 - rank, other))
        backward.work(rank, 1.2, "sum", parts, SUM)
    return time_lines(forward, backward)


def ulysses() -> Figure:
    """Rank 0 is slower, so that arrows up and arrows down stand apart."""
    lines = (TimeLine(2), ("q k v", "out", 1.3)), (TimeLine(2), ("all", "dq", 1.1))
    for line, (inputs, outputs, length) in lines:
        done = {}
        for rank in (0, 1):
            arrived = [line.copy(rank, 1 - rank, 1.3, f"{inputs} {i}") for i in (1, 2, 3)]
            for i, work in enumerate((3.5, 5.8, 3.5)):
                done[rank, i] = line.work(rank, work - 0.25 * rank, f"piece {i + 1}", arrived[i])
        for rank in (0, 1):
            for i in range(3):
                end = done[1 - rank, i]
                line.copy(rank, 1 - rank, length, f"{outputs} {i + 1}", end, arrow_from=(1 - rank, end))
            if outputs == "dq":
                line.copy(rank, 1 - rank, 1.4, "dk dv")
    return time_lines(lines[0][0], lines[1][0])


PICTURES = {"layouts": layouts, "balance": balance, "gather": gather, "ulysses": ulysses}


def draw(folder: Path, kind: str = "svg"):
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        for name, make in PICTURES.items():
            metadata = {"Date": None} if kind == "svg" else None
            make().savefig(folder / f"{name}.{kind}", format=kind, metadata=metadata, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--png", action="store_true", help="PNG instead of SVG, to look at")
    arguments = parser.parse_args()
    draw(arguments.folder, "png" if arguments.png else "svg")
