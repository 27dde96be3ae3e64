"""The measurements of `quality` as tables on the terminal, as JSON and Markdown files, and as a picture."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama.checkpoint import STACKED
from flash_attn_minimal.llama.quantize import size_text

from ..report import STYLE, commit, show_table, table

COLOURS = {"nvfp4": "#D55E00", "mxfp4": "#0072B2", "int4": "#009E73"}  # from Okabe and Ito's palette
MARKERS = {"nvfp4": "o", "mxfp4": "s", "int4": "^"}
LAST = list(STACKED)[-1]  # the last matrix of a layer


def tables(data: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, body) of each table."""
    text, formats = data["text"], data["formats"]
    total = len(next(iter(formats.values()))["matrices"])
    body = []
    for row in data["rows"]:
        compared = row["weights"] != "16 bit"
        body.append(
            [
                row["weights"],
                f"{row['bits']:.2f}",
                size_text(row["bytes"]),
                f"{row['kept']} of {total}" if "mixed" in row["weights"] else "",
                f"{row['perplexity']:.4f}",
                f"{row['rise']:+.3f} ± {row['rise_error']:.3f}" if compared else "",
                f"{row['divergence']:.5f}" if compared else "",
            ]
        )
    head = ["weights", "bits each", "whole model", "kept 16-bit", "perplexity", "rise, %", "divergence, nats"]
    title = f"Perplexity of {text['judged_with']} tokens, windows of {text['window']}, {text['source']}"
    first = title, head, body

    head, body = ["layer", "matrix"], []
    for weights in formats:
        head += [weights, "block"]
    for rows in zip(*(found["matrices"] for found in formats.values()), strict=True):
        layer, matrix = rows[0]["layer"], rows[0]["matrix"]
        cells = [str(layer), matrix]
        for row in rows:
            cells += [f"{row['error']:.4f}", "kept " * row["kept"] + f"{row['block_error']:.4f}"]
        body.append(cells)
        if matrix == LAST:
            body.append([str(layer), "all"])
            for found in formats.values():
                body[-1] += ["", f"{found['blocks'][layer]:.4f}"]
    title = f"Error of each matrix, and of its block with it alone in 4 bits (kept: mixed, {data['budget']:g} %)"
    return [first, (title, head, body)]


def show(data: dict[str, Any]) -> None:
    print(data["model"])
    for title, head, body in tables(data):
        show_table(title, head, body)


def write(data: dict[str, Any], file: Path) -> list[Path]:
    """Writes the JSON file, and a Markdown file with the tables beside it."""
    whole = {"date": datetime.date.today().isoformat(), "commit": commit(), **data}
    lines = [f"# 4-bit weights of {data['model']}", "", f"`{data['command']}`", ""]
    for title, head, body in tables(data):
        lines += [f"## {title}", "", *table(head, body), ""]
    try:
        file.write_text(json.dumps(whole, indent=1) + "\n")
        file.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise BadArgument(f"report {str(file)!r}: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise BadArgument(f"report {str(file)!r}: {error}") from None
    return [file, file.with_suffix(".md")]


def check_matplotlib(file: str) -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BadArgument(f"--picture {file} needs matplotlib (pip install matplotlib): {error}") from None


def draw(data: dict[str, Any], file: Path) -> Path:
    """Draws errors over the layers, the perplexity's rise for every variant, and what wider matrices gain."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    formats = data["formats"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(1, 3)
        for weights, found in formats.items():
            look = {"color": COLOURS[weights], "marker": MARKERS[weights]}
            layers = range(len(found["blocks"]))
            left.plot(layers, found["blocks"], label=f"{weights}, block", **look)
            mean = [_mean(m["error"] for m in found["matrices"] if m["layer"] == layer) for layer in layers]
            left.plot(layers, mean, linestyle=":", linewidth=1, markersize=3, label=f"{weights}, matrices", **look)
            points = [(100 * p["share"], max(p["divergence"], 0)) for p in found["curve"]]
            right.plot(*zip(*points, strict=True), label=weights, **look)
            share = sum(m["weights"] for m in found["matrices"] if m["kept"])
            share *= 100 / sum(m["weights"] for m in found["matrices"])
            right.axvline(share, color=COLOURS[weights], linestyle="--", linewidth=0.8)
        left.set(xlabel="layer", ylabel="relative error", title="Errors", xticks=range(len(found["blocks"])))
        left.set_ylim(bottom=0)
        right.set(
            xlabel="% of the weights in 16 bits, most harmful first",
            ylabel="divergence, nats",
            title=f"Mixed (dashed: chosen for {data['budget']:g} %)",
            yscale="log",
        )
        for axis in (left, right):
            axis.legend(fontsize=8)
        rows = [row for row in data["rows"] if "kept" in row]
        names = [f"{row['weights']}\n{row['bits']:.2f} bits" for row in rows]
        middle.barh(names, [row["rise"] for row in rows], color=[COLOURS[name.split()[0]] for name in names])
        middle.errorbar(
            [row["rise"] for row in rows], names, xerr=[row["rise_error"] for row in rows], fmt="none", ecolor="black"
        )
        middle.invert_yaxis()
        middle.axvline(0, color="black", linewidth=0.8)
        middle.set(xlabel="rise of the perplexity, %", title="Held-out text against 16 bit")
        middle.grid(axis="y", visible=False)
        figure.suptitle(f"4-bit weights of {data['model']}", fontsize=11)
        try:
            figure.savefig(file, metadata={"Software": None})
        except (OSError, ValueError) as error:  # such as an unknown suffix
            raise BadArgument(f"picture {str(file)!r}: {error}") from None
    return file


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
