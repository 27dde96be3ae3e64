"""Helpers for tables and pictures: selecting, naming and ordering the rows of a result."""

from __future__ import annotations

from .machine import SHORT
from .suite import SUITES
from .systems import LABELS, MODES

ROOFS = ("linear", "copy")  # passes that show what the machine can do; they are not results


def device_name(data: dict) -> str:
    machine = data["machine"]
    return machine.get("gpu") or machine["host"]


def dtypes(data: dict) -> str:
    return ", ".join(
        dict.fromkeys(SHORT.get(row["dtype"], row["dtype"]) for row in data["rows"] if row.get("pass") not in ROOFS)
    )


def timed(data: dict) -> list[dict]:
    """The results that have a time."""
    return [row for row in data["rows"] if row.get("pass") not in ROOFS and "us" in row]


def series(row: dict) -> str:
    """The name of the line of a picture or table that a row belongs to: the system, or the kernel if it was asked for
    by name; then the mode, and the dtype if it is not the suite's."""
    name = row["kernel"] if row.get("forced") else row["system"]
    usual = SUITES[row["suite"]].dtype
    other = f" {SHORT[row['dtype']]}" if usual and row["dtype"] != usual else ""
    return name + "".join(f" {mode}" for mode in MODES if mode in row) + other


def label(name: str) -> str:
    name, _, mode = name.partition(" ")
    return LABELS.get(name, name) + (mode and f", {mode}")


def unit(data: dict) -> tuple[str, float]:
    """TFLOP/s on a GPU, GFLOP/s on a CPU."""
    return ("TFLOP/s", 1.0) if data["machine"].get("gpu") else ("GFLOP/s", 1e3)


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def order_of(rows: list[dict]) -> list[str]:
    """Names of the series: ours first, then the peers, standard attention last."""
    mine = dict.fromkeys(series(row) for row in rows if row["system"] == "ours")
    places = {series(row): [*LABELS, row["system"]].index(row["system"]) for row in rows if row["system"] != "ours"}
    return [*mine, *sorted(places, key=lambda name: places[name])]
