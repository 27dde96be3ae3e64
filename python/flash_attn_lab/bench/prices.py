"""The suite `prices`: what an option costs that changes nothing. The time of a call with a window that cuts nothing, a
mask that is True everywhere, a bias of zeros and so on, over the time of the same call without.

ALiBi, softcap and dropout do change the answer; they are here for what their arithmetic costs. All calls of one shape
are timed in shuffled turns.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from ..report import table as markdown_table
from .calls.call import BadCall, Call
from .calls.judge import Judge
from .calls.make import Arrays, ours
from .figure import LINES, figure_of, legend, set_title
from .machine import SHORT, BenchError, load_average, open_machine
from .rows import unit
from .suite import Outcome, Suite, measuring, register, rounded
from .systems import Refused
from .timing import Protocol, interleave

PRICED = {  # options by the name of their row
    "a window that cuts nothing": "window_all",
    "ALiBi": "alibi",
    "softcap": "softcap",
    "sinks": "sinks",
    "mask of keys, all true": "key_mask_all",
    "mask of pairs, all true, one for all": "pair_mask_all",
    "bias of zeros, one for all": "bias_zero",
    "dropout": "dropout",
}
SHAPES = {  # head dims, lengths, tokens, heads x headdim
    "cuda": ((64, 128, 256), (2048, 8192), 16384, 2048),
    "cpu": ((64, 128), (512, 1024), 1024, 256),
}
QUICK = {"cuda": ((128,), (2048,), 4096, 1024), "cpu": ((64,), (256,), 256, 128)}


def calls(options, device: str, dtype: str) -> list[list[Call]]:
    """Each list: the bare call, then it with each of the options."""
    headdims, seqlens, tokens, hidden = (QUICK if options.quick else SHAPES)[device]
    groups = []
    for headdim in options.headdim or headdims:
        heads = options.heads or max(1, hidden // headdim)
        for seqlen in options.seqlen or seqlens:
            batch = options.batch or max(1, tokens // seqlen)
            for causal in [mask == "causal" for mask in options.mask or ("full", "causal")]:
                for backward in (False, True):
                    shape = batch, seqlen, seqlen, heads, options.heads_k or heads, headdim, headdim
                    base = ("causal",) if causal else ()
                    more = [(), *((name,) for name in PRICED.values())]
                    groups.append([Call(dtype, backward, *shape, (*base, *extra)).checked() for extra in more])
    return groups


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, options.framework, "prices")
    dtype = options.dtype or ("bfloat16" if machine.device == "cuda" else "float32")
    outcome = Outcome(load=load_average())
    print(f"{machine.title}, {SHORT[dtype]}, {machine.framework} arrays", flush=True)
    try:
        groups = calls(options, machine.device, dtype)
    except BadCall as error:
        raise BenchError(str(error)) from None
    with measuring(outcome, machine, len(groups), "prices") as (meter, progress):
        for group in groups:
            progress.step(_one(machine, group, options, protocol, meter, outcome))
            machine.release()
    return machine, outcome


def _one(machine, group: list[Call], options, protocol: Protocol, meter, outcome: Outcome) -> str:
    """Checks and times the calls of one shape; returns the line about them."""
    kept: list[tuple[dict[str, Any], Any]] = []
    for call in group:
        option = call.options[-1] if len(call.options) > len(group[0].options) else ""
        arrays = Arrays.of(machine, call, options.seed or 0)
        try:
            system = ours(arrays, None, options.threads or 0)
        except Refused as refusal:
            outcome.left_out.append({"system": "ours", "shape": str(call), "reason": str(refusal)})
            continue
        row = {"suite": "prices", "system": "ours", "kernel": system.kernel, "option": option}
        row |= call.fields() | {"causal": "causal" in call.options}
        if Judge.affordable(call):
            answer = system.launch(0)
            machine.synchronize()
            row["max_err"], row["err_budget"] = Judge(arrays, options.seed or 0).verdict(answer)
            if not row["max_err"] <= row["err_budget"]:
                outcome.wrong += 1
                outcome.rows.append(rounded(row | {"wrong": True}))
                continue
        kept.append((row | {"flops": call.flops}, system.launch))
    timings = interleave(machine, [launch for _, launch in kept], protocol, meter, options.seed or 0)
    bare = None
    parts = []
    for (row, _), timing in zip(kept, timings, strict=True):
        row |= timing.row(row.pop("flops") / 1e12)
        if not row["option"]:
            bare = row["us"]
        elif bare:
            row["price"] = row["us"] / bare
            parts.append(f"{row['option']} {row['price']:.2f}")
        outcome.rows.append(rounded(row))
    return f"{group[0]}: {bare or 0:.1f} us; {', '.join(parts)}"


# ---- the table and the picture ----


def _column(row: dict) -> tuple:
    return row["headdim"], row["seqlen_q"], row["causal"]


def table(data: dict, rows: list[dict]) -> list[str]:
    columns = list(dict.fromkeys(map(_column, rows)))
    place = {(row["option"], row["pass"], *_column(row)): row for row in rows}
    name, scale = unit(data)
    body = []
    for title, option in {"bare": "", **PRICED}.items():
        cells = [title]
        for column in columns:
            pair = [place.get((option, way, *column)) for way in ("fwd", "bwd")]
            if option:
                texts = [f"{row['price']:.2f}" if row and "price" in row else "-" for row in pair]
            else:
                texts = [f"{row['tflops'] * scale:.0f}" if row else "-" for row in pair]
            cells.append(" / ".join(texts))
        body.append(cells)
    heads = [f"D{d} {n}{' causal' if causal else ''}" for d, n, causal in columns]
    return [
        "Time of a call with the option over the time of the call without, forward / backward. The first line is the",
        f"speed of the call without, {name}.",
        "",
        *markdown_table(["", *heads], body),
    ]


def picture(data: dict, rows: list[dict]):
    """The median price of each option over the shapes, forward and backward, with the least and the largest."""
    figure, [[axis]] = figure_of(1, 1, 8.5, 4.4)
    for number, (way, text) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
        for place, option in enumerate(PRICED.values()):
            prices = [row["price"] for row in rows if (row["option"], row["pass"]) == (option, way) and "price" in row]
            if prices:
                y, middle = place + 0.38 * (number - 0.5), median(prices)
                named = {"label": text} if place == 0 else {}
                axis.barh(y, middle, height=0.36, color=LINES[5 * number], **named)
                axis.plot([min(prices), max(prices)], [y, y], color="black", linewidth=1)
                axis.text(max(prices), y, f" {middle:.2f}", va="center", fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(PRICED)), list(PRICED))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("time over that of the bare call: median over the shapes, least to largest")
    legend(figure, np.asarray([axis]))
    set_title(figure, data, "What an option costs")
    return figure


register(
    Suite(
        name="prices",
        about="the time of a call with an option that changes nothing over that of the bare call: a window that cuts\n"
        "nothing, masks all true, a bias of zeros; beside them ALiBi, softcap, sinks, dropout",
        options=frozenset(
            {
                "device",
                "framework",
                "dtype",
                "headdim",
                "seqlen",
                "mask",
                "batch",
                "heads",
                "heads_k",
                "threads",
                "rounds",
                "quick",
                "seed",
                "output",
            }
        ),  # fmt: skip
        run=run,
        table=table,
        pictures={"": picture},
        checked="answers checked against float64 where that takes at most a second",
    )
)
