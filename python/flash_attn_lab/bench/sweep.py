"""The suite `sweep`: random calls as users make them, each beside every peer that takes it. Tables of named shapes say
how fast those shapes are; the sweep says what a call costs that nobody has tuned for.

Each GPU has worker processes that take turns; a CPU has one. A worker that dies or hangs is replaced, and its call
asked for again without peers: it has failed where that fails, too. Without --seed each run draws calls of its own.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean as geometric
from statistics import median
from typing import Any

from flash_attn_minimal._commands.report import cores, plural
from flash_attn_minimal._core.files import parse_json, read_bytes

from ..children import python_path
from ..command import interruptible, wait_for
from ..progress import Progress
from ..report import table as markdown_table
from .calls.call import FEW, OPTIONS, BadCall, Call, drawn
from .child import Child, Lost
from .figure import LINES, figure_of, plain_log, set_title
from .machine import BenchError, gpus, library_has_cuda, load_average
from .rows import label, number, unit
from .suite import Outcome, Suite, register
from .timing import Protocol

SECONDS = 300
BURST_S = {"cuda": 0.002, "cpu": 0.004}
CHECK_EVERY = 3  # each third call is checked against float64, where that takes at most a second
PER_GPU = 2, 8  # worker processes, which take turns: while one has the GPU, the others' peers compile their plans
CALL_S = 120  # of a call, before it counts as hanging
WORST = 100
CLASSES = {"D <= 64": (0, 64), "D 65 .. 128": (65, 128), "D > 128": (129, 1 << 30)}
BEHIND = 0.7  # a peer's time over ours below which a call is far behind


class Worker(Child):
    """A process for one device, which on a GPU it shares with others."""

    def __init__(self, about: dict[str, Any], gpu: str | None):
        env = dict(os.environ)
        if gpu:  # the check of an answer in NumPy is to leave cores to the other workers
            env["CUDA_VISIBLE_DEVICES"] = gpu
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // about["workers"])))
        env["PYTHONPATH"] = python_path()
        super().__init__([sys.executable, "-m", f"{__package__}.sweep_worker", json.dumps(about)], env)
        if "ready" not in self.said:
            self.end()
            raise Lost(self.said["refused"])
        self.ready = self.said["ready"]

    def ask(self, order: dict[str, Any], seconds: float = CALL_S) -> dict[str, Any]:
        return super().ask(order, seconds)


class Share:
    """The calls of a sweep, handed out one by one to the threads of the workers; their rows as they come."""

    def __init__(self, options, calls: Iterable[Call] | None, ends: float, outcome: Outcome, progress: Progress):
        self.lock = threading.Lock()
        self.options, self.outcome, self.progress, self.ends = options, outcome, progress, ends
        self.given = iter(calls) if calls is not None else None
        self.number = 0
        self.interrupted = False
        self.errors: list[str] = []

    def next(self, ready: dict[str, Any]) -> tuple[int, Call] | None:
        with self.lock:
            if self.interrupted or time.monotonic() >= self.ends:
                return None
            if self.options.calls and self.number >= self.options.calls:
                return None
            number, self.number = self.number, self.number + 1
            if self.given is not None:
                call = next(self.given, None)
                return None if call is None else (number, call)
        return number, drawn(self.options.seed, number, ready["device"], tuple(ready["dtypes"]))

    def take(self, number: int, call: Call, found: dict[str, Any]) -> None:
        with self.lock:
            outcome = self.outcome
            if row := found.get("row"):
                outcome.rows.append(row | {"number": number})
                peers = ", ".join(f"{name} {us:g}" for name, us in row["peers"].items())
                ratio = f" {row['ratio']:.2f}:" if "ratio" in row else ""
                self.progress.step(f"{call}:{ratio} {row['kernel']} {row['us']:g} us{peers and ', '}{peers}")
            elif row := found.get("wrong"):
                outcome.wrong += 1
                outcome.rows.append(row | {"number": number})
                self.progress.say(f"{call}: WRONG: {row['kernel']}, error {row['max_err']:.3g}")
            else:
                reason = found.get("refused") or found["failed"]
                outcome.left_out.append({"system": "ours", "shape": str(call), "reason": reason})
                if "failed" in found:
                    outcome.wrong += 1
                    self.progress.say(f"{call}: FAILED: {reason}")

    def lost_with_peers(self, call: Call, why: str) -> None:
        with self.lock:
            self.outcome.left_out.append({"system": "peers", "shape": str(call), "reason": f"{why} (not so without)"})
            self.progress.say(f"{call}: without peers: {why}")


def _work(share: Share, about: dict[str, Any], gpu: str | None, machines: dict[str | None, dict]) -> None:
    """A thread: one worker after the other on one device."""
    worker = None
    try:
        worker = Worker(about, gpu)
        machines[gpu] = worker.ready
        while order := share.next(worker.ready):
            number, call = order
            found, lost = {}, ""
            for peers in (True, False):
                worker = worker or Worker(about, gpu)
                try:
                    found = worker.ask({"call": str(call), "check": number % CHECK_EVERY == 0, "peers": peers})
                    break
                except Lost as error:
                    worker.end()
                    worker, lost = None, str(error)
                    found = {"failed": lost}
            if lost and "failed" not in found:
                share.lost_with_peers(call, lost)
            share.take(number, call, found)
            if found.get("ends") and worker:
                worker.end()
                worker = None
            worker = worker or Worker(about, gpu)
    except Lost as error:
        with share.lock:
            share.errors.append(str(error))
            if machines:  # the others go on
                share.progress.say(f"{f'GPU {gpu}' if gpu else 'the CPU'}: no worker could start: {error}")
    finally:
        if worker:
            worker.end()


def run(options, protocol: Protocol, *, by_name: bool = False) -> tuple[Any, Outcome]:
    """by_name: beside the library's kernels instead of peers, as the suite dispatch does."""
    earlier = _earlier(options.before) if options.before else {}
    calls = None
    try:
        if options.call:
            calls = [Call.parse(options.call)]
        elif options.before and options.seed is None:
            calls = list(map(Call.parse, earlier))
    except BadCall as error:
        named = f"--call {error}" if options.call else f"--before {options.before}: {error}"
        raise BenchError(named) from None
    outcome, machines = Outcome(load=load_average()), {}
    if options.seed is None:
        options.seed = 0 if calls else random.SystemRandom().randrange(1_000_000)
        outcome.chosen += [] if calls else ["--seed", str(options.seed)]
    device = options.device or ("cuda" if library_has_cuda() else "cpu")
    named = gpus(options.devices) if device == "cuda" else [None]
    if not named:
        raise BenchError(f"--device {device}: the library sees no GPU")
    if options.devices and device == "cpu":
        raise BenchError(f"--devices {options.devices}: there is no GPU here")
    per_device = 1
    if device == "cuda" and not options.call:  # two cores each
        per_device = min(max(cores() // (2 * len(named)), PER_GPU[0]), PER_GPU[1])
    about = {
        "device": device, "framework": options.framework, "threads": options.threads, "seed": options.seed,
        "rounds": options.rounds or (3 if options.quick or device == "cuda" else 5),
        "burst_s": 0.002 if options.quick else BURST_S[device],
        "workers": len(named) * per_device, "by_name": by_name,
    }  # fmt: skip
    seconds = options.seconds or SECONDS
    total = min(len(calls), options.calls or len(calls)) if calls else options.calls or 0
    all_calls = bool(options.call or (options.calls and not options.seconds))
    what = f"{total} calls" if all_calls else f"{seconds} s" + (f" of at most {total} calls" if total else "")
    what += f", seed {options.seed}" if not calls else ""
    title = "dispatch" if by_name else "sweep"
    print(f"{plural(len(named) * per_device, 'worker')}, {what}", flush=True)
    with (
        Progress(total, title, every=0.0 if options.call else 5.0) as progress,
        tempfile.TemporaryDirectory() as turns,
        interruptible(),
    ):
        ends = math.inf if all_calls else time.monotonic() + seconds
        share = Share(options, calls, ends, outcome, progress)
        threads = []
        for gpu in named:
            mine = about | ({"turn": str(Path(turns, gpu))} if gpu and per_device > 1 else {})
            work = share, mine, gpu, machines
            threads += [threading.Thread(target=_work, args=work, daemon=True) for _ in range(per_device)]
        for thread in threads:
            thread.start()
        try:
            wait_for(threads)
        except KeyboardInterrupt as interrupt:
            outcome.failure, outcome.stopped = interrupt, "interrupted"
            share.interrupted = True
            print("interrupted: the calls under way are finished, then what was measured is written", file=sys.stderr)
            wait_for(threads, 2 * CALL_S)
    if not machines:
        raise BenchError("; ".join(dict.fromkeys(share.errors)) or "interrupted before a worker had started")
    with share.lock:
        outcome.rows.sort(key=lambda row: row["number"])
        for row in outcome.rows:
            if row["call"] in earlier:
                row["before_us"] = earlier[row["call"]]
    return Machine(next(iter(machines.values())), len(machines)), outcome


def _earlier(file: Path) -> dict[str, float]:
    """us of ours by call, from an earlier result."""
    try:
        data = parse_json(read_bytes("--before", file))
        return {row["call"]: row["us"] for row in data["rows"] if "us" in row}
    except OSError as error:
        raise BenchError(f"--before {file}: {error.strerror}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise BenchError(f"--before {file}: not a result of the suite sweep: {error}") from None


class Machine:
    """Describes the workers' machine in the result."""

    def __init__(self, ready: dict[str, Any], count: int):
        self.device, self._about, self.count = ready["device"], ready["machine"], count
        self.name, self.gpu_id = ready["machine"].get("gpu", ""), None
        self.framework = ready["framework"]

    def describe(self) -> dict[str, Any]:
        about = {key: value for key, value in self._about.items() if value is not None}
        return about | ({"workers": self.count} if self.device == "cuda" else {})


# ---- the tables ----


def option_of(row: dict) -> str:
    """The row of the table that a call belongs to."""
    call = Call.parse(row["call"])
    kind = "packed" if call.packed is not None else "cache" if call.is_cache else ""
    options = ["bias" if name.startswith("bias") else name for name in call.options]
    if len(options) > 1:
        options = ["two options"]
    return " ".join(filter(None, [kind, *(options or ["bare"])]))


def class_of(row: dict) -> str:
    call = Call.parse(row["call"])
    width = max(call.headdim, call.headdim_v)
    return next(name for name, (low, high) in CLASSES.items() if low <= width <= high)


def behind(ratios: list[float]) -> float:
    return sum(ratio < 1 for ratio in ratios) / len(ratios)


def summary(ratios: list[float]) -> str:
    if not ratios:
        return ""
    return f"{geometric(ratios):.2f} ({min(ratios):.2f}, {behind(ratios):.0%}, {len(ratios)})"


def precision(row: dict) -> str:
    """The part of the tables that a call belongs to. Peers take a call in fp8 as bfloat16, which is another call."""
    if row["dtype"] == "float32":
        return "float32, tf32 allowed" if "tf32" in row["call"].split() else "float32"
    if row["dtype"] == "float8_e4m3fn":
        return "fp8, the peers in bfloat16"
    return f"16 bits, 1 to {FEW} queries" if Call.parse(row["call"]).few else f"16 bits, more than {FEW} queries"


def overall(rows: list[dict]) -> str:
    """A sentence on all calls that a peer takes, too."""
    ratios = [row["ratio"] for row in rows if "ratio" in row and row["dtype"] != "float8_e4m3fn"]
    if not ratios:
        return f"{len(rows)} calls; no peer took one."
    far = sum(ratio < BEHIND for ratio in ratios) / len(ratios)
    return (
        f"{len(rows)} calls, of which {len(ratios)} have a peer: the best peer's time over ours is "
        f"{geometric(ratios):.2f} in the geometric mean; ours is slower in {behind(ratios):.0%}, below {BEHIND} in "
        f"{far:.0%}, {min(ratios):.2f} at the least."
    )


def _by_class(rows: list[dict], cell) -> list[str]:
    """A table: options down, pass and class of head dim across. `cell` makes the text of the rows of one place."""
    columns = [(way, name) for way in ("fwd", "bwd") for name in CLASSES]
    options = sorted(
        {option_of(row) for row in rows},
        key=lambda name: (name.split()[0] in ("packed", "cache"), name != "bare", name),
    )
    body = []
    for option in options:
        mine = [row for row in rows if option_of(row) == option]
        body.append([option, *(cell([r for r in mine if (r["pass"], class_of(r)) == column]) for column in columns)])
    names = {"fwd": "forward", "bwd": "backward"}
    return markdown_table(["", *(f"{names[way]}, {name}" for way, name in columns)], body)


def _by_option(served: list[dict]) -> list[str]:
    """A table: each option, alone or with another, over all dtypes and head dims."""
    body = []
    for option in ("bare", *OPTIONS):
        mine = [row for row in served if option in (Call.parse(row["call"]).options or ("bare",))]
        if mine:
            cells = [summary([row["ratio"] for row in mine if row["pass"] == way]) for way in ("fwd", "bwd")]
            body.append([option, *cells])
    lines = ["", "## By option, alone or with another, all dtypes", ""]
    return [*lines, *markdown_table(["", "forward", "backward"], body)] if body else []


def table(data: dict, rows: list[dict]) -> list[str]:
    served = [row for row in rows if "ratio" in row]
    lines = [overall(rows)]
    if served:
        lines += [
            "",
            "Each cell: geometric mean of the best peer's time over ours (least, share of calls in which ours is",
            "slower, calls). Above 1 ours is faster.",
        ]
    for title in sorted({precision(row) for row in served}):  # 16 bits first
        part = [row for row in served if precision(row) == title]
        lines += ["", f"## {title}", "", *_by_class(part, lambda found: summary([row["ratio"] for row in found]))]
    lines += _by_option(served)
    name, scale = unit(data)
    large = [row for row in rows if row["us"] > 200 and Call.parse(row["call"]).seqlen_q > 512 or name == "GFLOP/s"]
    if large:
        what = "calls of more than 200 us and 512 rows" if scale == 1 else "all calls"
        lines += ["", f"## Ours alone: median {name} of {what}", ""]
        lines += _by_class(large, lambda found: number(median(row["tflops"] for row in found) * scale) if found else "")
    kernels = sorted({row["kernel"] for row in served})
    if kernels:
        body = []
        for kernel in kernels:
            ratios = [row["ratio"] for row in served if row["kernel"] == kernel]
            body.append(
                [
                    kernel,
                    str(len(ratios)),
                    f"{geometric(ratios):.2f}",
                    f"{min(ratios):.2f}",
                    f"{behind(ratios):.0%}",
                ]
            )
        lines += [
            "",
            "## By the kernel that serves it",
            "",
            *markdown_table(["kernel", "calls", "mean", "least", "behind"], body),
        ]
    for key, text in (
        ("not_captured", "could not be captured in a CUDA graph, so the host's work is in their times, and they are "
         "compared with their like alone"),
        ("peers_wrong", "gave another answer or failed on the way, and are left out of these calls"),
    ):  # fmt: skip
        found = [row for row in rows if row.get(key)]
        names = ", ".join(sorted({label(name) for row in found for name in row[key]}))
        if found:
            lines += ["", f"{names} {text}: {len(found)} calls, such as `{found[0]['call']}`."]
    lines += _since(rows)
    if served:
        lines += ["", f"## The {min(WORST, len(served))} worst", ""]
        lines += ['`bench --suite sweep --call "LINE"` times one of them again.', ""]
        for row in sorted(served, key=lambda row: row["ratio"])[:WORST]:
            peers = ", ".join(f"{label(peer)} {us:g}" for peer, us in row["peers"].items())
            lines.append(f"* {row['ratio']:.2f} `{row['call']}` {row['kernel']}: {row['us']:g} us; {peers}")
    return lines


def _since(rows: list[dict]) -> list[str]:
    """The lines that compare calls with an earlier result."""
    shared = [(row["before_us"] / row["us"], row) for row in rows if "before_us" in row]
    if not shared:
        return []
    by_option: dict[str, list[float]] = {}
    for gain, row in shared:
        by_option.setdefault(f"{row['pass']} {option_of(row)}", []).append(gain)
    body = [
        [name, str(len(gains)), f"{geometric(gains):.3f}", f"{min(gains):.2f}"]
        for name, gains in sorted(by_option.items())
    ]
    lines = [
        "",
        "## Against the earlier result",
        "",
        f"{len(shared)} calls are in both: earlier time over today's {geometric([gain for gain, _ in shared]):.3f}.",
        "",
    ]
    lines += markdown_table(["", "calls", "mean", "least"], body)
    worst = sorted(shared, key=lambda pair: pair[0])[:20]
    return [
        *lines,
        "",
        *(
            f"* {gain:.2f} `{row['call']}`: {row['before_us']:g} us, now {row['us']:g}"
            for gain, row in worst
            if gain < 0.97
        ),
    ]


def picture(data: dict, rows: list[dict]):
    """The best peer's time over ours, over the work of the call; a colour an option."""
    figure, [axes] = figure_of(1, 2, 11, 5, sharey=True)
    served = [row for row in rows if "ratio" in row]
    order = ["bare", "causal", "window", "dropout", "bias", "key_mask", "pair_mask", "causal_mask"]
    markers = "oooossvv"
    for axis, way in zip(axes, ("fwd", "bwd"), strict=True):
        groups: dict[str, list[dict]] = {}
        for row in served:
            if row["pass"] == way:
                option = option_of(row).split()[-1]
                groups.setdefault(option if option in order else "other", []).append(row)
        for option in [name for name in (*order, "other") if name in groups]:
            index = order.index(option) if option in order else -1
            colour = LINES[index] if index >= 0 else "#9A9A9A"
            work = [row["tflops"] * row["us"] * 1e6 for row in groups[option]]
            ratios = [row["ratio"] for row in groups[option]]
            text = option.replace("_", " ")
            axis.plot(work, ratios, markers[index], color=colour, markersize=3, alpha=0.6, label=text)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("FLOP of the call")
        axis.set_title({"fwd": "forward", "bwd": "backward"}[way])
        axis.set_yscale("log")
        plain_log(axis.yaxis)
    axes[0].set_ylabel("best peer's time over ours (above 1: ours is faster)")
    set_title(figure, data, f"{len(served)} random calls beside the best peer")
    handles = {t: h for axis in axes for h, t in zip(*axis.get_legend_handles_labels(), strict=True)}
    handles = {
        name.replace("_", " "): handles[name.replace("_", " ")]
        for name in (*order, "other")
        if name.replace("_", " ") in handles
    }
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(9, len(handles)), markerscale=2
        )
    return figure


register(
    Suite(
        name="sweep",
        about="random calls as users make them: shapes, dtypes, options and pairs of options, forward and backward,\n"
        "packed sequences and caches, each beside every peer that takes it; several GPUs share them",
        options=frozenset(
            {
                "device",
                "devices",
                "framework",
                "threads",
                "rounds",
                "quick",
                "seed",
                "seconds",
                "calls",
                "call",
                "before",
                "output",
            }
        ),
        run=run,
        table=table,
        pictures={"": picture},
        titled=False,
        checked=f"each {CHECK_EVERY}rd answer checked against float64, where that takes at most a second",
    )
)
