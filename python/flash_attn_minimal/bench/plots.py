"""The pictures: speed over seqlen, the roofline, the ladder as bars. Colours are Okabe and Ito's, which colour-blind
readers can tell apart; markers differ too. Made to be read at the width of a README."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from . import fa3, linear
from .report import (
    PASSES,
    attention_rows,
    device_name,
    dtypes,
    group,
    group_name,
    label,
    number,
    order_of,
    series,
    shape_text,
    step_dtype,
    unit,
)

COLOURS = {"cudnn": "#0072B2", "fa2": "#009E73", "torch": "#0072B2", "standard": "#7F7F7F"}
COLOURS |= {"fa3": "#000000", "fa3_ratio": "#000000", "efficient": "#0072B2", "standard_tf32": "#333333"}
MINE = ("#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442")
LINES = (*MINE, "#0072B2", "#009E73", "#000000")
MARKERS = {
    "cudnn": "s",
    "fa2": "^",
    "torch": "s",
    "standard": "v",
    "fa3": "d",
    "fa3_ratio": "d",
    "efficient": "s",
    "standard_tf32": "<",
}
MASKS = {False: "full", True: "causal"}

# Data-sheet peaks without sparsity: TFLOP/s by dtype, TB/s.
_HOPPER = {"float8_e4m3fn": 1979, "float16": 989, "bfloat16": 989, "tf32": 494, "float32": 67}
PEAKS = {
    "H200": (_HOPPER, 4.8),
    "H100 80GB HBM3": (_HOPPER, 3.35),
    "A100": ({"float16": 312, "bfloat16": 312, "tf32": 156, "float32": 19.5}, 2.04),
}
STYLE = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "flash-attn-minimal",
}


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(data: dict, file: Path) -> list[Path]:
    """All pictures of a result, beside `file`."""
    import matplotlib

    rows = attention_rows(data)
    if not rows:
        return []
    rows += fa3.rows(data)
    makers = {"ladder": {"": ladder}, "backward_ladder": {"": ladder}, "varlen": {"": bars}, "overhead": {"": overhead}}
    makers |= {"llama": {"": steps}, "prefill": {}, "decode": {"": reading}, "linear": {"": products}}
    makers |= {"block": {"": blocks}}
    pictures = []
    with matplotlib.rc_context(STYLE):
        for suffix, maker in makers.get(data["suite"], {"": curves, "_roofline": roofline}).items():
            figure = maker(data, rows)
            path = file.with_name(f"{file.stem}{suffix}.png")
            figure.savefig(path, metadata={"Software": None})
            pictures.append(path)
    return pictures


def _figure(rows, columns, width, height, sharey=False):
    """A figure that no window system knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def _title(figure, data: dict, what: str):
    figure.suptitle(f"{what}\n{device_name(data)} · {dtypes(data)} · {data['date']}", fontsize=12)


def _looks(rows: list[dict]) -> dict[str, dict]:
    """Colour, marker and weight of each system."""
    looks, mine = {}, 0
    for name in order_of(rows):
        system = name.partition(" ")[0]
        if system in COLOURS:
            looks[name] = {"color": COLOURS[system], "marker": MARKERS[system], "linewidth": 1.4, "markersize": 4}
            looks[name]["linestyle"] = "--" if system == "fa3_ratio" else "-"
        else:
            looks[name] = {
                "color": MINE[mine % len(MINE)],
                "marker": "oDP*X"[mine % 5],
                "linewidth": 2.2,
                "markersize": 5,
                "zorder": 3,
            }
            mine += 1
    return looks


def _legend(figure, axes):
    handles = {
        text: handle for axis in axes.flat for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


def _plain_log(axis):
    """Ticks 1 2 5 10 20 50 ... in plain digits."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_minor_formatter(NullFormatter())


def curves(data: dict, rows: list[dict]):
    """One panel for each headdim (and head grouping or batch) and mask."""
    short = data["suite"] == "short"
    name, scale = unit(data)
    groups = sorted({group(row) for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure, axes = _figure(len(masks), len(groups), max(6, 3.1 * len(groups)), 1.3 + 2.5 * len(masks), sharey=True)
    looks = _looks(rows)
    for line, causal in zip(axes, masks, strict=True):
        for axis, key in zip(line, groups, strict=True):
            panel = [row for row in rows if group(row) == key and row["causal"] == causal]
            for system in order_of(panel):
                mine = sorted(
                    (row["seqlen_q"], row["us"] if short else row["tflops"] * scale)
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
            if short:
                axis.set_yscale("log")
                _plain_log(axis.yaxis)
            else:
                axis.set_ylim(0, 1.06 * scale * max(row["tflops"] for row in rows))
        line[0].set_ylabel("µs a call" if short else name)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    what = f"Attention {PASSES[rows[0]['pass']]}" + (
        ", short sequences (less is better)" if short else " (more is better)"
    )
    _title(figure, data, what)
    _legend(figure, axes)
    return figure


def roofline(data: dict, rows: list[dict]):
    """Speed over FLOPs per byte of inputs and outputs; the roofs are the data sheet's where known, and what a product
    and a copy reached."""
    rows = [row for row in rows if row["system"] != "fa3_ratio"]
    name, scale = unit(data)
    figure, axes = _figure(1, 1, 8.5, 6)
    axis, looks = axes[0][0], _looks(rows)
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
    _plain_log(axis.yaxis)
    axis.set_xlabel("FLOP per byte of inputs and outputs")
    axis.set_ylabel(name)
    _title(figure, data, f"Attention {PASSES[rows[0]['pass']]} under the roofs")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def ladder(data: dict, rows: list[dict]):
    """Every rung as a bar, the first at the top, peers below."""
    name, scale = unit(data)
    rungs = [row for row in rows if row["system"] == "ours"]
    ordered = rungs + [row for row in rows if row["system"] != "ours"]
    figure, axes = _figure(1, 1, 8.5, 1.4 + 0.45 * len(ordered))
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
        _plain_log(axis.xaxis)
        axis.set_xlabel(f"{name}, logarithmic")
    else:
        axis.set_xlabel(name)
    log = axis.get_xscale() == "log"
    axis.set_xlim(min(values) / 2 if log else 0, max(values) * (2.2 if log else 1.12))
    what = "The backward ladder" if ordered[0]["pass"] == "bwd" else "The ladder"
    _title(figure, data, f"{what}: {shape_text(ordered[0])}")
    return figure


def bars(data: dict, rows: list[dict]):
    """varlen: systems side by side for each mix, one panel for each headdim and mask."""
    name, scale = unit(data)
    groups = sorted({(group(row), row["causal"]) for row in rows})
    figure, axes = _figure(1, len(groups), max(6, 2.9 * len(groups)), 3.9)
    looks, names = _looks(rows), order_of(rows)
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
    _title(figure, data, "Attention forward, packed sequences (more is better)")
    _legend(figure, axes)
    return figure


def reading(data: dict, rows: list[dict]):
    """TB/s of keys and values at every point, a bar for each system on the plain cache."""
    rows = [
        row for row in rows if row["system"] != "ours" or (row["cache_dtype"] == row["dtype"] and not row["page_size"])
    ]
    points = list(
        dict.fromkeys(tuple(row[x] for x in ("batch", "seqlen_k", "nheads", "nheads_k", "headdim")) for row in rows)
    )
    systems = list(dict.fromkeys(row["system"] for row in rows))
    figure, [[axis]] = _figure(1, 1, max(6, 0.9 * len(points)), 4.2)
    for i, system in enumerate(systems):
        mine = {
            tuple(r[x] for x in ("batch", "seqlen_k", "nheads", "nheads_k", "headdim")): r["tbps"]
            for r in rows
            if r["system"] == system
        }
        x = [j + (i - (len(systems) - 1) / 2) * 0.8 / len(systems) for j in range(len(points))]
        axis.bar(x, [mine.get(point, 0) for point in points], 0.8 / len(systems), label=label(system))
    names = [f"{batch} x {keys}\n{nheads}/{nheads_k} x {headdim}" for batch, keys, nheads, nheads_k, headdim in points]
    axis.set_xticks(range(len(points)), names, fontsize=7)
    axis.set_ylabel("TB/s")
    _title(figure, data, "One query token against a cache: keys and values read (more is better)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(systems))
    return figure


def products(data: dict, rows: list[dict]):
    """Speed over the framework's own product against the rows of x, a panel for each weight."""
    panels = linear.grouped(rows)
    figure, axes = _figure(math.ceil(len(panels) / 2), min(2, len(panels)), 9, 1.2 + 2.9 * math.ceil(len(panels) / 2))
    for axis, ((n, k), counts) in zip(axes.flat, panels.items(), strict=False):
        names = dict.fromkeys(name for found in counts.values() for name in found if name != "peer")
        for i, name in enumerate(name for name in names if not name.endswith("plain launch")):
            line = [(m, found["peer"]["us"] / found[name]["us"]) for m, found in counts.items() if name in found]
            axis.plot(*zip(*line, strict=True), color=MINE[i % len(MINE)], marker="oDP*X"[i % 5], label=name)
        axis.axhline(1, color="0.5", linewidth=1, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_ylim(bottom=0)
        axis.set_title(f"{n} x {k}")
        axis.set_xlabel("rows of x")
        axis.set_ylabel(f"speed over {data_label(rows)}")
    _title(figure, data, "Products with 4-bit weights over the same with 16-bit ones (more is better)")
    _legend(figure, axes)
    return figure


def data_label(rows: list[dict]) -> str:
    return next((label(row["system"]) for row in rows if row["system"] != "ours"), "the peer")


def steps(data: dict, rows: list[dict]):
    """Steps/s over position, a panel for each model and batch, a line for each dtype and attention."""
    panels = list(dict.fromkeys((row["model"], row["batch"]) for row in rows))
    dtypes = list(dict.fromkeys(step_dtype(row) for row in rows))  # a colour each, in all panels
    figure, axes = _figure(1, len(panels), max(6, 3.1 * len(panels)), 3.9)
    for axis, (model, batch) in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        for dtype in dict.fromkeys(step_dtype(row) for row in mine):
            color = LINES[dtypes.index(dtype) % len(LINES)]
            for kernel, line, marker in (("flash", "-", "o"), ("standard", "--", "v")):
                line_of = [row for row in mine if (step_dtype(row), row["kernel"]) == (dtype, kernel)]
                x, y = zip(*sorted((row["position"], row["steps_per_s"]) for row in line_of), strict=True)
                axis.plot(x, y, line, marker=marker, color=color, label=f"{kernel}, {dtype}", markersize=4)
        axis.set_title(f"{model}, batch {batch}")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("position")
    axes[0][0].set_ylabel("decode steps/s")
    _title(figure, data, "Whole models, one token a step (more is better)")
    _legend(figure, axes)
    return figure


def blocks(data: dict, rows: list[dict]):
    from . import block  # imports the whole model

    return block.picture(data, rows)


def overhead(data: dict, rows: list[dict]):
    """Microseconds of one small call."""
    figure, axes = _figure(1, 1, 8.5, 1.4 + 0.4 * len(rows))
    axis = axes[0][0]
    texts = [f"{row['arrays']}, {row['device']}: {label(row['system'])}, {row['call']}" for row in rows]
    colours = [MINE[0] if row["system"] == "ours" else "#9A9A9A" for row in rows]
    drawn = axis.barh(range(len(rows)), [row["us"] for row in rows], color=colours, height=0.7)
    axis.bar_label(drawn, [f" {row['us']:.1f}" for row in rows])
    axis.set_yticks(range(len(rows)), texts)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("µs a call, least is best")
    axis.set_xlim(right=max(row["us"] for row in rows) * 1.12)
    _title(figure, data, "The host's share of a call: one query, one key, headdim 64")
    return figure
