"""Tables and pictures of the suites over shapes: speed over seqlen, the roofline, the ladder as bars."""

from __future__ import annotations

import itertools
import math

from ..report import table as markdown_table
from .figure import MASKS, MINE, figure_of, legend, looks_of, plain_log, set_title
from .rows import device_name, label, number, order_of, series, unit
from .systems import LABELS, MODES, PACKAGES

PASSES = {"fwd": "forward", "bwd": "backward"}
# Data-sheet peaks without sparsity: TFLOP/s by dtype, TB/s.
_HOPPER = {"float8_e4m3fn": 1979, "float16": 989, "bfloat16": 989, "tf32": 494, "float32": 67}
PEAKS = {
    "H200": (_HOPPER, 4.8),
    "H100 80GB HBM3": (_HOPPER, 3.35),
    "A100": ({"float16": 312, "bfloat16": 312, "tf32": 156, "float32": 19.5}, 2.04),
}


def group(row: dict, by_time: bool = False) -> tuple:
    """The panel of a row: (whether heads are grouped, headdim, nheads, nheads_k, batch). Fields in which panels do not
    differ are 0."""
    grouped = (row["nheads"], row["nheads_k"]) if row["nheads"] != row["nheads_k"] else (0, 0)
    return (grouped[0] > 0, row["headdim"], *grouped, row["batch"] if by_time else 0)


def group_name(key: tuple) -> str:
    _, headdim, nheads, nheads_k, batch = key
    name = f"headdim {headdim}"
    if nheads:
        name += f", {nheads}/{nheads_k} heads"
    return name + (f", batch {batch}" if batch else "")


def table(data: dict, rows: list[dict], axis: str = "seqlen_q", by_time: bool = False) -> list[str]:
    """One line for each panel and system, one column for each seqlen (or mix of lengths); then the speed of this
    library over that of the peers. by_time: microseconds instead of speed."""
    name, scale = unit(data)
    columns = list(dict.fromkeys(row[axis] for row in rows))
    if axis == "seqlen_q":
        columns.sort()
    against = {"the best peer": lambda row: row["system"] != "ours"}
    if by_time:
        against["standard attention"] = lambda row: row["system"] == "standard"
    for package in PACKAGES:
        if any(row["system"] == package for row in rows):
            against[LABELS[package]] = lambda row, package=package: row["system"] == package

    # Our rows by mode. A deterministic pass is shown for its cost, and is left out of the ratios.
    plain = [row for row in rows if row["system"] == "ours" and not any(mode in row for mode in MODES)]
    fast = [row for row in rows if "fast_accum" in row]
    ours = {"": plain, ", fast_accum": fast} if fast else {"": plain}

    body: list[list[str]] = []
    ratios: dict[str, list[float]] = {name + mode: [] for name in against for mode in ours}
    sustained = any("sustained_us" in row for row in rows)
    for key in sorted({group(row, by_time) for row in rows}):
        for causal in (False, True):
            panel = [row for row in rows if group(row, by_time) == key and row["causal"] == causal]
            start = [group_name(key), "causal" if causal else "full"]
            for system in order_of(panel):
                mine = {row[axis]: row for row in panel if series(row) == system}
                values = [mine[c]["us"] if by_time else mine[c]["tflops"] * scale for c in columns if c in mine]
                cells = iter(number(value) for value in values)
                body.append([*start, label(system), *(next(cells) if c in mine else "" for c in columns)])
                if sustained and not by_time:
                    cells = [number(mine[c]["sustained_tflops"] * scale) if c in mine else "" for c in columns]
                    body.append([*start, f"{label(system)}, sustained", *cells])
            for (rival, is_rival), (mode, rows_of_ours) in itertools.product(against.items(), ours.items()):
                line: list[float | None] = []
                for c in columns:
                    mine = [row["us"] for row in panel if row[axis] == c and row in rows_of_ours]
                    theirs = [row["us"] for row in panel if row[axis] == c and is_rival(row)]
                    line.append(min(theirs) / min(mine) if mine and theirs else None)
                if any(line):
                    body.append([*start, f"**speed over {rival}{mode}**", *(f"{x:.2f}" if x else "" for x in line)])
                    ratios[rival + mode] += [x for x in line if x]
    what = "Microseconds, less is better" if by_time else f"{name}, more is better"
    lines = [f"## {what}", "", *markdown_table(["shape", "mask", "system", *map(str, columns)], body)]
    for rival, found in ratios.items():
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            text = f"geometric mean {mean:.3f}, least {min(found):.3f}, {sum(x >= 1 for x in found)} at 1 or more"
            lines += ["", f"Speed over {rival} at {len(found)} shapes: {text}."]
    if axis == "mix":
        lengths = {
            row["mix"]: f"{row['batch']} sequences, the longest {row['seqlen_q']}, {row['tokens']} tokens"
            for row in rows
        }
        lines += ["", "Lengths: " + "; ".join(f"{mix}: {text}" for mix, text in lengths.items()) + "."]
    return lines


def ladder_table(data: dict, rows: list[dict]) -> list[str]:
    name, scale = unit(data)
    rungs = [row for row in rows if row["system"] == "ours"]
    ordered = rungs + [row for row in rows if row["system"] != "ours"]
    body = []
    for row in ordered:
        climb = f"{rungs[0]['us'] / row['us']:.1f}x" if rungs else ""
        spread, err = f"{row['us_spread'] / row['us']:.1%}", f"{row['max_err']:.1e}"
        body.append([label(series(row)), f"{row['us']:.1f}", number(row["tflops"] * scale), climb, spread, err])
    shape = f"{shape_text(rows[0])}" if rows else "nothing ran"
    return [f"## {shape}", "", *markdown_table(["rung", "us", name, "over the first", "spread", "max error"], body)]


def shape_text(row: dict) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"headdim {row['headdim']}, {mask}, batch {row['batch']} x {row['nheads']} heads, seqlen {row['seqlen_q']}"


def picture(data: dict, rows: list[dict], by_time: bool = False):
    """One panel for each headdim (and head grouping or batch) and mask."""
    name, scale = unit(data)
    groups = sorted({group(row, by_time) for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure, axes = figure_of(len(masks), len(groups), max(6, 3.1 * len(groups)), 1.3 + 2.5 * len(masks), sharey=True)
    looks = looks_of(rows)
    for line, causal in zip(axes, masks, strict=True):
        for axis, key in zip(line, groups, strict=True):
            panel = [row for row in rows if group(row, by_time) == key and row["causal"] == causal]
            for system in order_of(panel):
                mine = sorted(
                    (row["seqlen_q"], row["us"] if by_time else row["tflops"] * scale)
                    for row in panel
                    if series(row) == system
                )
                axis.plot(*zip(*mine, strict=True), label=label(system), **looks[system])
            axis.set_title(f"{group_name(key)}, {MASKS[causal]}")
            axis.set_xscale("log", base=2)
            seqlens = sorted({row["seqlen_q"] for row in panel})
            shown = seqlens if len(seqlens) <= 6 else seqlens[::-1][::3][::-1]
            axis.set_xticks(shown, [f"{n // 1024}k" if n >= 1024 else str(n) for n in shown])
            axis.minorticks_off()
            if by_time:
                axis.set_yscale("log")
                plain_log(axis.yaxis)
            else:
                axis.set_ylim(0, 1.06 * scale * max(row["tflops"] for row in rows))
        line[0].set_ylabel("µs a call" if by_time else name)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    what = f"Attention {PASSES[rows[0]['pass']]}" + (
        ", short sequences (less is better)" if by_time else " (more is better)"
    )
    set_title(figure, data, what)
    legend(figure, axes)
    return figure


def roofline(data: dict, rows: list[dict]):
    """Speed over FLOPs per byte of inputs and outputs. The roofs are the data sheet's, if known, and the measured
    speeds of a product and a copy."""
    name, scale = unit(data)
    figure, axes = figure_of(1, 1, 8.5, 6)
    axis, looks = axes[0][0], looks_of(rows)
    points = [(row, row["tflops"] / row["tbps"], row["tflops"] * scale) for row in rows]
    low, high = min(p[1] for p in points) / 2, max(p[1] for p in points) * 2
    roofs = []
    for card, (peaks, bandwidth) in PEAKS.items():
        dtype = "tf32" if any("tf32" in row for row in rows) else rows[0]["dtype"]
        if card in device_name(data) and dtype in peaks:
            roofs.append(
                (f"data sheet: {peaks[dtype]} TFLOP/s, {bandwidth} TB/s", peaks[dtype] * scale, bandwidth * scale, "-")
            )
    product = [row for row in data["rows"] if row["system"] in ("cublas", "blas") and "tflops" in row]
    copy = [row for row in data["rows"] if row["system"] == "copy" and "tbps" in row]
    if product and copy:
        text = f"measured: {number(product[0]['tflops'] * scale)} {name} product, "
        text += f"{number(copy[0]['tbps'] * scale)} {'TB/s' if scale == 1 else 'GB/s'} copy"
        roofs.append((text, product[0]["tflops"] * scale, copy[0]["tbps"] * scale, "--"))
    for text, peak, bandwidth, dashes in roofs:
        ridge = peak / bandwidth
        low = min(low, ridge / 2)
        xs = [low, min(max(ridge, low), high), high]
        axis.plot(
            xs, [min(peak, x * bandwidth) for x in xs], color="#333333", linestyle=dashes, linewidth=1.3, label=text
        )
    for system in order_of(rows):
        for causal, filled in ((False, True), (True, False)):
            mine = [(x, y) for row, x, y in points if series(row) == system and row["causal"] == causal]
            if mine:
                look = looks[system]
                face = look["color"] if filled else "white"
                text = f"{label(system)}, {MASKS[causal]}"
                axis.plot(
                    *zip(*mine, strict=True), look["marker"], color=look["color"], markerfacecolor=face, label=text,
                    markersize=6, zorder=look.get("zorder", 2),
                )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_yscale("log")
    axis.set_ylim(min([p[2] for p in points] + [roof[1] for roof in roofs]) / 3)
    plain_log(axis.yaxis)
    axis.set_xlabel("FLOP per byte of inputs and outputs")
    axis.set_ylabel(name)
    set_title(figure, data, f"Attention {PASSES[rows[0]['pass']]} under the roofs")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def ladder(data: dict, rows: list[dict]):
    """A bar for each rung, the first at the top, then the peers."""
    name, scale = unit(data)
    rungs = [row for row in rows if row["system"] == "ours"]
    ordered = rungs + [row for row in rows if row["system"] != "ours"]
    figure, axes = figure_of(1, 1, 8.5, 1.4 + 0.45 * len(ordered))
    axis = axes[0][0]
    values = [row["tflops"] * scale for row in ordered]
    colours = [MINE[0] if row["system"] == "ours" else "#9A9A9A" for row in ordered]
    bars = axis.barh(range(len(ordered)), values, color=colours, height=0.7)
    axis.bar_label(bars, [f" {number(value)}" for value in values])
    axis.set_yticks(range(len(ordered)), [label(series(row)) for row in ordered])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    if max(values) > 30 * min(values):
        axis.set_xscale("log")
        plain_log(axis.xaxis)
        axis.set_xlabel(f"{name}, logarithmic")
    else:
        axis.set_xlabel(name)
    log = axis.get_xscale() == "log"
    axis.set_xlim(min(values) / 2 if log else 0, max(values) * (2.2 if log else 1.12))
    what = "The backward ladder" if ordered[0]["pass"] == "bwd" else "The ladder"
    set_title(figure, data, f"{what}: {shape_text(ordered[0])}")
    return figure


def bars(data: dict, rows: list[dict]):
    """varlen: systems side by side for each mix, one panel for each headdim and mask."""
    name, scale = unit(data)
    groups = sorted({(group(row), row["causal"]) for row in rows})
    figure, axes = figure_of(1, len(groups), max(6, 2.9 * len(groups)), 3.9)
    looks, names = looks_of(rows), order_of(rows)
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    width = 0.8 / len(names)
    for axis, (key, causal) in zip(axes[0], groups, strict=True):
        for i, system in enumerate(names):
            mine = {
                r["mix"]: r["tflops"] * scale
                for r in rows
                if (group(r), r["causal"], series(r)) == (key, causal, system)
            }
            places = [mixes.index(mix) + (i - (len(names) - 1) / 2) * width for mix in mine]
            drawn = axis.bar(places, mine.values(), width * 0.92, color=looks[system]["color"], label=label(system))
            axis.bar_label(drawn, [number(value) for value in mine.values()], fontsize=8)
        axis.set_xticks(range(len(mixes)), mixes)
        axis.grid(axis="x", visible=False)
        axis.set_title(f"{group_name(key)}, {MASKS[causal]}")
    axes[0][0].set_ylabel(name)
    set_title(figure, data, "Attention forward, packed sequences (more is better)")
    legend(figure, axes)
    return figure
