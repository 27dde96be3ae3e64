"""The files of an experiment: <name>.json, its page <name>.md, and pictures. The page's text is made from the rows, so
that its numbers are those of the table."""

from __future__ import annotations

from pathlib import Path

from flash_attn_minimal._core.files import parse_json, quoted, read_bytes

from ..bench import figure
from ..bench.machine import BenchError
from ..bench.report import a_result, encoded, machine_parts
from ..bench.report import result as bench_result
from ..report import STYLE
from .experiment import EXPERIMENTS, results, roofs

FIELDS = ("experiment", "machine", "date", "command", "rows", "left_out")


def result(name: str, command: str, machine, outcome, portable: bool) -> dict:
    """The object that goes into the file."""
    data = bench_result(name, command, machine, outcome)
    data = {("experiment" if key == "suite" else key): value for key, value in data.items()}
    if portable:
        data["portable"] = True
    return data


def write(data: dict, folder: Path) -> list[Path]:
    """Writes <name>.json, and the page and the pictures beside it. Returns their paths."""
    file = save(data, folder)
    return [file, *draw(data, file)]


def save(data: dict, folder: Path) -> Path:
    """Writes only <name>.json. The file is complete at any time, because the new file replaces the old one
    atomically."""
    file = folder / f"{data['experiment']}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(encoded(data))
        part.replace(file)
    except OSError as error:
        raise BenchError(f"cannot write to {folder}: {error.strerror}") from None
    return file


def read(file: Path) -> dict:
    with a_result(file, "experiment"):
        data = parse_json(read_bytes("file", file))
        if not (isinstance(data, dict) and data.keys() >= set(FIELDS)):
            raise ValueError(f"it has no {', '.join(FIELDS[:-1])} and {FIELDS[-1]}")
        if data["experiment"] not in EXPERIMENTS:
            raise ValueError(f"experiment={quoted(data['experiment'])} is not one of {', '.join(EXPERIMENTS)}")
        page(data, [])
    return data


def redraw(file: Path) -> list[Path]:
    data = read(file)
    with a_result(file, "experiment"):
        return draw(data, file)


def draw(data: dict, file: Path) -> list[Path]:
    """Writes the page, and the pictures if matplotlib is installed. Returns their paths."""
    pictures = _pictures(data, file) if figure.available() else []
    text = file.with_suffix(".md")
    text.write_text(page(data, pictures))
    return [text, *pictures]


def _pictures(data: dict, file: Path) -> list[Path]:
    import matplotlib

    rows = results(data)
    if not rows:
        return []
    paths = []
    with matplotlib.rc_context(STYLE):
        for suffix, maker in EXPERIMENTS[data["experiment"]].pictures.items():
            drawn = maker(data, rows)
            if drawn is None:  # these rows have nothing to draw
                continue
            path = file.with_name(f"{file.stem}{suffix}.png")
            drawn.savefig(path, metadata={"Software": None})
            paths.append(path)
    return paths


def place(data: dict) -> str:
    """The machine of a result, for titles."""
    if data.get("portable"):
        return "any machine"
    return data["machine"].get("gpu") or data["machine"]["host"]


def set_title(drawn, data: dict, what: str) -> None:
    drawn.suptitle(f"{what}\n{place(data)} · {data['date']}", fontsize=12)


def page(data: dict, pictures: list[Path]) -> str:
    experiment, rows = EXPERIMENTS[data["experiment"]], results(data)
    lines = [
        f"# {experiment.name}: {place(data)}, {data['date']}",
        "",
        f"`{data['command']}`" + (f" at commit {data['commit']}" if "commit" in data else ""),
        "",
    ]
    if "stopped" in data:
        lines += [f"**The run ended early ({data['stopped']}): this is what it had found.**", ""]
    lines += ["## Question", "", experiment.question, "", "## Method", "", experiment.method, ""]
    if not data.get("portable"):
        lines += ["; ".join(filter(None, [*machine_parts(data["machine"]), _checked(rows)])) + ".", ""]
    for picture in pictures:
        lines += [f"![{picture.stem.replace('_', ' ')}]({picture.name})", ""]
    if rows or experiment.may_be_empty:
        lines += ["## Result", "", *experiment.table(data, rows), ""]
        if found := experiment.findings(data, rows):
            lines += ["## What one sees", "", *(f"* {sentence}" for sentence in found), ""]
    else:
        lines += ["Nothing was measured.", ""]
    lines += _roofs(data)
    wrong = [row for row in data["rows"] if row.get("wrong")]
    if wrong:
        lines += ["## Wrong answers", "", *(f"* {row}" for row in wrong), ""]
    if data["left_out"]:
        lines += ["## Left out", ""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for item in data["left_out"]:
            reasons.setdefault((item["system"], item["reason"]), []).append(item["shape"])
        for (system, reason), shapes in reasons.items():
            where = shapes[0] if len(shapes) == 1 else f"{len(shapes)} times, first {shapes[0]}"
            lines.append(f"* {system} ({where}): {reason}")
        lines.append("")
    return "\n".join(lines)


def _checked(rows) -> str:
    checked = [row["max_err"] / row["err_budget"] for row in rows if row.get("err_budget")]
    return (
        f"every answer checked against float64 before its time was taken, the worst error at {max(checked):.0%} of "
        "its budget" if checked else ""
    )  # fmt: skip


def _roofs(data: dict) -> list[str]:
    found = roofs(data)
    texts = []
    if "linear" in found:
        row = found["linear"]
        texts.append(f"the product {row['m']} x {row['n']} x {row['k']} reached {speed(row['tflops'])}")
    if "copy" in found:
        texts.append(f"a copy {found['copy']['tbps'] * 1e3:.0f} GB/s")
    return [f"In the same run, through the same framework, {' and '.join(texts)}.", ""] if texts else []


def speed(tflops: float) -> str:
    return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.1f} GFLOP/s"


def size(count: float) -> str:
    """Bytes in the largest decimal unit that keeps a digit before the point."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"
