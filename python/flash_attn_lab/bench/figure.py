"""Shared parts of the pictures. Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers differ,
too. Pictures are made to be read at the width of a README."""

from __future__ import annotations

import importlib.util
import sys

from .rows import device_name, dtypes, order_of

COLOURS = {"cudnn": "#0072B2", "fa2": "#009E73", "torch": "#0072B2", "standard": "#7F7F7F"}
COLOURS |= {"fa3": "#000000", "fa4": "#7B3294", "efficient": "#0072B2", "standard_tf32": "#333333"}
MINE = ("#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442")
LINES = (*MINE, "#0072B2", "#009E73", "#000000")
MARKERS = {
    "cudnn": "s",
    "fa2": "^",
    "torch": "s",
    "standard": "v",
    "fa3": "d",
    "fa4": "p",
    "efficient": "s",
    "standard_tf32": "<",
}
MASKS = {False: "full", True: "causal"}


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def say_if_missing() -> None:
    """For commands that have written a result."""
    if not available():
        print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)


def figure_of(rows, columns, width, height, sharey=False):
    """A new figure and its axes, without pyplot or a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def set_title(figure, data: dict, what: str):
    figure.suptitle(f"{what}\n{device_name(data)} · {dtypes(data)} · {data['date']}", fontsize=12)


def looks_of(rows: list[dict]) -> dict[str, dict]:
    """Colour, marker and line width of each system."""
    looks, mine = {}, 0
    for name in order_of(rows):
        system = name.partition(" ")[0]
        if system in COLOURS:
            looks[name] = {"color": COLOURS[system], "marker": MARKERS[system], "linewidth": 1.4, "markersize": 4}
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


def legend(figure, axes):
    handles = {
        text: handle for axis in axes.flat for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


def plain_log(axis):
    """Sets the ticks 1 2 5 10 20 50 ... in plain digits."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_minor_formatter(NullFormatter())
