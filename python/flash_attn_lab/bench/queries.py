"""The suite `queries`: 1 to 64 query tokens of every sequence against its cache, as in speculative decoding and short
chunks. It shows up to which number one more token costs nothing, and whether the time steps up anywhere by more than
the added work.

All numbers of queries over one cache are timed in shuffled turns, so that a warm card affects each of them equally.
Peers are PyTorch's backends, without the causal mask: here the mask is bottom-right aligned, and hides next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..report import table as markdown_table
from .decode import Caches, Point, base_row, check, leave_out, one_kernel, others, ours, peers_on, readers_on
from .figure import LINES, figure_of, plain_log, set_title
from .machine import load_average, open_machine
from .rows import label, number, unit
from .suite import Outcome, Suite, measuring, register, rounded
from .systems import Refused
from .timing import Protocol, interleave

COUNTS: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64)
QUICK_COUNTS = (1, 4, 16, 17)
BESIDE = (1, 4, 16, 64)  # numbers of queries for which peers are timed
PAGE = 16
AWAY = 100  # offset of q's seeds from those of K and V; a q equal to a row of K would give that key all the weight

# One entry for each cache: its points (with one query), and whether the first point is also timed with pages.
CACHES = {
    "cuda": [
        ([Point(batch, keys, heads, 8, 128) for heads in (64, 32)], keys == 8192)
        for batch, keys in ((1, 131072), (8, 8192), (64, 4096))
    ],
    "cpu": [([Point(2, 1024, heads, 2, 64) for heads in (8, 4)], True)],
}
POWER = 600.0  # TFLOP/s of the upper bound: about the speed of dense 16-bit attention on an H200 at its power limit


def flops(point: Point) -> float:
    pairs = point.queries * point.seqlen - point.queries * (point.queries - 1) // 2
    return 4.0 * point.batch * point.nheads * pairs * point.headdim


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, "torch", "queries")
    dtype = options.dtype or ("bfloat16" if machine.device == "cuda" else "float32")
    chosen, counts = CACHES[machine.device], COUNTS
    if options.quick:
        chosen, counts = [([points[0]], paged) for points, paged in chosen if paged], QUICK_COUNTS
    outcome, kernel, seed = Outcome(load=load_average()), one_kernel(options), options.seed or 0
    print(f"{machine.title}, {dtype}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, sum(len(points) for points, _ in chosen), "queries") as (meter, progress):
        for points, paged in chosen:
            caches = Caches(machine, points[0], dtype, seed)
            for point in points:
                pages = (0, PAGE) if paged and point == points[0] else (0,)
                made = [caches.asked(replace(point, queries=n), seed + AWAY + n) for n in counts]
                progress.step(f"{point}: {_one(made, pages, kernel, seed, protocol, meter, outcome)}")
                del made
            del caches
            machine.release()
    return machine, outcome


def _one(
    asked: list[Caches],
    pages: Iterable[int],
    kernel: str | None,
    seed: int,
    protocol: Protocol,
    meter,
    outcome: Outcome,
) -> str:
    """Checks and times everything over one cache; returns the line to print."""
    timed: list[tuple] = []  # launch, row, point
    notes = []
    for caches in asked:
        machine, point, base = caches.machine, caches.point, base_row("queries", caches)
        for page in pages:
            name = f"ours paged {page}" if page else "ours"
            try:
                found, launch, seen = ours(caches, kernel, page, caches.dtype, causal=True)
            except Refused as refusal:
                leave_out(outcome, name, point, str(refusal))
                continue
            row = base | {"system": "ours", "kernel": found, "causal": True, "page_size": page}
            note = check(caches, launch, seen, row, outcome)
            del seen
            if note:
                notes.append(f"{name} is WRONG at {point.queries}: {note}")
            else:
                timed.append((launch, row, point))
        names = (peers_on(machine, point.headdim) if point.queries in BESIDE else ()) + (
            readers_on(machine) if caches is asked[0] else ()
        )
        for name, launch in others(caches, names, outcome):
            timed.append((launch, base | {"system": name, "causal": False}, point))
    # All run in graphs, so that no step between two numbers of queries is one from a graph to plain launches.
    launches = [launch for launch, *_ in timed]
    timings = interleave(machine, launches, protocol, meter, seed=seed, graphs=True)
    parts = []
    for (_, row, point), timing in zip(timed, timings, strict=True):
        measured = timing.row(flops(point) / 1e12)
        measured["tbps"] = point.bytes(row["dtype"]) / measured["us"] * 1e-6
        if row["system"] == "read":
            del measured["tflops"]
        outcome.rows.append(rounded(row | measured))
        if row["system"] == "ours" and not row["page_size"]:
            parts.append(f"{point.queries}: {measured['us']:.1f}")
    return "; ".join([f"us of queries {', '.join(parts)}", *notes])


# ---- the table and the picture ----

CURVE = ("batch", "seqlen_k", "nheads", "nheads_k", "headdim")


def curve(row: dict) -> tuple:
    """The fields that a row shares with rows of other numbers of queries."""
    return tuple(row[name] for name in CURVE)


def curves_of(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Our rows by curve and page size, ordered by the number of queries."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["system"] == "ours":
            found.setdefault((*curve(row), row["page_size"]), []).append(row)
    return {key: sorted(mine, key=lambda row: row["seqlen_q"]) for key, mine in found.items()}


def reads_of(rows: list[dict]) -> dict[tuple, dict]:
    """The row of the read-only kernel, by curve."""
    return {curve(row): row for row in rows if row["system"] == "read"}


def table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each cache, heads and number of queries."""
    name, scale = unit(data)
    bandwidth = "TB/s" if scale == 1 else "GB/s"
    body = []
    for (*key, page), mine in curves_of(rows).items():
        batch, keys, nheads, nheads_k, _ = key
        one = next((row["us"] for row in mine if row["seqlen_q"] == 1), None)
        before = None
        for row in mine:
            peers = [x for x in rows if x["system"] not in ("ours", "read") and curve(x) == tuple(key)]
            fastest = min((x for x in peers if x["seqlen_q"] == row["seqlen_q"]), key=lambda x: x["us"], default=None)
            body.append([
                str(batch), f"{keys} in pages of {page}" if page else str(keys), f"{nheads}/{nheads_k}",
                str(row["seqlen_q"]), f"{row['us']:.1f}", number(row["tbps"] * scale), number(row["tflops"] * scale),
                row["kernel"], f"{fastest['us']:.1f}, {label(fastest['system'])}" if fastest else "",
                f"{fastest['us'] / row['us']:.2f}" if fastest else "",
                f"{one / row['us']:.2f}" if one else "", f"{row['us'] / before:.2f}" if before else "",
            ])  # fmt: skip
            before = row["us"]
    head = ["batch", "keys", "heads", "queries", "us", bandwidth, name, "kernel", "fastest peer, us"]
    head += ["**speed over it**", f"**share of one query's {bandwidth}**", "step"]
    lines = ["## One to 64 queries against a cache", "", *markdown_table(head, body), ""]
    lines += [
        f"{bandwidth} are of keys and values; step is the time over that of the line before. Ours is causal, with the",
        "last query at the last key. Peers run without a mask, as PyTorch's puts the first query at the first key;",
        "that costs them no more than a key in a hundred.",
    ]
    reads: dict[str, float] = {}
    for row in reads_of(rows).values():
        where = f"{row['batch']} x {row['seqlen_k']} keys"
        reads[where] = max(row["tbps"], reads.get(where, 0.0))
    if reads:
        texts = [f"{where} {number(found * scale)} {bandwidth}" for where, found in reads.items()]
        lines += ["", f"A read alone: {', '.join(texts)}."]
    return lines


def picture(data: dict, rows: list[dict]):
    """Microseconds over queries, a panel for each number of heads. Dashed: the time of the reads and of the
    products."""
    found, reads = curves_of(rows), reads_of(rows)
    heads = list(dict.fromkeys(key[2:4] for key in found)) or [(0, 0)]
    figure, [axes] = figure_of(1, len(heads), max(6, 4.6 * len(heads)), 4.6, sharey=True)
    caches = list(dict.fromkeys(key[:2] for key in found))
    for axis, of in zip(axes, heads, strict=True):
        drawn: dict[tuple, list[dict]] = {key: mine for key, mine in found.items() if key[2:4] == of}
        for (*key, page), mine in drawn.items():
            colour = LINES[caches.index(tuple(key[:2])) % len(LINES)]
            text = f"{key[0]} x {key[1]} keys" + (f", pages of {page}" if page else "")
            points = [(row["seqlen_q"], row["us"]) for row in mine]
            axis.plot(*zip(*points, strict=True), marker=".", color=colour, linestyle=":" if page else "-", label=text)
            bound = {"color": colour, "linestyle": "--", "linewidth": 0.7}
            if page:
                continue
            if tuple(key) in reads:
                axis.axhline(reads[tuple(key)]["us"], **bound)
            if "gpu" in data["machine"]:
                work = [(row["seqlen_q"], row["us"] * row["tflops"] / POWER) for row in mine]
                axis.plot(*zip(*work, strict=True), **bound)
        axis.set_title(f"{of[0]}/{of[1]} heads")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlabel("queries of a sequence")
        axis.set_yscale("log")
        plain_log(axis.yaxis)
    times = [row["us"] for row in rows]
    axes[0].set_ylim(min(times) / 1.6, max(times) * 1.25)  # bounds far below are cut off
    axes[0].set_ylabel("µs a call")
    what = "Queries against a cache (less is better)"
    dashes = f"dashed: the cache read alone, and FLOPs at {POWER:.0f} TFLOP/s" if "gpu" in data["machine"] else ""
    set_title(figure, data, what + (f"; {dashes}" if dashes else ""))
    handles = {t: h for axis in axes for h, t in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, max(1, len(handles))))
    return figure


register(
    Suite(
        name="queries",
        about="1 to 64 query tokens of every sequence against caches of 4096 to 131072 keys, causal; beside cuDNN,\n"
        "FlashAttention-2 and a kernel that only reads the cache",
        options=frozenset({"device", "dtype", "kernel", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
    )
)
