"""The result file and the Markdown table made from it. The file is one JSON object: machine, date, commit, command,
rows, left_out; and why the run ended early, if it did."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

from flash_attn_minimal import __version__
from flash_attn_minimal._commands.report import cores, cpu_model, plural
from flash_attn_minimal._core.files import parse_json, quoted, read_bytes
from flash_attn_minimal._core.library import load
from flash_attn_minimal.errors import BadArgument

from ..report import STYLE, commit
from . import figure
from .machine import BenchError, Meter
from .rows import ROOFS, device_name, dtypes, label, number, series, timed, unit
from .suite import SUITES

DEFAULT_FOLDER = Path("benchmarks")  # in the current folder; each device has one below it
BUSY = 0.5  # load per core before the run, above which CPU times are marked as disturbed


def result(suite: str, command: str, machine, outcome) -> dict:
    """The object that goes into the file."""
    about = machine.describe()
    if machine.device == "cuda":
        about["driver"] = outcome.driver or Meter(machine).driver
        if outcome.conditions:
            about["sm_clock_mhz"], about["power_w"] = outcome.conditions
    elif outcome.load is not None and outcome.load > BUSY * cores():
        about["load"] = round(outcome.load, 1)
    about["host"] = f"{cpu_model()}, {plural(cores(), 'core')}"
    about["library"] = f"{__version__}, {load().fa_build_info().decode()}"
    whole = {
        "machine": {key: value for key, value in about.items() if value is not None},
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command,
        "suite": suite,
        "rows": outcome.rows,
        "left_out": outcome.left_out,
        "stopped": outcome.stopped or None,
    }
    return {key: value for key, value in whole.items() if value is not None}


def encoded(data: dict) -> str:
    """The JSON text of a result, with one row a line."""
    lines = ",\n".join(json.dumps(row) for row in data["rows"])
    head = json.dumps({**data, "rows": None}, indent=1)
    return head.replace('"rows": null', f'"rows": [\n{lines}\n]' if lines else '"rows": []') + "\n"


def write(data: dict, folder: Path) -> list[Path]:
    """Writes <suite>.json, and the table and the pictures beside it. Returns their paths. A run that ended early
    becomes <suite>_part.json and leaves a whole result as it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{data['suite']}{'_part' * ('stopped' in data)}.json"
        file.write_text(encoded(data))
    except OSError as error:
        raise BenchError(f"cannot write to {folder}: {error.strerror}") from None
    return [file, *draw(data, file)]


class NotAResult(BenchError, BadArgument):
    """A file is not a result of the command. The text names both and says why."""


@contextlib.contextmanager
def a_result(file: Path, command: str = "bench") -> Iterator[None]:
    """Turns errors of the tables and pictures into NotAResult, because they read fields that every result has."""
    try:
        yield
    except OSError as error:
        raise NotAResult(f"--plot-only {file}: {error.strerror}") from None
    except LookupError as error:
        raise NotAResult(f"--plot-only {file}: not a result of `{command}`: it lacks {error}") from None
    except BadArgument as error:
        raise NotAResult(f"--plot-only: {error}") from None
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
        raise NotAResult(f"--plot-only {file}: not a result of `{command}`: {error}") from None


def read(file: Path) -> dict:
    with a_result(file):
        data = parse_json(read_bytes("file", file))
        if not (isinstance(data, dict) and data.keys() >= {"suite", "machine", "date", "command", "rows"}):
            raise ValueError("it has no suite, machine, date, command and rows")
        if data["suite"] not in SUITES:
            raise ValueError(f"suite={quoted(data['suite'])} is not one of {', '.join(SUITES)}")
        markdown(data, [])
    return data


def redraw(file: Path) -> list[Path]:
    """Makes the table and the pictures again from a result file."""
    data = read(file)
    with a_result(file):
        return draw(data, file)


def draw(data: dict, file: Path) -> list[Path]:
    """Writes the Markdown table, and the pictures if matplotlib is installed. Returns their paths."""
    pictures = _pictures(data, file) if figure.available() else []
    table = file.with_suffix(".md")
    table.write_text(markdown(data, pictures))
    return [table, *pictures]


def _pictures(data: dict, file: Path) -> list[Path]:
    """Writes all pictures of a result beside `file`. Returns their paths."""
    import matplotlib

    rows = timed(data)
    if not rows:
        return []
    paths = []
    with matplotlib.rc_context(STYLE):
        for suffix, maker in SUITES[data["suite"]].pictures.items():
            path = file.with_name(f"{file.stem}{suffix}.png")
            maker(data, rows).savefig(path, metadata={"Software": None})
            paths.append(path)
    return paths


# ---- Markdown ----


def markdown(data: dict, pictures: list[Path]) -> str:
    suite, rows = SUITES[data["suite"]], timed(data)
    shown = dtypes(data) if suite.titled else ""
    title = f"# {suite.name}: {device_name(data)}" + (f", {shown}" if shown else "") + f", {data['date']}"
    lines = [
        title,
        "",
        f"`{data['command']}`" + (f" at commit {data['commit']}" if "commit" in data else ""),
        "",
        conditions(data),
        "",
    ]
    if "stopped" in data:
        lines += [f"**The run ended early ({data['stopped']}): these are the rows that it had measured.**", ""]
    for picture in pictures:
        lines += [f"![{picture.stem.replace('_', ' ')}]({picture.name})", ""]
    lines += suite.table(data, rows)
    roofs = [row for row in data["rows"] if row.get("pass") in ROOFS and "us" in row]
    if roofs:
        name, scale = unit(data)
        texts = [
            f"the product {row['m']} x {row['n']} x {row['k']} {number(row['tflops'] * scale)} {name}" if "m" in row
            else f"a copy {number(row['tbps'] * (1 if scale == 1 else 1e3))} {'TB/s' if scale == 1 else 'GB/s'}"
            for row in roofs
        ]  # fmt: skip
        lines += ["", f"In the same run, through the same framework: {', '.join(texts)}."]
    wrong = [row for row in data["rows"] if row.get("wrong")]
    if wrong:
        lines += ["", "## Wrong answers", ""]
        lines += [
            f"* {series(row)}: "
            + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("suite", "system", "wrong"))
            for row in wrong
        ]
    if data.get("left_out"):
        lines += ["", "## Left out", ""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for item in data["left_out"]:
            reasons.setdefault((item["system"], item["reason"]), []).append(item["shape"])
        for (system, reason), shapes in reasons.items():
            where = shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes, the first {shapes[0]}"
            lines.append(f"* {label(system)} ({where}): {reason}")
    return "\n".join(lines) + "\n"


def machine_parts(machine: dict) -> list[str]:
    """Facts about the machine of a result, as parts of a sentence."""
    versions = [f"{key} {machine[key]}" for key in ("driver", "cuda", "torch", "cudnn", "cupy") if key in machine]
    parts = [", ".join([machine["host"], *versions])]
    if "sm_clock_mhz" in machine:
        parts.append(
            f"SM clock {machine['sm_clock_mhz']:.0f} MHz and {machine['power_w']:.0f} W (medians over the run)"
        )
    if "load" in machine:
        parts.append(f"THE MACHINE WAS BUSY (load {machine['load']} before the start), which blurs every number here")
    return parts


def conditions(data: dict) -> str:
    """One sentence on how the result was measured."""
    machine, parts = data["machine"], machine_parts(data["machine"])
    suite = SUITES[data["suite"]]
    parts.append(suite.how + (", device time" if suite.device_time and "gpu" in machine else ""))
    checked = [row for row in data["rows"] if "max_err" in row and row["system"] == "ours" and not row.get("wrong")]
    if suite.checked:
        parts.append(suite.checked)
    elif checked:
        worst = max(row["max_err"] / row["err_budget"] for row in checked)
        parts.append(
            f"every answer checked against float64 first, the worst error of ours at {worst:.0%} of its budget"
        )
    return "; ".join(parts) + "."


def relative(path: Path) -> str:
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)
