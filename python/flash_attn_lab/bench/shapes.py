"""The suite `shapes`: shapes that models and servers use and the grids of the other suites leave out. Head dims above
256, keys wider than values, one key head for all query heads, a chunk of queries against many keys, gradients of these,
and float32 without tf32. Bursts are short, so that the suite takes about a minute on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..report import table as markdown_table
from .attention import compared
from .figure import MASKS, figure_of, legend, looks_of, set_title
from .machine import SHORT, load_average, open_machine
from .rows import label, number, order_of, series, unit
from .suite import Outcome, Suite, measuring, register
from .systems import MODES, Shape, peers_of
from .timing import Protocol

ROUNDS, BURST_S = 5, 0.006
GRADIENT_ROWS = 512  # rows of a head that are checked, besides the first and last ones
WIDE = (320, 384, 512)


@dataclass(frozen=True)
class Case:
    part: str  # the part of the table: a key of TITLES
    shape: Shape
    kernels: tuple[str, ...] = ("best",)
    mode: str | None = None  # one of MODES; this library is then timed with and without it


PEERS = {
    "forward": "cudnn,fa2,fa3,fa4,efficient,torch",
    "backward": "cudnn,fa2,fa3,fa4,efficient,torch",
    "float32": "efficient",
}
TITLES = {"forward": "Forward", "backward": "Backward", "float32": "Forward in float32, without tf32"}


def _both(part: str, shape: Shape, **more: Any) -> list[Case]:
    """Full and causal."""
    return [Case(part, replace(shape, causal=causal), **more) for causal in (False, True)]


def _gpu() -> Iterable[Case]:
    for d in WIDE:
        kernels = ("best", "mma_sm80") if d == 512 else ("best",)
        yield from _both("forward", Shape(1, 4096, 16, 16, d, False, "bfloat16"), kernels=kernels)
    yield Case("forward", Shape(1, 4096, 64, 1, 512, True, "bfloat16"), ("best", "mma_sm80"))
    for n in (4096, 8192, 16384):
        yield from _both("forward", Shape(1, n, 128, 128, 192, False, "bfloat16", headdim_v=128))
    for nheads, nheads_k in ((8, 1), (16, 2)):
        yield from _both("forward", Shape(1, 512, nheads, nheads_k, 128, False, "bfloat16", seqlen_k=65536))
    for n in (985, 1024, 1536, 2048):
        yield Case("forward", Shape(1, n, 9, 9, 128, False, "bfloat16", seqlen_k=62000))
    for d in WIDE:
        yield from _both("backward", Shape(1, 4096, 16, 16, d, False, "bfloat16", backward=True))
    for shape in (
        Shape(1, 8192, 64, 8, 128, False, "bfloat16", backward=True),
        Shape(1, 8192, 32, 2, 256, False, "bfloat16", backward=True),
        Shape(1, 4096, 128, 128, 192, False, "bfloat16", backward=True, headdim_v=128),
    ):
        yield from _both("backward", shape, mode="deterministic")
    for d, nheads in ((64, 32), (128, 16), (256, 8)):
        yield from _both("float32", Shape(1, 4096, nheads, nheads, d, False, "float32"))


def _cpu() -> Iterable[Case]:
    """An eighth of the rows and few heads, so that it runs in seconds; all in float32."""
    yield Case("forward", Shape(1, 512, 2, 2, 512, True, "float32"))
    yield Case("forward", Shape(1, 512, 8, 8, 192, True, "float32", headdim_v=128))
    yield from _both("forward", Shape(1, 64, 8, 1, 128, False, "float32", seqlen_k=8192))
    yield from _both("backward", Shape(1, 512, 8, 1, 128, False, "float32", backward=True), mode="deterministic")
    yield Case("backward", Shape(1, 512, 4, 4, 192, True, "float32", backward=True, headdim_v=128))


CASES = {"cuda": list(_gpu()), "cpu": list(_cpu())}
QUICK = {"cuda": 7, "cpu": 2}  # --quick takes every n-th case


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, options.framework)
    cases = CASES[machine.device][:: QUICK[machine.device] if options.quick else 1]
    short = replace(protocol, rounds=options.rounds or ROUNDS, burst_s=min(protocol.burst_s, BURST_S))
    outcome = Outcome(load=load_average())
    dtypes = dict.fromkeys(SHORT[case.shape.dtype] for case in cases)
    print(f"{machine.title}, {', '.join(dtypes)}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, len(cases), "shapes") as (meter, progress):
        for case in cases:
            peers, before = peers_of(machine, options.peers, PEERS[case.part]), len(outcome.rows)
            try:
                text = compared(
                    case.shape, case.kernels, peers, options, machine, short, meter, outcome,
                    mode=case.mode, kept=GRADIENT_ROWS,
                )  # fmt: skip
            finally:  # an interrupted case may have rows
                for row in outcome.rows[before:]:
                    row["part"] = case.part
            progress.step(f"{case.shape}: {text}")
    return machine, outcome


# ---- the table and the picture ----

EFFICIENT = {"efficient": "#56B4E9"}  # in other suites it has cuDNN's colour, because the two never appear together
SHAPE = ("headdim", "headdim_v", "batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "causal")


def by_shape(rows: list[dict], part: str) -> dict[tuple, list[dict]]:
    """Rows of a part, by shape: ours first, then the peers, the fastest first."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault(tuple(row[name] for name in SHAPE), []).append(row)
    return {
        key: [row for row in same if row["system"] == "ours"]
        + sorted((row for row in same if row["system"] != "ours"), key=lambda row: row["us"])
        for key, same in found.items()
    }


def shape_text(key: tuple) -> str:
    d, dv, batch, nq, nk, nheads, nheads_k, _ = key
    dims = f"{d}" if d == dv else f"{d}/{dv}"
    length = f"{nq}" if nq == nk else f"{nq} on {nk}"
    heads = f"{nheads}" if nheads == nheads_k else f"{nheads}/{nheads_k}"
    return f"D{dims}, {length}, {heads} heads" + (f", batch {batch}" if batch > 1 else "")


def table(data: dict, rows: list[dict]) -> list[str]:
    """One table for each part, with a line for each shape and system."""
    name, scale = unit(data)
    lines: list[str] = []
    for part, title in TITLES.items():
        body = []
        for key, same in by_shape(rows, part).items():
            fastest = min((row["us"] for row in same if row["system"] != "ours"), default=None)
            for row in same:
                ratio = f"**{fastest / row['us']:.2f}**" if fastest and row["system"] == "ours" else ""
                body.append([
                    shape_text(key), MASKS[row["causal"]], label(series(row)), row.get("kernel", ""),
                    f"{row['us']:.1f}", number(row["tflops"] * scale), ratio,
                ])  # fmt: skip
        if body:
            head = ["shape", "mask", "system", "kernel", "us", name, "**speed over the best peer**"]
            lines += [f"## {title}", "", *markdown_table(head, body), ""]
    return lines[:-1]


def picture(data: dict, rows: list[dict]):
    """A panel for each part, a group of bars for each shape: this library with the kernel it chooses, then the
    peers."""
    name, scale = unit(data)
    plain = [row for row in rows if not row.get("forced") and not any(mode in row for mode in MODES)]
    parts = {part: found for part in TITLES if (found := by_shape(plain, part))}
    most = max((len(found) for found in parts.values()), default=1)
    figure, [axes] = figure_of(1, max(1, len(parts)), max(6, 5.2 * len(parts)), 1.8 + 0.5 * most)
    colours = {system: look["color"] for system, look in looks_of(plain).items()} | EFFICIENT
    systems = order_of(plain)
    thick = 0.8 / max(1, len(systems))
    for axis, (part, found) in zip(axes, parts.items(), strict=False):
        for i, system in enumerate(systems):
            bars = [(at, row) for at, same in enumerate(found.values()) for row in same if series(row) == system]
            if bars:
                places = [at + (i - (len(systems) - 1) / 2) * thick for at, _ in bars]
                speeds = [row["tflops"] * scale for _, row in bars]
                axis.barh(places, speeds, thick * 0.92, color=colours[system], label=label(system))
        axis.set_yticks(range(len(found)), [f"{shape_text(key)}, {MASKS[key[-1]]}" for key in found], fontsize=8)
        axis.set_ylim(most - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(name)
        axis.set_title(TITLES[part])
    set_title(figure, data, "Shapes beside the grids (more is better)")
    legend(figure, axes)
    return figure


register(
    Suite(
        name="shapes",
        about="head dims 192/128, 320, 384, 512, 64 heads on one, chunks on 62000 and 65536 keys; gradients, also\n"
        "deterministic; float32 without tf32; beside cuDNN, FlashAttention-2 and memory-efficient attention",
        options=frozenset({"device", "framework", "peers", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
    )
)
