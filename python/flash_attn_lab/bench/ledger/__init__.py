"""The suite `ledger`: two libraries in turns of one run, on rows that stand for all suites, so that no change loses
speed unseen.

    bench --against build/old/libflash_attn_minimal.so    a library; with the Python of the checkout that it lies in
    bench --against ../old-checkout                       a checkout, its build/libflash_attn_minimal.so and its Python
    bench --against 4435f57                               a commit: compiled into build/against/4435f57 first

Each round has two fresh processes, one for each library. They take turns row by row, so that both meet the same clock
and the same neighbours; who is first alternates. Several GPUs work at once, each on all rows. The ratio of a row is the
other library's time over ours: above 1, ours is faster. The file keeps what earlier runs found for other commits, so it
is the history of speed against one reference.
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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean as geometric
from statistics import median, stdev
from typing import Any

from flash_attn_minimal._core.files import parse_json, read_bytes
from flash_attn_minimal._core.library import path as library_path

from ...command import interruptible, wait_for
from ...progress import Progress
from ...report import commit as this_commit
from ...report import table as markdown_table
from ..check import largest
from ..child import Child, Lost
from ..figure import LINES, figure_of, set_title
from ..machine import BenchError, device_slug, gpus, load_average, open_machine
from ..report import DEFAULT_FOLDER
from ..suite import Outcome, Suite, register, rounded
from .rows import ROWS

ROUNDS = 4
ROW_S = 60  # of a row, before it counts as hanging
BOUND = 0.985  # a ratio below is a loss: mend it, or explain it where the file of explanations says so
SURE = 3  # standard errors between a ratio and 1, from which on a loss is not noise
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


def found(asked: str, device: str = "cuda") -> Library:
    """The library that --against names. A commit is compiled for `device`, for the CPU without GPU kernels."""
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
        return Library(_commit_of(path) or path.resolve().name, library, python)
    return _built(asked, device)


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
    """The commit of a checkout. A folder without a repository of its own may lie in another checkout, whose commit is
    not the folder's."""
    try:
        if _git("rev-parse", "--show-prefix", folder=folder):
            return None
        return _git("rev-parse", "--short=12", "HEAD", folder=folder)
    except (BenchError, OSError):
        return None


def _built(asked: str, device: str) -> Library:
    """The library of a commit, compiled with the commit's own build_and_run.sh into build/against/<commit> (for the CPU
    <commit>-cpu), where it stays for the next time."""
    root = PYTHON.parent
    if not (root / ".git").exists():
        raise BenchError(f"--against {asked}: neither a file nor a folder, and no repository here to find a commit in")
    try:
        name = _git("rev-parse", "--short=12", "--verify", f"{asked}^{{commit}}")
    except BenchError:
        raise BenchError(f"--against {asked}: neither a library, nor a folder, nor a commit") from None
    folder = root / "build" / "against" / (name if device == "cuda" else f"{name}-cpu")
    source, library = folder / "source", folder / "build" / "libflash_attn_minimal.so"
    if not library.is_file():
        if not (source / "CMakeLists.txt").is_file():
            _git("worktree", "prune")
            folder.mkdir(parents=True, exist_ok=True)
            _git("worktree", "add", "--force", "--detach", str(source), name)
        print(f"compiling {name} into {folder}", flush=True)
        env = os.environ | {"FLASH_ATTN_BUILD": str(folder / "build"), "FLASH_ATTN_VENV": str(folder / "venv")}
        env |= {"PYTHON": sys.executable}
        known = (source / "build_and_run.sh").read_text()
        more = [word for word in ("--all-kernels" if device == "cuda" else "--cpu-only",) if word in known]
        if subprocess.run(["./build_and_run.sh", "build", *more], cwd=source, env=env).returncode:
            raise BenchError(f"--against {asked}: commit {name} does not compile here (its output is above)")
    return Library(name, library, source / "python")


# ---- running ----


@dataclass
class Times:
    """The times of one row: microseconds by round, of each side, on each GPU."""

    row: dict[str, Any]
    us: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)  # (gpu, "ours" or "other")
    answers: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def result(self) -> dict[str, Any] | None:
        """The row of the result: the ratio, and its spread over rounds and GPUs."""
        ratios, mine, other = [], [], []
        for (gpu, side), us in self.us.items():
            theirs = self.us.get((gpu, "other"), {})
            for number in us.keys() & theirs.keys() if side == "ours" else ():
                ratios.append(theirs[number] / us[number])
                mine.append(us[number])
                other.append(theirs[number])
        if not ratios:
            return None
        found: dict[str, Any] = {"us": median(mine), "other_us": median(other), "ratio": median(ratios)}
        found |= {"ratio_min": min(ratios), "ratio_max": max(ratios), "rounds": len(ratios)}
        if len(ratios) > 1:  # the standard error of a median, were the ratios normally distributed
            found["ratio_error"] = 1.25 * stdev(ratios) / math.sqrt(len(ratios))
        return found

    def differs(self) -> str | None:
        """How the two answers differ, or None."""
        mine, other = self.answers.get("ours"), self.answers.get("other")
        if not mine or not other or len(mine) != len(other):
            return None if not mine or not other else "results of different number"
        size = max(abs(mine[0]), abs(other[0]), 1e-6)
        worst = largest(abs(a - b) for a, b in zip(mine, other, strict=True))
        return None if worst <= SAME * size + 0.02 * max(map(abs, mine)) else f"answers differ by {worst:.3g}"


class Turns:
    """The processes of a run, on all GPUs."""

    def __init__(self, mine: Library, other: Library, rows: list[dict], about: dict[str, Any]):
        self.sides, self.rows, self.about = {"ours": mine, "other": other}, rows, about
        self.times = [Times(row) for row in rows]
        self.lock = threading.Lock()
        self.ended = False
        self.children: set[Child] = set()
        self.failed: dict[str, str] = {}  # by GPU

    def work(self, gpu: str | None, turn: int, rounds: int, progress: Progress) -> None:
        """A thread: all rounds on one GPU. `turn`: which side begins, odd or even."""
        try:
            for number in range(rounds):
                answers = self.round(gpu, number + turn)
                with self.lock:
                    for side, found in answers.items():
                        for one, answer in zip(self.times, found, strict=True):
                            _keep(one, answer, gpu or "", side, number)
                progress.step(f"round {number + 1}" + (f", GPU {gpu}" if gpu else ""))
        except (BenchError, OSError, ValueError) as error:
            if not self.ended:
                self.failed[gpu or ""] = str(error)

    def round(self, gpu: str | None, turn: int = 0) -> dict[str, list[dict[str, Any]]]:
        """All rows, each with one side right after the other, in two fresh processes. Where a row ends a process, or
        hangs, its side goes on in another one from the next row on."""
        answers: dict[str, list[dict[str, Any]]] = {side: [] for side in self.sides}
        running: dict[str, Child] = {}
        try:
            for number, row in enumerate(self.rows):
                for side in list(self.sides)[:: 1 if (number + turn) % 2 == 0 else -1]:
                    if side not in running:
                        running[side] = self._child(self.sides[side], gpu)
                    try:
                        answer = running[side].ask(row, ROW_S)
                    except Lost as lost:
                        answer = {"error": str(lost), "ends": True}
                    if self.ended:
                        raise BenchError("interrupted")
                    answers[side].append(answer)
                    if answer.get("ends"):
                        self._end(running.pop(side))
        finally:
            for child in running.values():
                self._end(child)
        return answers

    def _child(self, library: Library, gpu: str | None) -> Child:
        paths = [str(library.python), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "FLASH_ATTN_LIBRARY": str(library.file)}
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        env = {name: value for name, value in env.items() if not name.endswith("_KERNEL")}
        command = [sys.executable, str(HERE.with_name("worker.py")), json.dumps(self.about)]
        try:
            child = Child(command, env)
        except Lost as lost:
            raise BenchError(f"{library.name}: {lost}") from None
        with self.lock:
            self.children.add(child)
        return child

    def _end(self, child: Child) -> None:
        with self.lock:
            self.children.discard(child)
        child.end()

    def stop(self) -> None:
        """Ends the processes under way: what they have found of this round does not count."""
        self.ended = True
        with self.lock:
            for child in self.children:
                child.process.kill()


def run(options, protocol) -> tuple[Any, Outcome]:
    if not options.against:
        raise BenchError("--suite ledger needs --against LIBRARY, CHECKOUT or COMMIT")
    machine = open_machine(options.device, None, "ledger")
    rows = ROWS[machine.device]()
    if options.row:
        rows = [row for row in rows if any(word in row["name"] for word in options.row)]
        if not rows:
            raise BenchError(f"--row {','.join(options.row)}: no row has this in its name")
    if options.devices and machine.device == "cpu":
        raise BenchError(f"--devices {options.devices}: there is no GPU here")
    named = gpus(options.devices) if machine.device == "cuda" else [None]
    mine, other = ours(), found(options.against, machine.device)
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    turns = Turns(
        mine, other, rows, {"device": machine.device, "bursts": 3, "burst_s": 0.004 if options.quick else 0.01}
    )
    outcome = Outcome(load=load_average())
    print(f"{machine.title}: {mine.name} against {other.name}, {len(rows)} rows, {rounds} rounds", flush=True)
    with Progress(rounds * len(named), "ledger") as progress, interruptible():
        threads = [
            threading.Thread(target=turns.work, args=(gpu, turn, rounds, progress), daemon=True)
            for turn, gpu in enumerate(named)
        ]
        for thread in threads:
            thread.start()
        try:
            wait_for(threads)
        except KeyboardInterrupt as interrupt:  # the rounds that are complete are written
            outcome.failure, outcome.stopped = interrupt, "interrupted"
            turns.stop()
            wait_for(threads, 30)
    complete = any(one.result() for one in turns.times)
    if not complete and outcome.failure:
        raise outcome.failure
    if not complete and turns.failed:
        raise BenchError(next(iter(turns.failed.values())))
    for gpu, why in turns.failed.items():  # the others have gone on
        print(f"GPU {gpu}: {why}", file=sys.stderr)
        outcome.left_out.append({"system": "ours", "shape": f"GPU {gpu}", "reason": why})
    _report(turns.times, mine, other, outcome)
    _earlier(outcome, _folder(options, machine), mine.name, other.name)
    return machine, outcome


def _keep(one: Times, answer: dict[str, Any], gpu: str, side: str, number: int) -> None:
    if "us" in answer:
        one.us.setdefault((gpu, side), {})[number] = answer["us"]
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
        if "ours" in one.errors and "other" in one.errors:  # nothing to compare, and nothing lost
            outcome.left_out.append({"system": "ours", "shape": row["name"], "reason": one.errors["ours"]})
        elif "ours" in one.errors:
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
    return options.output or DEFAULT_FOLDER / device_slug(machine)


def _earlier(outcome: Outcome, folder: Path, mine: str, other: str) -> None:
    """Puts what the folder's file has before today's rows: other pairs of libraries, and of this pair the rows that
    were not measured today."""
    file = folder / "ledger.json"
    if not file.is_file():
        return
    try:
        data = parse_json(read_bytes("--output", file))
        today = {(mine, other, row["row"]) for row in outcome.rows}
        kept = [row for row in data["rows"] if (row["commit"], row["against"], row["row"]) not in today]
        kept.sort(key=lambda row: (row["commit"], row["against"]) == (mine, other))  # this pair is the newest
    except (KeyError, TypeError, ValueError) as error:
        backup = file.with_suffix(".json.unread")
        shutil.copyfile(file, backup)
        print(f"{file} is not a ledger ({error}); it was kept as {backup}", file=sys.stderr)
        return
    outcome.rows[:0] = kept


# ---- the table and the picture ----


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
    sure = [row for row in losses if row["rounds"] >= ROUNDS and row["ratio"] + SURE * row["ratio_error"] < 1]
    errors = [row["ratio_error"] for row in newest if "ratio_error" in row]
    lines += [
        f"{len(newest)} rows, mean {geometric([row['ratio'] for row in newest]):.3f}; below {BOUND}: {len(losses)}, of "
        f"which {len(sure)} by more than {SURE} times their error (bold). The others may be noise: measure them again "
        "with --row and more --rounds.",
        "",
    ]
    if errors:
        lines += [
            f"The error of a ratio is {median(errors):.3f} in the median row: this run can tell a loss of "
            f"{SURE * median(errors):.1%} from noise there, not a smaller one.",
            "",
        ]
    body = [
        [
            row["row"],
            f"{row['other_us']:.4g}",
            f"{row['us']:.4g}",
            f"{'**' * (row in sure)}{row['ratio']:.3f}{'**' * (row in sure)}",
            f"{row['ratio_error']:.3f}" if "ratio_error" in row else "-",
            f"{row['ratio_min']:.3f} .. {row['ratio_max']:.3f}",
        ]
        for row in newest
    ]
    return lines + markdown_table(
        ["row", f"{against}, us", f"{name}, us", "ratio", "its error", "least .. largest of the rounds"], body
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
        how="median over rounds, each round a fresh process for each library, in turns row by row",
        checked="the two libraries' answers compared in a few places",
    )
)
