"""The development of the fastest kernels, one step at a time; and attempts that brought nothing."""

from __future__ import annotations

import json
from pathlib import Path

from ..bench.figure import MINE, figure_of, plain_log
from ..bench.rows import number
from ..bench.systems import Shape
from ..report import table as markdown_table
from . import _ncu
from ._calls import call_of
from ._measure import measure
from ._variants import DTYPE, on_gpu
from .experiment import Experiment, Rows, Run, register
from .report import set_title, size

LOST = Path(__file__).with_name("lost.json")
FIELDS = ("kernel", "what", "expected", "measured", "why", "source", "commit")
PASSES = {"fwd": "forward", "bwd": "backward"}


def lost() -> list[dict[str, str]]:
    """The attempts that brought nothing; each entry has FIELDS."""
    return json.loads(LOST.read_text())


def run(run: Run) -> None:
    variants = on_gpu(run)
    if variants is None:
        return
    base = Shape(1 if run.quick else 4, 4096, 16, 16, 128, False, DTYPE)
    mine = variants.of("optimisation", base.headdim)
    shapes = [Shape(**{**vars(base), "backward": backward}) for backward in (False, True)]
    climbs = [(shape, [v for v in mine if v.backward == shape.backward]) for shape in shapes]
    with run.steps(2 * len(climbs), "optimisation"):
        for shape, steps in climbs:
            if not steps:
                run.leave_out("variants", shape, f"{variants.file.name} has none of this pass")
                continue
            rows = measure(run, shape, [variants.candidate(v) for v in steps], graphs=False)
            run.step(f"{PASSES['bwd' if shape.backward else 'fwd']}: {len(rows)} steps timed")
            run.step(_busy(run, shape, rows))


def _busy(run: Run, shape: Shape, rows: Rows) -> str:
    """Adds to the rows of a pass the share of time in which the tensor cores are busy. Returns a line of progress."""
    try:
        calls = [call_of(row["name"], shape, True) for row in rows]
        shares = _ncu.tensor_shares(run.machine.framework, calls)
    except _ncu.NcuError as error:
        run.leave_out("counters", shape, error)
        return str(error)
    for row, share in zip(rows, shares, strict=True):
        if share is not None:
            row["tensor_share"] = round(share / 100, 4)
    return f"tensor cores busy in {sum('tensor_share' in row for row in rows)} steps of {len(rows)}"


# ---- the page ----


def climb(rows: Rows, which: str) -> Rows:
    """The steps of a pass in their order."""
    return sorted((row for row in rows if row["pass"] == which), key=lambda row: row["order"])


def table(data: dict, rows: Rows) -> list[str]:
    lines = []
    for which in ("fwd", "bwd"):
        steps = climb(rows, which)
        if not steps:
            continue
        lines += [f"### {PASSES[which].capitalize()}: headdim {steps[0]['headdim']}, batch {steps[0]['batch']} x "
                  f"{steps[0]['nheads']} heads, seqlen {steps[0]['seqlen_q']}, {steps[0]['dtype']}", ""]  # fmt: skip
        body = []
        for before, row in zip([None, *steps], steps, strict=False):
            gain = f"{before['us'] / row['us']:.2f}x" if before else ""
            share = f"{row['tensor_share']:.0%}" if "tensor_share" in row else ""
            body.append(
                [
                    f"`{row['kernel']}`",
                    row["about"],
                    f"{row['us']:.1f}",
                    f"{row['tflops']:.1f}",
                    gain,
                    f"{steps[0]['us'] / row['us']:.1f}x",
                    share,
                    str(row["registers"] or ""),
                    size(row["spill_bytes"]) if row["spill_bytes"] else "",
                    size(row["shared_bytes"]) if row["shared_bytes"] else "",
                ]
            )
        head = ["step", "what is new", "us", "TFLOP/s", "over the step before", "over the first", "tensor cores busy",
                "registers", "spilled", "shared memory"]  # fmt: skip
        lines += [*markdown_table(head, body), ""]
    entries = lost()
    lines += [
        f"### Tried and lost ({len(entries)})",
        "",
        "From the comments of the kernels and the messages of the commits; a reason that nobody wrote down is not "
        "noted. `measured` is against what the kernel did at the time, and the commit is the one that brought the "
        "note.",
        "",
        *markdown_table(
            ["kernel", "what was tried", "expected", "measured", "why", "where it is noted"],
            [
                [f"`{e['kernel']}`", e["what"], e["expected"], e["measured"], e["why"], f"{e['source']}, {e['commit']}"]
                for e in entries
            ],
        ),
    ]
    return lines


def findings(data: dict, rows: Rows) -> list[str]:
    found = []
    for which in ("fwd", "bwd"):
        steps = climb(rows, which)
        if len(steps) < 2:
            continue
        gains = [(before["us"] / row["us"], row) for before, row in zip(steps, steps[1:], strict=False)]
        best, worst = max(gains, key=lambda pair: pair[0]), min(gains, key=lambda pair: pair[0])
        text = (
            f"{PASSES[which].capitalize()}: {len(steps)} steps make {steps[0]['us'] / steps[-1]['us']:.1f} times the "
            f"speed of the first. The largest gain is `{best[1]['kernel']}` ({best[1]['about']}), {best[0]:.2f} times "
            f"the step before; the smallest `{worst[1]['kernel']}`, {worst[0]:.2f} times"
        )
        found.append(text + ".")
        slower = [row for gain, row in gains if gain < 1]
        if slower:
            names = ", ".join(f"`{row['kernel']}`" for row in slower)
            found.append(
                f"{names}: slower than the step before on this shape. The library's plans take the steps that pay for "
                "a call's length and mask, not all of them."
            )
    entries = lost()
    by_kernel: dict[str, int] = {}
    for entry in entries:
        by_kernel[entry["kernel"]] = by_kernel.get(entry["kernel"], 0) + 1
    most = max(by_kernel, key=lambda name: by_kernel[name])
    found.append(
        f"{len(entries)} attempts that are on record lost, of {len(by_kernel)} kernels; most of them, "
        f"{by_kernel[most]}, on `{most}`."
    )
    return found


def picture(data: dict, rows: Rows):
    """A waterfall chart for each pass: the speed that every step adds."""
    passes = [which for which in ("fwd", "bwd") if climb(rows, which)]
    if not passes:
        return None
    count = max(len(climb(rows, which)) for which in passes)
    figure, axes = figure_of(len(passes), 1, 9.5, 0.8 + len(passes) * (0.9 + 0.36 * count))
    for [axis], which in zip(axes, passes, strict=True):
        steps = climb(rows, which)
        speeds = [row["tflops"] for row in steps]
        log = max(speeds) > 30 * min(speeds)
        floor = min(speeds) / 2 if log else 0.0
        last = floor
        for place, row in enumerate(steps):
            start, width = min(last, row["tflops"]), abs(row["tflops"] - last)
            axis.barh(place, width, left=start, color=MINE[0] if row["tflops"] >= last else MINE[2], height=0.7)
            share = f", tensor cores {row['tensor_share']:.0%}" if "tensor_share" in row else ""
            gain = f" ({row['tflops'] / last:.2f}x)" if place else ""
            axis.text(
                max(last, row["tflops"]), place, f" {number(row['tflops'])}{gain}{share}", va="center", fontsize=8
            )
            last = row["tflops"]
        axis.set_yticks(range(len(steps)), [row["kernel"] for row in steps], fontsize=8)
        axis.invert_yaxis()
        if log:
            axis.set_xscale("log")
            plain_log(axis.xaxis)
        axis.set_xlim(floor, max(speeds) * (4 if log else 1.3))
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("TFLOP/s, logarithmic" if log else "TFLOP/s")
        axis.set_title(PASSES[which])
    set_title(figure, data, "The climb: what every step adds")
    return figure


register(
    Experiment(
        name="optimisation",
        about="the climb of the Hopper kernels step by step, and what was tried and lost",
        question="Which idea gave how much on the way from the first working kernel to the fastest, and which ideas "
        "gave nothing?",
        method="Every step of the climb is a kernel of its own in the library of variants, with all that the steps "
        "before it have. All are checked, then timed in shuffled turns on one shape, beside the library's kernel. "
        "The share of time in which the tensor cores are busy is from Nsight Compute, where it may be used. The list "
        "of what lost was collected from notes that were made when it was measured; it needs no GPU.",
        run=run,
        table=table,
        findings=findings,
        pictures={"": picture},
        portable=lambda device: device == "cpu",
        may_be_empty=True,
    )
)
