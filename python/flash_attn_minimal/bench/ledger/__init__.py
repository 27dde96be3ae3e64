"""The suite `ledger`: two libraries in turns of one run, on rows that stand for all suites, so that no change loses
speed unseen.

    bench --against build/old/libflash_attn_minimal.so    a library; with the Python of the checkout that it lies in
    bench --against ../old-checkout                       a checkout, its build/libflash_attn_minimal.so and its Python
    bench --against 4435f57                               a commit: compiled into build/against/4435f57 first

Each round times every row with each library, every time in a fresh process; the order within a round alternates.
Several GPUs work at once, each on all rows. The ratio of a row is the other library's time over ours: above 1, ours is
faster. The file keeps what earlier runs found for other commits, so it is the history of speed against one reference.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..._files import parse_json, read_bytes
from ..._library import path as library_path
from ..._progress import Progress
from ..._report import commit as this_commit
from ..._report import table as markdown_table
from ..figure import LINES, figure_of, set_title
from ..machine import BenchError, device_slug, load_average, open_machine
from ..suite import Outcome, Suite, register, rounded
from .rows import ROWS

ROUNDS = 4
BOUND = 0.985  # a ratio below is a loss: mend it, or explain it where the file of explanations says so
SAME = 0.05  # two answers may differ by this part of the result's mean magnitude: the order of sums is free
HERE = Path(__file__).resolve()
PYTHON = HERE.parents[3]


@dataclass(frozen=True)
class Library:
    """A library, and the folder from which its Python package is imported."""

    name: str
    file: Path
    python: Path


def ours() -> Library:
    return Library(this_commit() or "this library", Path(library_path()), PYTHON)


def found(asked: str) -> Library:
    """What --against names."""
    path = Path(asked)
    if path.is_file():
        return Library(asked, path.resolve(), _python_of(path.resolve()) or PYTHON)
    if path.is_dir():
        library = path.resolve() / "build" / "libflash_attn_minimal.so"
        if not library.is_file():
            raise BenchError(f"--against {asked}: this folder has no build/libflash_attn_minimal.so")
        python = path.resolve() / "python"
        if not (python / "flash_attn_minimal" / "__init__.py").is_file():
            raise BenchError(f"--against {asked}: this folder has no python/flash_attn_minimal")
        return Library(_commit_of(path) or asked, library, python)
    return _built(asked)


def _python_of(library: Path) -> Path | None:
    """The python folder of the checkout that holds a library."""
    for folder in library.parents:
        if (folder / "python" / "flash_attn_minimal" / "__init__.py").is_file():
            return folder / "python"
    return None


def _git(*words: str, folder: Path | None = None) -> str:
    folder = folder or PYTHON.parent
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise BenchError(f"git {' '.join(words)}: {done.stderr.strip() or 'failed'}")
    return done.stdout.strip()


def _commit_of(folder: Path) -> str | None:
    try:
        return _git("rev-parse", "--short=12", "HEAD", folder=folder)
    except (BenchError, OSError):
        return None


def _built(asked: str) -> Library:
    """The library of a commit, compiled with the commit's own build_and_run.sh into build/against/<commit>, where it
    stays for the next time."""
    root = PYTHON.parent
    if not (root / ".git").exists():
        raise BenchError(f"--against {asked}: neither a file nor a folder, and no repository here to find a commit in")
    try:
        name = _git("rev-parse", "--short=12", "--verify", f"{asked}^{{commit}}")
    except BenchError:
        raise BenchError(f"--against {asked}: neither a library, nor a folder, nor a commit") from None
    folder = root / "build" / "against" / name
    source, library = folder / "source", folder / "build" / "libflash_attn_minimal.so"
    if not library.is_file():
        if not (source / "CMakeLists.txt").is_file():
            _git("worktree", "prune")
            folder.mkdir(parents=True, exist_ok=True)
            _git("worktree", "add", "--force", "--detach", str(source), name)
        print(f"compiling {name} into {folder}", flush=True)
        env = os.environ | {"FLASH_ATTN_BUILD": str(folder / "build"), "FLASH_ATTN_VENV": str(folder / "venv")}
        env |= {"PYTHON": sys.executable}
        more = ["--all-kernels"] if "--all-kernels" in (source / "build_and_run.sh").read_text() else []
        if subprocess.run(["./build_and_run.sh", "build", *more], cwd=source, env=env).returncode:
            raise BenchError(f"--against {asked}: commit {name} does not compile here (its output is above)")
    return Library(name, library, source / "python")


# ---- running ----


@dataclass
class Times:
    """What the rounds found for one row: microseconds of each round, by side, on each GPU."""

    row: dict[str, Any]
    us: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # (gpu, "ours" or "other")
    answers: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def result(self) -> dict[str, Any] | None:
        """The row of the result: the ratio, and its spread over rounds and GPUs."""
        ratios, mine, other = [], [], []
        for (gpu, side), us in self.us.items():
            if side == "ours" and (theirs := self.us.get((gpu, "other"))):
                ratios += [b / a for a, b in zip(us, theirs, strict=False)]
                mine += us
                other += theirs
        if not ratios:
            return None
        return {
            "us": median(mine), "other_us": median(other), "ratio": median(ratios),
            "ratio_min": min(ratios), "ratio_max": max(ratios), "rounds": len(ratios),
        }  # fmt: skip

    def differs(self) -> str | None:
        """How the two answers differ, or None."""
        mine, other = self.answers.get("ours"), self.answers.get("other")
        if not mine or not other or len(mine) != len(other):
            return None if not mine or not other else "results of different number"
        size = max(abs(mine[0]), abs(other[0]), 1e-6)
        worst = max(abs(a - b) for a, b in zip(mine, other, strict=True))
        return None if worst <= SAME * size + 0.02 * max(map(abs, mine)) else f"answers differ by {worst:.3g}"


def _process(library: Library, rows: list[dict], about: dict[str, Any], gpu: str | None) -> Iterable[dict[str, Any]]:
    """One fresh process over all rows."""
    env = os.environ | {"PYTHONPATH": str(library.python), "FLASH_ATTN_LIBRARY": str(library.file)}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    env = {name: value for name, value in env.items() if not name.endswith("_KERNEL")}
    process = subprocess.Popen(
        [sys.executable, str(HERE.with_name("worker.py")), json.dumps(about)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    said, errors = process.communicate("".join(json.dumps(row) + "\n" for row in rows), timeout=900)
    found = [json.loads(line) for line in said.splitlines()]
    if process.returncode or not found:
        raise BenchError(f"{library.name}: {' '.join(errors.split())[-300:] or f'exit status {process.returncode}'}")
    return found[1:]


def run(options, protocol) -> tuple[Any, Outcome]:
    if not options.against:
        raise BenchError("--suite ledger needs --against LIBRARY, CHECKOUT or COMMIT")
    machine = open_machine(options.device, None)
    mine, other = ours(), found(options.against)
    rows = ROWS[machine.device]()
    if options.row:
        rows = [row for row in rows if any(word in row["name"] for word in options.row)]
        if not rows:
            raise BenchError(f"--row {','.join(options.row)}: no row has this in its name")
    gpus = _gpus(options.devices) if machine.device == "cuda" else [None]
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    about = {"device": machine.device, "bursts": 3, "burst_s": 0.004 if options.quick else 0.01}
    times = [Times(row) for row in rows]
    outcome, lock, failed = Outcome(load=load_average()), threading.Lock(), []
    print(f"{machine.title}: {mine.name} against {other.name}, {len(rows)} rows, {rounds} rounds", flush=True)
    with Progress(2 * rounds * len(gpus), "ledger") as progress:

        def work(gpu: str | None) -> None:
            try:
                for number in range(rounds):
                    for side in ("ours", "other") if number % 2 == 0 else ("other", "ours"):
                        answers = _process(mine if side == "ours" else other, rows, about, gpu)
                        with lock:
                            _keep(times, answers, gpu or "", side)
                            progress.step(f"round {number + 1}, {side}" + (f", GPU {gpu}" if gpu else ""))
            except (BenchError, OSError, subprocess.SubprocessError, ValueError) as error:
                failed.append(str(error))

        threads = [threading.Thread(target=work, args=(gpu,), daemon=True) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise BenchError(failed[0])
    _report(times, mine, other, outcome)
    _earlier(outcome, _folder(options, machine), mine.name, other.name)
    return machine, outcome


def _gpus(asked: str | None) -> list[str]:
    from ..sweep import gpus

    return gpus(asked)


def _keep(times: list[Times], answers: Iterable[dict[str, Any]], gpu: str, side: str) -> None:
    for one, answer in zip(times, answers, strict=True):
        if "us" in answer:
            one.us.setdefault((gpu, side), []).append(answer["us"])
            one.answers[side] = answer["answer"]
        else:
            one.errors[side] = answer["error"]


def _report(times: list[Times], mine: Library, other: Library, outcome: Outcome) -> None:
    base = {"suite": "ledger", "system": "ours", "commit": mine.name, "against": other.name}
    base |= {"date": datetime.date.today().isoformat()}
    for one in times:
        row = one.row
        about = base | {"row": row["name"], "family": row["family"], "pass": "bwd" if row.get("backward") else "fwd"}
        about |= {"dtype": row["dtype"]}
        if "ours" in one.errors:
            outcome.wrong += 1
            print(f"{row['name']}: FAILED: {one.errors['ours']}", flush=True)
            outcome.left_out.append({"system": "ours", "shape": row["name"], "reason": one.errors["ours"]})
        elif result := one.result():
            if why := one.differs():
                outcome.wrong += 1
                about |= {"wrong": True, "reason": why}
                print(f"{row['name']}: {why}", flush=True)
            outcome.rows.append(rounded(about | result))
        else:
            reason = one.errors.get("other", "no time")
            outcome.left_out.append({"system": "ours", "shape": row["name"], "reason": f"{other.name}: {reason}"})


def _folder(options, machine) -> Path:
    from ..report import default_folder

    return options.output or default_folder(device_slug(machine))


def _earlier(outcome: Outcome, folder: Path, mine: str, other: str) -> None:
    """Puts the rows of other pairs of libraries, which the folder's file has, before today's."""
    file = folder / "ledger.json"
    if not file.is_file():
        return
    try:
        data = parse_json(read_bytes("--output", file))
        kept = [row for row in data["rows"] if (row["commit"], row["against"]) != (mine, other)]
    except (KeyError, TypeError, ValueError) as error:
        backup = file.with_suffix(".json.unread")
        shutil.copyfile(file, backup)
        print(f"{file} is not a ledger ({error}); it was kept as {backup}", file=sys.stderr)
        return
    outcome.rows[:0] = kept


# ---- the table and the picture ----


def geometric(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _pairs(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Rows by (commit, against), the oldest first."""
    pairs: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        pairs.setdefault((row["commit"], row["against"]), []).append(row)
    return pairs


def table(data: dict, rows: list[dict]) -> list[str]:
    pairs = _pairs(rows)
    families = list(dict.fromkeys(row["family"] for row in rows))
    lines = [
        "Time of the reference over the time of the commit: above 1, the commit is faster. ledger_notes.md, beside",
        "this file, explains a loss that stays.",
        "",
    ]
    lines += ["## By family", ""]
    body = []
    for (name, against), mine in pairs.items():
        cells = []
        for family in families:
            ratios = [row["ratio"] for row in mine if row["family"] == family]
            cells.append(f"{geometric(ratios):.3f}" if ratios else "")
        worst = min(mine, key=lambda row: row["ratio"])
        body.append([mine[0]["date"], name, against, *cells, f"{worst['ratio']:.3f} {worst['row']}"])
    lines += markdown_table(["date", "commit", "reference", *families, "least"], body)
    if not pairs:
        return lines
    (name, against), newest = list(pairs.items())[-1]
    lines += ["", f"## {name} against {against}, row by row", ""]
    losses = [row for row in newest if row["ratio"] < BOUND]
    lines += [
        f"{len(newest)} rows, mean {geometric([row['ratio'] for row in newest]):.3f}; below {BOUND}: {len(losses)}.",
        "",
    ]
    body = [
        [
            row["row"],
            f"{row['other_us']:.4g}",
            f"{row['us']:.4g}",
            f"{'**' * (row['ratio'] < BOUND)}{row['ratio']:.3f}{'**' * (row['ratio'] < BOUND)}",
            f"{row['ratio_min']:.3f} .. {row['ratio_max']:.3f}",
        ]
        for row in newest
    ]
    return lines + markdown_table(
        ["row", f"{against}, us", f"{name}, us", "ratio", "least .. largest of the rounds"], body
    )


def picture(data: dict, rows: list[dict]):
    """The families' means over the commits that were measured against the first reference of the file."""
    pairs = _pairs(rows)
    reference = next(iter(pairs))[1]
    commits = [(name, mine) for (name, against), mine in pairs.items() if against == reference]
    figure, [[axis]] = figure_of(1, 1, 9, 4.8)
    families = list(dict.fromkeys(row["family"] for _, mine in commits for row in mine))
    for number, family in enumerate(families):
        points = []
        for place, (_, mine) in enumerate(commits):
            if ratios := [row["ratio"] for row in mine if row["family"] == family]:
                points.append((place, geometric(ratios)))
        style = {"linestyle": ("-", "--", ":")[number // len(LINES) % 3]}
        axis.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            color=LINES[number % len(LINES)],
            label=family,
            **style,
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.axhline(BOUND, color="black", linewidth=0.6, linestyle=":")
    axis.set_xticks(range(len(commits)), [f"{name[:7]}\n{mine[0]['date'][5:]}" for name, mine in commits])
    axis.set_ylabel(f"time of {reference[:12]} over time of the commit")
    handles, texts = axis.get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside right center", fontsize=8)
    set_title(figure, data, f"Speed against {reference[:12]}, mean of each family's rows (more is better)")
    return figure


register(
    Suite(
        name="ledger",
        about="needs --against: two libraries in turns, on rows that stand for all suites; the ratio of each row\n"
        "and its history",
        options=frozenset({"device", "devices", "against", "row", "rounds", "quick", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
        titled=False,
        how="median over rounds, each round a fresh process for each library, in turns",
        checked="the two libraries' answers compared in a few places",
    )
)
