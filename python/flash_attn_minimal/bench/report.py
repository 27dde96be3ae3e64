"""The result file and the Markdown table made from it. The file is one JSON object: machine, date, commit, command,
rows, left_out."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from .._files import parse_json, read_bytes
from .._library import BadArgument, load
from . import fa3, linear, small_ops
from .machine import SHORT, BenchError, Meter, cores, cpu_model
from .systems import LABELS, MODES

PASSES = {"fwd": "forward", "bwd": "backward", "step": "decode step", "decode": "decode", "w4": "product"}
PASSES |= {"block": "Transformer block", "model": "decode step"}
BUSY = 0.5  # other processes running for each core, before ours start, from which on CPU numbers are suspect


def result(suite: str, command: str, machine, outcome) -> dict:
    """The object that goes into the file."""
    about = machine.describe()
    if machine.device == "cuda":
        about["driver"] = outcome.driver or Meter(machine).driver
        if outcome.conditions:
            about["sm_clock_mhz"], about["power_w"] = outcome.conditions
    elif outcome.load is not None and outcome.load > BUSY * cores():
        about["load"] = round(outcome.load, 1)
    about["host"] = f"{cpu_model()}, {cores()} cores"
    about["library"] = f"{__version__}, {load().fa_build_info().decode()}"
    whole = {
        "machine": {key: value for key, value in about.items() if value is not None},
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command,
        "suite": suite,
        "rows": outcome.rows,
        "left_out": outcome.left_out,
    }
    return {key: value for key, value in whole.items() if value is not None}


def commit() -> str | None:
    """The commit of the repository that this package lies in, and whether the sources differ from it; or None."""
    here = Path(__file__).resolve().parent
    for folder in here.parents:
        if (folder / "cuda" / "flash_attn.h").is_file() and (folder / ".git").exists():
            git = ["git", "-C", str(folder)]
            try:
                head = subprocess.run(
                    [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
                )
                clean = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "cuda", "python", "CMakeLists.txt"])
            except (OSError, subprocess.CalledProcessError):
                return None
            return head.stdout.strip() + ("" if clean.returncode == 0 else " with changes")
    return None


def write(data: dict, folder: Path) -> list[Path]:
    """<suite>.json, then the table and the pictures beside it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{data['suite']}.json"
        lines = ",\n".join(json.dumps(row) for row in data["rows"])
        head = json.dumps({**data, "rows": None}, indent=1)
        file.write_text(head.replace('"rows": null', f'"rows": [\n{lines}\n]' if lines else '"rows": []') + "\n")
    except OSError as error:
        raise BenchError(f"cannot write to {folder}: {error.strerror}") from None
    return [file, *draw(data, file)]


class NotAResult(BenchError, BadArgument):
    """A file is no result of `bench`; the text names the file and says why."""


@contextlib.contextmanager
def _result(file: Path) -> Iterator[None]:
    """What the tables and pictures stumble over is the file's fault: they are made of fields that it should have."""
    try:
        yield
    except OSError as error:
        raise NotAResult(f"--plot-only {file}: {error.strerror}") from None
    except LookupError as error:
        raise NotAResult(f"--plot-only {file}: not a result of `bench`: it lacks {error}") from None
    except BadArgument as error:
        raise NotAResult(f"--plot-only: {error}") from None
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
        raise NotAResult(f"--plot-only {file}: not a result of `bench`: {error}") from None


def read(file: Path) -> dict:
    with _result(file):
        data = parse_json(read_bytes("file", file))
        if not (isinstance(data, dict) and data.keys() >= {"suite", "machine", "date", "command", "rows"}):
            raise ValueError("it has no suite, machine, date, command and rows")
        markdown(data, [])
    return data


def redraw(file: Path) -> list[Path]:
    """Table and pictures again, from a file."""
    data = read(file)
    with _result(file):
        return draw(data, file)


def draw(data: dict, file: Path) -> list[Path]:
    """The Markdown table, and the pictures where matplotlib is installed."""
    from . import plots

    pictures = plots.draw(data, file) if plots.available() else []
    table = file.with_suffix(".md")
    table.write_text(markdown(data, pictures))
    return [table, *pictures]


# ---- what the tables and the pictures share ----


def device_name(data: dict) -> str:
    machine = data["machine"]
    return machine.get("gpu") or machine["host"]


def dtypes(data: dict) -> str:
    return ", ".join(
        dict.fromkeys(SHORT.get(row["dtype"], row["dtype"]) for row in data["rows"] if row.get("pass") in PASSES)
    )


def attention_rows(data: dict) -> list[dict]:
    """The rows that have a time and are attention, or a step of a model."""
    return [row for row in data["rows"] if row.get("pass") in PASSES and "us" in row]


def series(row: dict) -> str:
    """Which line of a picture or a table a row belongs to: the system, or the kernel when it was asked for by name, and
    what else sets it apart."""
    name = row["kernel"] if row.get("forced") else row["system"]
    return (
        name
        + "".join(f" {mode}" for mode in MODES.values() if mode in row)
        + " bf16" * ((row["suite"], row["dtype"]) == ("fp8", "bfloat16"))
    )


def label(name: str) -> str:
    name, _, mode = name.partition(" ")
    return LABELS.get(name, name) + (mode and f", {mode}")


def group(row: dict) -> tuple:
    """Rows of one panel: (headdim, nheads, nheads_k, batch) with what does not tell panels apart left at 0."""
    grouped = (row["nheads"], row["nheads_k"]) if row["nheads"] != row["nheads_k"] else (0, 0)
    return (grouped[0] > 0, row["headdim"], *grouped, row["batch"] if row["suite"] == "short" else 0)


def group_name(key: tuple) -> str:
    _, headdim, nheads, nheads_k, batch = key
    name = f"headdim {headdim}"
    if nheads:
        name += f", {nheads}/{nheads_k} heads"
    return name + (f", batch {batch}" if batch else "")


def unit(data: dict) -> tuple[str, float]:
    """TFLOP/s on a GPU, GFLOP/s on a CPU."""
    return ("TFLOP/s", 1.0) if data["machine"].get("gpu") else ("GFLOP/s", 1e3)


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def order_of(rows: list[dict]) -> list[str]:
    """Ours first, then the peers, standard attention last."""
    mine = dict.fromkeys(series(row) for row in rows if row["system"] == "ours")
    places = {series(row): [*LABELS, row["system"]].index(row["system"]) for row in rows if row["system"] != "ours"}
    return [*mine, *sorted(places, key=lambda name: places[name])]


# ---- Markdown ----


def markdown(data: dict, pictures: list[Path]) -> str:
    suite, rows = data["suite"], [*attention_rows(data), *fa3.rows(data)]
    shown = dtypes(data)
    title = (
        f"# {suite}: {device_name(data)}"
        + (f", {shown}" if shown and suite != "overhead" else "")
        + f", {data['date']}"
    )
    lines = [
        title,
        "",
        f"`{data['command']}`" + (f" at commit {data['commit']}" if "commit" in data else ""),
        "",
        conditions(data),
        "",
    ]
    for picture in pictures:
        lines += [f"![{picture.stem.replace('_', ' ')}]({picture.name})", ""]
    makers = {
        "ladder": ladder_table,
        "backward_ladder": ladder_table,
        "overhead": overhead_table,
        "llama": llama_table,
        "ops": small_ops.table,
        "prefill": prefill_table,
        "decode": decode_table,
        "linear": linear.table,
        "block": block_table,
    }
    lines += makers.get(suite, curves_table)(data, rows)
    roofs = [row for row in data["rows"] if row.get("pass") in ("linear", "copy") and "us" in row]
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


def conditions(data: dict) -> str:
    """One sentence on how it was measured."""
    machine = data["machine"]
    versions = [f"{key} {machine[key]}" for key in ("driver", "cuda", "torch", "cudnn", "cupy") if key in machine]
    parts = [", ".join([machine["host"], *versions])]
    if "sm_clock_mhz" in machine:
        parts.append(
            f"SM clock {machine['sm_clock_mhz']:.0f} MHz and {machine['power_w']:.0f} W (medians over the run)"
        )
    if "load" in machine:
        parts.append(f"THE MACHINE WAS BUSY (load {machine['load']} before the start), which blurs every number here")
    checked = [row for row in data["rows"] if "max_err" in row and row["system"] == "ours" and not row.get("wrong")]
    if data["suite"] == "block":
        parts.append("median of the bursts, all weights in shuffled turns, host time of queued launches")
        parts.append("every result compared first with that of the same numbers in 16-bit matrices")
        checked = []
    elif data["suite"] == "llama":
        parts.append("median of the bursts, both attentions in shuffled turns, host time of queued steps")
        parts.append("logits of both compared first")
        return "; ".join(parts) + "."
    if data["suite"] == "overhead":
        parts.append("host time of one call, median of the bursts, systems in shuffled turns")
    else:
        parts.append("median of the bursts, systems in shuffled turns" + (", device time" if "gpu" in machine else ""))
    if checked:
        worst = max(row["max_err"] / row["err_budget"] for row in checked)
        parts.append(
            f"every answer checked against float64 first, the worst error of ours at {worst:.0%} of its budget"
        )
    return "; ".join(parts) + "."


def table(head: list[str], body: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join(" --- " for _ in head) + "|",
        *("| " + " | ".join(line) + " |" for line in body),
    ]


def curves_table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each panel and system, one column for each seqlen (or mix of lengths); then ours over the peers."""
    short, varlen = data["suite"] == "short", data["suite"] == "varlen"
    name, scale = unit(data)
    axis = "mix" if varlen else "seqlen_q"
    columns = list(dict.fromkeys(row[axis] for row in rows)) if varlen else sorted({row[axis] for row in rows})
    against = {"the best peer": lambda row: row["system"] != "ours"}
    if short:
        against["standard attention"] = lambda row: row["system"] == "standard"
    if any(row["system"].startswith("fa3") for row in rows):
        against["FlashAttention-3"] = lambda row: row["system"].startswith("fa3")

    # Ours by mode; a deterministic pass beside the plain one is there for its price.
    plain = [row for row in rows if row["system"] == "ours" and not any(mode in row for mode in MODES.values())]
    fast = [row for row in rows if "fast_accum" in row]
    ours = {"": plain, ", fast_accum": fast} if fast else {"": plain}

    body: list[list[str]] = []
    ratios: dict[str, list[float]] = {name + mode: [] for name in against for mode in ours}
    sustained = any("sustained_us" in row for row in rows)
    for key in sorted({group(row) for row in rows}):
        for causal in (False, True):
            panel = [row for row in rows if group(row) == key and row["causal"] == causal]
            start = [group_name(key), "causal" if causal else "full"]
            for system in order_of(panel):
                mine = {row[axis]: row for row in panel if series(row) == system}
                values = [mine[c]["us"] if short else mine[c]["tflops"] * scale for c in columns if c in mine]
                cells = iter(number(value) for value in values)
                body.append([*start, label(system), *(next(cells) if c in mine else "" for c in columns)])
                if sustained and not short:
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
    what = "Microseconds, less is better" if short else f"{name}, more is better"
    lines = [f"## {what}", "", *table(["shape", "mask", "system", *map(str, columns)], body)]
    for rival, found in ratios.items():
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            text = f"geometric mean {mean:.3f}, least {min(found):.3f}, {sum(x >= 1 for x in found)} at 1 or more"
            lines += ["", f"Speed over {rival} at {len(found)} shapes: {text}."]
    if any(row["system"] == "fa3_ratio" for row in rows):
        lines += ["", f"FlashAttention-3 did not run here: {fa3.NOTE}."]
    if varlen:
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
    return [f"## {shape}", "", *table(["rung", "us", name, "over the first", "spread", "max error"], body)]


def shape_text(row: dict) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"headdim {row['headdim']}, {mask}, batch {row['batch']} x {row['nheads']} heads, seqlen {row['seqlen_q']}"


def overhead_table(data: dict, rows: list[dict]) -> list[str]:
    body = [
        [
            row["arrays"],
            row["device"],
            label(row["system"]),
            row["call"],
            f"{row['us']:.1f}",
            f"{row['us_min']:.1f}",
            f"{row['us_spread']:.1f}",
        ]
        for row in rows
    ]
    return [
        "## One query, one key, headdim 64",
        "",
        *table(["arrays", "device", "system", "call", "us", "least", "spread"], body),
    ]


def step_dtype(row: dict) -> str:
    """fp32, or fp32/fp16 for float32 matrices with a float16 cache."""
    kinds = dict.fromkeys((row["dtype"], row["cache_dtype"]))
    return "/".join(SHORT.get(kind, kind) for kind in kinds)


def decode_table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each point: microseconds and TB/s of every system, then ours over the fastest peer and the read."""

    def name(row):
        if row["system"] != "ours":
            return row["system"]
        page = f"paged {row['page_size']}" * bool(row["page_size"])
        return " ".join(filter(None, ["ours", page, SHORT.get(row["cache_dtype"], row["cache_dtype"])]))

    names = list(dict.fromkeys(map(name, rows)))
    points: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = tuple(row[x] for x in ("batch", "seqlen_k", "nheads", "nheads_k", "headdim"))
        points.setdefault(key, {})[name(row)] = row
    body = []
    for (batch, keys, nheads, nheads_k, headdim), found in points.items():
        cells = [f"{found[n]['us']:.1f} ({found[n]['tbps']:.2f})" if n in found else "" for n in names]
        mine = found.get(names[0], {}).get("us")
        peers = [row["us"] for row in found.values() if row["system"] not in ("ours", "read")]
        over = f"{min(peers) / mine:.2f}" if mine and peers else ""
        share = f"{found['read']['us'] / mine:.2f}" if mine and "read" in found else ""
        body.append([str(batch), str(keys), f"{nheads}/{nheads_k}", str(headdim), *cells, over, share])
    labels = [LABELS.get(n, n) for n in names]
    head = ["batch", "keys", "heads", "headdim", *labels, "**speed over the best peer**", "**share of the read**"]
    return ["## Microseconds of a call (TB/s of keys and values)", "", *table(head, body)]


def llama_table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each model, dtype and batch, steps/s at each position; then what flash attention gains."""
    positions = sorted({row["position"] for row in rows})
    body = []
    names = list(dict.fromkeys((row["model"], step_dtype(row), row["batch"]) for row in rows))
    for name in names:
        mine = [row for row in rows if (row["model"], step_dtype(row), row["batch"]) == name]
        found = {(row["kernel"], row["position"]): row for row in mine}
        start = [*map(str, name)]
        for kernel in ("flash", "standard"):
            mine = [found.get((kernel, position)) for position in positions]
            body.append([*start, kernel, *(number(row["steps_per_s"]) if row else "" for row in mine)])
            if kernel == "flash":
                body.append([*start, "of the limit", *(f"{row['share']:.0%}" if row else "" for row in mine)])
        pairs = [(found.get(("flash", p)), found.get(("standard", p))) for p in positions]
        gains = [f"{standard['us'] / flash['us']:.2f}" if flash and standard else "" for flash, standard in pairs]
        body.append([*start, "**flash over standard**", *gains])
    head = ["model", "matrices/cache", "batch", "attention", *(f"position {position}" for position in positions)]
    return ["## Decode steps/s of the whole batch, more is better", "", *table(head, body)]


def block_table(data: dict, rows: list[dict]) -> list[str]:
    from . import block  # imports the whole model

    return block.table(data, rows)


def prefill_table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each shape, one column for each place of the keys."""
    name, scale = unit(data)
    keys = ("headdim", "batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k")
    lines: list[str] = []
    for latent, title in (
        (False, f"Chunks of queries, {name}"),
        (True, f"Latent attention, TB/s of the cache and {name}"),
    ):
        shapes: dict[tuple, dict[str, str]] = {}
        chosen = [row for row in rows if (row["headdim"] != row["headdim_v"]) == latent]
        for row in chosen:
            speed = number(row["tflops"] * scale)
            found = shapes.setdefault(tuple(row[key] for key in keys), {})
            found[row["layout"]] = f"{row['tbps']:.2f}, {speed}" if latent else speed
        layouts = list(dict.fromkeys(row["layout"] for row in chosen))
        body = [
            [*map(str, shape[:4]), f"{shape[4]}/{shape[5]}", *(found.get(layout, "") for layout in layouts)]
            for shape, found in shapes.items()
        ]
        if body:
            lines += [f"## {title}", "", *table(["headdim", "batch", "queries", "keys", "heads", *layouts], body), ""]
    return lines[:-1]


def default_folder(slug: str) -> Path:
    """docs/benchmarks/<device> where such a folder of results exists, else benchmarks/<device>."""
    docs = Path("docs") / "benchmarks"
    return (docs if docs.is_dir() else Path("benchmarks")) / slug


def relative(path: Path) -> str:
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)
