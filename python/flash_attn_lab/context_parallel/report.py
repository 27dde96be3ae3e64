"""Completes the rows, and makes tables and the picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from flash_attn_minimal._commands.report import plural

from ..bench import figure
from ..bench.rows import number
from ..bench.suite import rounded
from ..report import STYLE, table
from .peers import LABELS

ONE = ("one_ms", "one_slowest_ms", "one_min_ms", "one_max_ms", "one_each_ms", "one_calls")  # fields of one device alone


def efficiency(one_ms: float, all_ms: float, devices: int) -> float:
    """1.0 if n devices are n times as fast as one."""
    return one_ms / (devices * all_ms)


def completed(rows: list[dict]) -> list[dict]:
    """The rows with efficiencies. They are relative to this library's attention on one device, so that rows of the same
    case and group can be compared. The time of a peer on one device is kept as own_one_ms."""
    ours = {}
    for row in rows:
        if row["system"] == "ours" and "one_ms" in row:
            ours.setdefault((row["case"], row["ranks"]), row)  # processes come first
    found = []
    for row in rows:
        row, devices = dict(row), row["devices"]
        if row["system"] != "ours":
            own = {key: row.pop(key) for key in ONE if key in row}
            if own:
                row["own_one_ms"] = own["one_ms"]
        if "ms" in row:
            one = row if "one_ms" in row else ours.get((row["case"], row["ranks"]))
            row["tflops"] = row["flops"] / row["ms"] * 1e-9
            if "cache_bytes" in row:
                row["tbps"] = row["cache_bytes"] / row["ms"] * 1e-9
            if one:
                row["efficiency"] = efficiency(one["one_ms"], row["ms"], devices)
                row["efficiency_slowest"] = efficiency(one["one_slowest_ms"], row["ms"], devices)
            if "own_one_ms" in row:
                row["own_efficiency"] = efficiency(row["own_one_ms"], row["ms"], devices)
        found.append(rounded(row))
    return found


def label(row: dict) -> str:
    """The name of a row's system."""
    if row["system"] != "ours":
        return LABELS[row["system"]]
    mode = row["asked"] if row["asked"] == row.get("mode", row["asked"]) else f"{row['mode']} ({row['asked']})"
    return mode if row["kind"] == "processes" else f"{mode}, {row['kind']}"


def series(row: dict) -> str:
    """The line of the picture that a row belongs to, by the mode that was asked for; "auto" may choose a different mode
    for each case."""
    return label({**row, "mode": row["asked"]}) if row["system"] == "ours" else label(row)


def shape(row: dict) -> str:
    heads = f"{row['nheads']}/{row['nheads_k']}" if row["nheads"] != row["nheads_k"] else f"{row['nheads']}"
    if row["pass"] == "decode":
        each = row["tokens"] // row["sequences"]
        return (
            f"decode of {row['sequences']} sequences, a cache of {each} tokens each, {heads} heads of {row['headdim']}"
        )
    mask = "causal" if row["causal"] else "full"
    window = f", window {row['window'][0]}" if "window" in row else ""
    many = f", {row['sequences']} sequences" if row["sequences"] > 1 else ""
    return f"{row['tokens']} tokens{many}, {heads} heads of {row['headdim']}, {mask}{window}, {row['layout']}"


def percent(row: dict, key: str) -> str:
    return f"{row[key]:.1%}" if key in row else ""


def size_text(row: dict, key: str) -> str:
    count = row.get(key, -1)
    return "" if count < 0 else f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def unit(data: dict) -> tuple[str, float]:
    """TFLOP/s on GPUs, GFLOP/s on the CPU."""
    return ("TFLOP/s", 1.0) if "gpu" in data["machine"] else ("GFLOP/s", 1e3)


def columns(data: dict, wide: bool) -> tuple[list[str], list[list[str]]]:
    """(head, lines) of the table, one line for each row with a time. wide: with all columns."""
    name, scale = unit(data)
    several = len(data["ranks"]) > 1
    head = ["case", "ranks", "system"] if several else ["case", "system"]
    head += ["one, ms", "all, ms", "efficiency", "to slowest", name, "error", "memory"]
    more = ["call, ms", "fastest, ms", "slowest, ms", "received", "its own one, ms"] if wide else []
    lines, last = [], (None, None)
    for row in by_case(row for row in data["rows"] if "ms" in row):
        here = row["case"], row["ranks"]
        cells = [
            row["case"] if row["case"] != last[0] else "", *[str(row["ranks"]) if here != last else ""] * several,
            label(row) + " WRONG" * row.get("wrong", False),
            cell(row, "one_ms"), number(row["ms"]), percent(row, "efficiency"), percent(row, "efficiency_slowest"),
            number(row["tflops"] * scale), error_text(row),
            size_text(row, "rank_bytes"),
        ]  # fmt: skip
        last = here
        if wide:
            cells += [number(row[key]) for key in ("single_ms", "ms_min", "ms_max")]
            cells += [size_text(row, "received_bytes"), cell(row, "own_one_ms")]
        lines.append(cells)
    return [*head, *more], lines


def error_text(row: dict) -> str:
    return "unknown" if "unchecked" in row else f"{row['err']:.1e}" if row.get("err") else "0"


def cell(row: dict, key: str) -> str:
    return number(row[key]) if key in row else ""


def untimed(data: dict) -> list[str]:
    """A line for each reason why rows have no time, wrong answers first."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in sorted(data["rows"], key=lambda row: not row.get("wrong")):
        where = row["case"] + f" on {row['ranks']}" * (len(data["ranks"]) > 1)
        if row.get("wrong"):
            reasons.setdefault((label(row), f"WRONG: {row['why']}"), []).append(where)
        elif "ms" not in row:
            reasons.setdefault((label(row), row["error"]), []).append(where)
    return [f"{name} ({', '.join(dict.fromkeys(where))}): {reason}" for (name, reason), where in reasons.items()]


def by_case(rows: Iterable[dict]) -> list[dict]:
    """The rows sorted by case, in the order in which cases first occur, then by the size of the group."""
    rows = list(rows)
    order = {case: i for i, case in enumerate(dict.fromkeys(row["case"] for row in rows))}
    return sorted(rows, key=lambda row: (order[row["case"]], row["ranks"]))


def listed(numbers: list[int]) -> str:
    """The numbers as text: 2, 4 and 8."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def title(data: dict) -> str:
    machine, ranks = data["machine"], listed(data["ranks"])
    if "gpu" in machine:
        gpus = sorted({min(size, data["gpus"]) for size in data["ranks"]})
        shared = "" if gpus == data["ranks"] else f", {ranks} ranks"
        return f"Context parallelism on {listed(gpus)} x {machine['gpu']}{shared}, {data['date']}"
    return f"Context parallelism on {ranks} ranks of the CPU, {machine['host']}, {data['date']}"


EXPLAINED = """\
* one: the same call on one device, the mean over the devices: all of them make it at the same time, each by itself, in
  turns with the calls of all together. Its own one: what a peer takes on one device, where it is another attention
  than this library's.
* all: from the start to the end of the last rank, a call of a burst without a pause; the median of the bursts.
* efficiency: one / (devices x all), with this library's one in every row; to slowest: with the slowest device's one.
* call: a single call from start to end.
* error: the norm of the difference from one device over the norm; unknown where one device cannot hold the case.
* memory: what a rank holds in the call: its rows of all arrays, workspace, and what other ranks read.
* received: bytes that the rank that gets the most gets from others.
"""


TRACED = """\
What the GPU of rank 0 does in one call, from a start with all GPUs idle, as PyTorch's profiler records it, which makes
the host slower. before: until the first kernel of attention begins. attention: while at least one of them runs. behind:
after the last one. copy engines: while they are at work, beside attention or not. host: how long the call keeps it.
"""


def _traced(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    head = ["case", "ranks", "system", "call, us", "before", "attention", "behind", "copy engines", "host", "picture"]
    lines = []
    for row in rows:
        found = row["trace"]
        names = ("call_us", "before_us", "attention_us", "behind_us", "copy_us", "host_us")
        times = [f"{found[name]:.0f}" if name in found else "" for name in names]
        link = f"[{found['picture']}]({found['picture']})" if "picture" in found else ""
        lines.append([row["case"], str(row["ranks"]), label(row), *times, link])
    return head, lines


def markdown(data: dict, picture: str | None) -> str:
    machine, rows = data["machine"], data["rows"]
    versions = [f"{key} {machine[key]}" for key in ("driver", "cuda", "torch", "cudnn") if key in machine]
    lines = [
        f"# {title(data)}", "",
        f"`{data['command']}`" + (f" at commit {data['commit']}" if data.get("commit") else ""), "",
        ", ".join([machine["host"], *versions, machine["library"]]) + ".", "",
        *EXPLAINED.splitlines(), "",
    ]  # fmt: skip
    if data.get("interrupted"):
        lines += ["The run was interrupted: rows are missing.", ""]
    if picture:
        over = "ranks" if len(data["ranks"]) > 1 else "tokens"
        lines += [f"![efficiency over {over}]({picture})", ""]
    lines += table(*columns(data, wide=True))
    shapes = {row["case"]: shape(row) for row in rows}
    lines += ["", *(f"* `{case}`: {row}" for case, row in shapes.items())]
    notes: dict[str, list[str]] = {}
    for row in rows:
        if "note" in row:
            notes.setdefault(f"{label(row)}: {row['note']}", []).append(row["case"])
    lines += ["", *(f"* {note} ({', '.join(where)})" for note, where in notes.items())] if notes else []
    if traced := [row for row in by_case(rows) if "trace" in row]:
        lines += ["", "## Timelines", "", *TRACED.splitlines(), "", *table(*_traced(traced))]
    if reasons := untimed(data):
        lines += ["", "## Left out", "", *(f"* {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


def picture(data: dict, file: Path) -> bool:
    """Draws efficiency, forward and backward. With groups of several sizes: over ranks, a line for each number of
    tokens. Otherwise: over tokens, a line for each system. Returns whether there was anything to draw."""
    import matplotlib

    rows = [row for row in data["rows"] if row.get("line") and "efficiency" in row]
    if not rows:
        return False
    if len({row["ranks"] for row in rows}) > 1:
        over, lines = "ranks", _by_tokens(rows)
    else:
        over, lines = "tokens", _by_system(rows)
    names = [name for name, _, points in lines if points]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    with matplotlib.rc_context(STYLE):
        drawn, axes = figure.figure_of(1, len(passes), 4.6 * len(passes) + 0.4, 4.2, sharey=True)
        for axis, which in zip(axes.flat, passes, strict=True):
            for name, looks, points in lines:
                found = sorted((row[over], 100 * row["efficiency"]) for row in points if row["pass"] == which)
                if found:
                    axis.plot(
                        *zip(*found, strict=True), label=name, marker="oDP*Xs^v"[names.index(name) % 8], markersize=5,
                        **looks,
                    )  # fmt: skip
            axis.axhline(100, color="#7F7F7F", linewidth=0.8, linestyle=":")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({row[over] for row in rows if row["pass"] == which}))
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if over == "tokens" else f"{x:g}")
            axis.minorticks_off()
            axis.set_title(which)
            axis.set_xlabel(over)
            axis.set_ylim(bottom=0)
        axes.flat[0].set_ylabel("% of perfect scaling")
        figure.legend(drawn, axes)
        first = rows[0]
        drawn.suptitle(f"{title(data)}\n{shape(first).split(', ', 1)[1]}, {first['dtype']}", fontsize=11)
        drawn.savefig(file, metadata={"Software": None})
    return True


Line = tuple[str, dict, list[dict]]  # name, colour and style, rows


def _by_system(rows: list[dict]) -> list[Line]:
    """A line for each system, ours first."""
    names = list(dict.fromkeys(map(series, sorted(rows, key=lambda row: row["system"] != "ours"))))
    lines = []
    for i, name in enumerate(names):
        mine = name not in LABELS.values()
        looks = {"color": figure.LINES[i % len(figure.LINES)], "linewidth": 2.2 if mine else 1.4, "zorder": 2 + mine}
        lines.append((name, looks, [row for row in rows if series(row) == name]))
    return lines


def _by_tokens(rows: list[dict]) -> list[Line]:
    """For each number of tokens, a line of our first system and a thin line of the best peer."""
    first = next((series(row) for row in rows if row["system"] == "ours"), "")
    lines = []
    for i, tokens in enumerate(sorted({row["tokens"] for row in rows})):
        of = [row for row in rows if row["tokens"] == tokens]
        peers = sorted((row for row in of if row["system"] != "ours"), key=lambda row: row["efficiency"])
        best = {(row["pass"], row["ranks"]): row for row in peers}  # the last one of each key stays, which is the best
        colour, name = {"color": figure.LINES[i % len(figure.LINES)]}, f"{tokens / 1024:g}k tokens"
        mine = [row for row in of if series(row) == first]
        lines.append((name, colour | {"linewidth": 2.2, "zorder": 3}, mine))
        lines.append((f"{name}, best peer", colour | {"linewidth": 1.2, "linestyle": "--"}, list(best.values())))
    return lines


def sentence(rows: list[dict], ranks: str) -> str:
    """The progress line for the rows of a case that has just run."""
    parts = []
    for row in rows:
        if "ms" in row:
            speed = f"{number(row['ms'])} ms" + (f", {row['efficiency']:.1%}" if "efficiency" in row else "")
            parts.append(f"{label(row)} {speed}")
        else:
            reason = row.get("error") or f"WRONG: {row['why']}"
            parts.append(f"{label(row)}: {reason if len(reason) < 100 else reason[:97] + '...'}")
    alone = [row["one_ms"] for row in rows if "one_ms" in row]
    before = [f"one alone {number(median(alone))} ms"] if alone else []
    return f"{rows[0]['case']}: " + ", ".join([*before, f"{ranks} {'; '.join(parts)}"])


def summary(data: dict[str, Any]) -> str:
    wrong = [row for row in data["rows"] if row.get("wrong") and row["system"] == "ours"]
    failed = [row for row in data["rows"] if row.get("error") and row["system"] == "ours"]
    return ", ".join(
        [f"{plural(sum('ms' in row for row in data['rows']), 'row')} timed", plural(len(wrong), "wrong answer")]
        + ([f"{len(failed)} refused or failed"] if failed else [])
    )
