"""The suite `languages`: every rung of the ladder (`ladder/` of a checkout) that runs on this device, and the library's
own choice, on the same shapes.

A rung is checked against float64 before it is timed. Slow rungs are included, but must not use up the run: a rung is
left out of a shape where a call would take longer than CALL_LIMIT_S, judging by the rung's speed so far. A run that is
interrupted, or that reaches its limit of minutes, reports what it has measured.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flash_attn_minimal import flash_attn_func
from flash_attn_minimal._commands.report import plural
from flash_attn_minimal.errors import BadArgument, Unsupported

from ..report import table as markdown_table
from .attention import PEER_FACTOR
from .check import Exact
from .figure import LINES, MASKS, figure_of, plain_log, set_title
from .machine import SHORT, BenchError, first_line, library_has_cuda, load_average, open_machine
from .rows import label, number, unit
from .suite import Outcome, Suite, measuring, register, rounded, speed_text
from .systems import Inputs, Shape
from .timing import Protocol, interleave

DTYPES = {"cuda": ("bfloat16", "float8_e4m3fn", "float32", "float16"), "cpu": ("float32", "float8_e4m3fn")}
SEQLENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = {"cuda": (4096,), "cpu": (512,)}
PROBE_SEQLEN = {"cuda": 1024, "cpu": 256}
CALL_LIMIT_S = {"cuda": 0.2, "cpu": 2.0}
SLOW_S, SLOW_ROUNDS = 0.05, 3  # calls that take longer than SLOW_S get at most SLOW_ROUNDS bursts
MINUTES = 20.0
CACHES = ("FLASH_ATTN_LADDER_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # folders of what rungs compile
SHAPES = frozenset({"device", "dtype", "headdim", "seqlen", "mask", "batch", "tokens", "heads", "heads_k"})


# ---- the rungs and the shapes ----


def ladder() -> types.ModuleType:
    """The module ladder.rungs of the checkout that contains this package, or of the current folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "ladder" / "rungs.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module("ladder.rungs")
    raise BenchError(
        "--suite languages: the ladder is part of the repository and not of the installed package; run this in the "
        "root of a checkout"
    )


def ours(device: str, headdims: tuple[int, ...]) -> Any:
    """The library's default call as a rung."""
    kind, library = (importlib.import_module(f"ladder.{name}") for name in ("rung", "library"))
    return kind.Rung(
        name="ours",
        language="CUDA C++" if device == "cuda" else "C++",
        about="the library, with the kernel that it picks",
        device=device,
        files=(),
        load=functools.partial(library.calls, None, None, device),
        dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn"),
        headdims=headdims,
    )


def points(options, machine) -> list[Shape]:
    """Every shape, dtype and pass. The tutorial's shape comes first, then one dtype after another, small to large, so
    that a time limit cuts off the least important points."""
    gpu, quick = machine.device == "cuda", bool(options.quick)
    tokens = options.tokens or (16384 if gpu else 2048)
    nheads = options.heads or (16 if gpu else 4)
    masks = [mask == "causal" for mask in options.mask or (("full",) if quick else ("full", "causal"))]
    dtypes = [options.dtype] if options.dtype else DTYPES[machine.device][: 1 if quick else None]
    lengths = options.seqlen or [n for n in (QUICK_SEQLENS[machine.device] if quick else SEQLENS) if n <= tokens]

    def each(batch, seqlen, nheads, nheads_k, headdim, dtype):
        passes = (False,) if dtype == "float8_e4m3fn" else (False, True)
        shape = Shape(batch, seqlen, nheads, nheads_k, headdim, False, dtype)
        return [replace(shape, causal=causal, backward=gradients) for gradients in passes for causal in masks]

    shapes = []
    if not (options.tokens or options.batch or options.heads or options.seqlen or options.headdim):
        if not gpu:
            print(
                f"on a CPU: {plural(tokens, 'token')}, {plural(nheads, 'head')}; --tokens and --heads ask for more",
                flush=True,
            )
        story = (8, 1024, 12, 12, 64) if gpu else (1, 1024, 3, 3, 64)
        shapes += [shape for dtype in dtypes for shape in each(*story, dtype)]
    for dtype in dtypes:
        for headdim in options.headdim or (128,):
            for n in lengths:
                batch = options.batch or max(1, tokens // n)
                shapes += each(batch, n, nheads, options.heads_k or nheads, headdim, dtype)
    return shapes


class Arrays:
    """Enough sets of inputs that a launch does not find its set in the level-2 cache. Rungs allocate their outputs."""

    def __init__(self, machine, shape: Shape, seed: int):
        count = math.ceil(Inputs.L2_FACTOR * machine.l2_bytes / shape.bytes) if machine.l2_bytes else 1
        sizes = shape.sizes[:3]
        self.sets = []
        for i in range(max(1, min(Inputs.MAX_SETS, count))):
            arrays = [machine.random(size, shape.dtype, seed + 4 * i + j) for j, size in enumerate(sizes)]
            if shape.backward:
                dout = machine.random(sizes[0], shape.dtype, seed + 4 * i + 3)
                out, lse = flash_attn_func(*arrays, causal=shape.causal, return_lse=True)
                arrays = [dout, *arrays, out, lse]
            self.sets.append(arrays)

    def exact(self, machine, shape: Shape) -> Exact:
        if not shape.backward:
            return Exact(machine, shape, *self.sets[0])
        dout, q, k, v, *_ = self.sets[0]
        return Exact(machine, shape, q, k, v, dout)

    def launch(self, calls, shape: Shape) -> Callable[[int], Any]:
        """A function of i that runs the rung on input set i, and returns the answer that check.Exact judges."""
        if shape.backward:
            return lambda i: calls.backward(*self.sets[i % len(self.sets)], shape.causal)
        return lambda i: calls.forward(*self.sets[i % len(self.sets)], shape.causal)[0]


# ---- running them ----


class Stopped(BaseException):
    """Ends the run; its results so far are reported. A BaseException, so that a rung that catches Exception does not
    catch it."""


@dataclass
class Runner:
    """One rung during the whole run: it is loaded at most once, and its best speed so far is kept."""

    rung: Any
    unavailable: type[Exception]
    calls: Any = None
    reason: str | None = None  # why it cannot run here
    load_s: float = 0.0
    speed: dict[tuple[str, bool], float] = field(default_factory=dict)  # FLOP/s by dtype and pass
    first_s: dict[tuple[str, bool], float] = field(default_factory=dict)  # seconds of the first call beyond a later one

    def refusal(self, shape: Shape) -> str | None:
        """The reason why the rung does not serve a shape, or None. It is empty if the report need not mention it."""
        if shape.dtype not in self.rung.dtypes or shape.headdim not in self.rung.headdims:
            return ""
        if self.reason is None and self.calls is None:
            self._load()
        if self.reason is not None:
            return self.reason
        if shape.backward and self.calls.backward is None:
            return ""
        return self.rung.refusal(types.SimpleNamespace(**shape.keys()))

    def _load(self) -> None:
        start = time.perf_counter()
        try:
            self.calls = self.rung.load()
        except self.unavailable as error:
            self.reason = first_line(error)
        except Exception as error:  # such as a failed import; a broken rung must not end the run
            self.reason = f"load() raised {type(error).__name__}: {first_line(error)}"
        self.load_s = time.perf_counter() - start

    def probe(self, machine, shape: Shape) -> None:
        """Three calls on a small shape of the same dtype and pass give the cost of the first use and an estimate of the
        speed."""
        key = shape.dtype, shape.backward
        if key in self.speed:
            return
        small = replace(shape, batch=1, seqlen=min(PROBE_SEQLEN[machine.device], shape.seqlen), causal=False)
        launch = Arrays(machine, small, 0).launch(self.calls, small)
        took = []
        for _ in range(3):
            start = time.perf_counter()
            launch(0)
            machine.synchronize()
            took.append(time.perf_counter() - start)
        self.first_s[key] = max(0.0, took[0] - min(took[1:]))
        self.speed[key] = small.flops / min(took[1:])

    def seconds(self, shape: Shape) -> float:
        return shape.flops / self.speed[shape.dtype, shape.backward]

    def row(self, shape: Shape) -> dict[str, Any]:
        key = shape.dtype, shape.backward
        row = {"suite": "languages", "system": self.rung.name, "language": self.rung.language}
        row |= {"peer": True} if self.rung.peer else {}
        row |= {"pass": "bwd" if shape.backward else "fwd"} | shape.keys()
        row |= {"lines": self.rung.lines()} if self.rung.files else {}
        return row | {"compile_s": self.load_s + self.first_s[key]}


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Lets rungs compile into an empty temporary folder, so that compile_s is the time of a first use."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="ladder-", ignore_cleanup_errors=True) as folder:
        for name in CACHES:
            os.environ[name] = str(Path(folder) / name.lower())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    rungs = ladder()
    kinds = importlib.import_module("ladder.rung")
    device = options.device or ("cuda" if library_has_cuda() else "cpu")
    machine = open_machine(device, "torch" if device == "cuda" else "numpy", "languages")
    shapes = points(options, machine)
    here = [rung for rung in rungs.RUNGS if rung.device == device]
    here = [*here, ours(device, tuple({shape.headdim for shape in shapes}))]
    if options.peers not in (None, "all", "none"):
        raise BenchError(f"--peers {options.peers}: suite languages takes all or none")
    if options.peers == "none":
        here = [rung for rung in here if not rung.peer]
    if options.kernel:
        known = [rung.name for rung in here]
        for name in options.kernel:
            if name not in known:
                raise BenchError(
                    f"--kernel {','.join(options.kernel)}: {name!r} is not one of {', '.join(known)} on {device}"
                )
        here = [rung for rung in here if rung.name in options.kernel]
    runners = [Runner(rung, kinds.Unavailable) for rung in here]
    print(f"{machine.title}, {plural(len(runners), 'rung')}, {plural(len(shapes), 'shape')}", flush=True)
    outcome = Outcome(load=load_average())
    end = time.monotonic() + 60 * (options.minutes or MINUTES)
    capability = importlib.import_module("torch").cuda.get_device_capability() if device == "cuda" else None
    ahead = importlib.import_module("ladder.ahead").Ahead(here, capability)
    with cold_caches(), measuring(outcome, machine, len(shapes), "languages") as (meter, progress):
        for shape in shapes:
            name = f"{SHORT[shape.dtype]} {'backward' if shape.backward else 'forward'}, {shape}"
            try:
                if time.monotonic() > end:
                    raise Stopped(f"the run had reached its limit of {options.minutes or MINUTES:g} minutes")
                text = _one(machine, shape, name, runners, options, protocol, meter, outcome)
            except Stopped as stop:
                progress.say(str(stop))
                outcome.left_out += [
                    {"system": "all", "shape": f"{SHORT[shape.dtype]}, {shape}", "reason": str(stop)}
                    for shape in shapes[progress.done :]
                ]
                break
            ahead.read()
            progress.step(f"{name}: {text}")
    ahead.finish(outcome.rows)
    return machine, outcome


def _one(machine, shape: Shape, name: str, runners, options, protocol, meter, outcome: Outcome) -> str:
    """Checks and times all rungs at one point; returns a line of text about them."""

    def left_out(runner, reason: str, where: str = name):
        item = {"system": runner.rung.name, "shape": where, "reason": reason}
        if item not in outcome.left_out:
            outcome.left_out.append(item)

    serving = []
    for runner in runners:
        reason = runner.refusal(shape)
        if reason is None:
            serving.append(runner)
        elif reason:
            left_out(runner, reason, "all shapes" if runner.reason else name)
    if not serving:
        return "no rung serves it"
    try:
        arrays = Arrays(machine, shape, options.seed or 0)
        exact = arrays.exact(machine, replace(shape, allow_tf32=shape.dtype == "float32" and not shape.backward))
    except Exception as error:  # a missing dtype, or too little memory
        reason = f"no inputs, {type(error).__name__}: {first_line(error)}"
        outcome.left_out.append({"system": "all", "shape": name, "reason": reason})
        machine.release()
        return reason
    ready: list[tuple[Runner, Callable, dict[str, Any]]] = []
    notes = []
    limit = CALL_LIMIT_S[machine.device]
    for runner in serving:
        try:
            runner.probe(machine, shape)
            if runner.seconds(shape) > limit:
                left_out(runner, f"a call would take longer than {limit:g} s, judging by its speed so far")
                continue
            launch = arrays.launch(runner.calls, shape)
            answer = launch(0)
            machine.synchronize()
            err, budget, tf32 = _judged(exact, answer, shape, runner.rung.peer)
            del answer
        except (BadArgument, Unsupported) as error:
            left_out(runner, first_line(error))
            continue
        except Exception as error:
            left_out(runner, f"raised {type(error).__name__}: {first_line(error)}")
            notes.append(f"{runner.rung.name} raised {type(error).__name__}")
            try:
                machine.synchronize()
            except Exception as broken:  # an illegal access leaves nothing that could still run
                raise Stopped(f"the device is lost after {runner.rung.name}: {first_line(broken)}") from None
            machine.release()
            continue
        row = runner.row(shape) | {"max_err": err, "err_budget": budget} | ({"tf32": True} if tf32 else {})
        if err <= budget or (runner.rung.peer and err <= PEER_FACTOR * budget):
            ready.append((runner, launch, row))
        elif runner.rung.peer:
            left_out(runner, f"its answer is off by more than {PEER_FACTOR} times the budget")
        else:
            outcome.wrong += 1
            outcome.rows.append(rounded(row | {"wrong": True}))
            notes.append(f"{runner.rung.name} is WRONG: error {err:.3g}, budget {budget:.3g}")

    rows = []
    for slow in (False, True):  # slow rungs have few bursts, and take turns with each other only
        mine = [item for item in ready if (item[0].seconds(shape) > SLOW_S) == slow]
        rounds = replace(protocol, rounds=min(protocol.rounds, SLOW_ROUNDS) if slow else protocol.rounds)
        # No graphs for a backward pass: PyTorch runs it on the stream of its forward pass, which is not being captured.
        graphs = False if shape.backward or slow else None
        time_them = functools.partial(
            interleave, machine, protocol=rounds, meter=meter, seed=options.seed or 0, graphs=graphs
        )
        for runner, row, timing in _timings(mine, time_them, left_out):
            row = rounded(row | timing.row(shape.flops / 1e12))
            rows.append(row)
            key = shape.dtype, shape.backward
            runner.speed[key] = max(runner.speed[key], row["tflops"] * 1e12)
    order = [runner.rung.name for runner in runners]
    rows.sort(key=lambda row: order.index(row["system"]))
    outcome.rows += rows
    parts = [f"{row['system']} {speed_text(row['tflops'])}" for row in rows]
    machine.release()
    reasons = [f"{item['system']}: {item['reason']}" for item in outcome.left_out if item["shape"] == name]
    return "; ".join(parts + notes) or f"no rung was timed; {'; '.join(reasons)}".removesuffix("; ")


def _timings(ready: list, time_them: Callable, left_out: Callable) -> list[tuple]:
    """(runner, row, timing) of all rungs, timed in turns. If one of them fails, each is timed alone."""
    try:
        timings = time_them([launch for _, launch, _ in ready])
        return [(runner, row, timing) for (runner, _, row), timing in zip(ready, timings, strict=True)]
    except Exception as error:
        if len(ready) == 1:
            left_out(ready[0][0], f"raised {type(error).__name__} when it was timed: {first_line(error)}")
            return []
    return [found for item in ready for found in _timings([item], time_them, left_out)]


def _judged(exact: Exact, answer, shape: Shape, peer: bool) -> tuple[float, float, bool]:
    """(max_err, err_budget, tf32). A peer may round float32 to tf32; it is then judged by tf32's budget, and marked."""
    err, budget = exact.judge(answer, shape.dtype)
    if peer and err > budget and shape.dtype == "float32" and not shape.backward:
        coarse = exact.judge(answer, "tf32")
        if coarse[0] <= coarse[1]:
            return *coarse, True
    return err, budget, False


# ---- the tables and the pictures ----


def _group(row: dict) -> tuple:
    """The table that a row belongs to: dtype, pass, heads and headdim."""
    return row["dtype"], row["pass"], row["nheads"], row["nheads_k"], row["headdim"]


def _name(row: dict) -> str:
    return label(row["system"]) + (", tf32" if row.get("tf32") else "")


def _order(rows: list[dict]) -> list[str]:
    """Names of the rungs in the order of the ladder, then the library, then the peers."""
    place = {_name(row): (row.get("peer", False), row["system"] == "ours") for row in rows}
    return sorted(place, key=lambda name: place[name])


def _groups(rows: list[dict]) -> dict[tuple, list[dict]]:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    return groups


def table(data: dict, rows: list[dict]) -> list[str]:
    """A table for each dtype, pass, heads and headdim: a line for each rung and mask, a column for each seqlen."""
    name, scale = unit(data)
    lines = [
        f"{name}, more is better. `first use` is the time of loading or compiling a rung with an empty cache, and of "
        "its first call beyond a later one; `nvcc` is the time that its translation unit took before, for this GPU and "
        "all options that it serves (headdim 128 where head dims have files of their own). `of ours` is the geometric "
        "mean of the rung's speed over that of the library's own choice. `error` is the largest against float64, `of "
        "its budget` the largest share of what a dtype allows. Lines of code are those of the rung's files: where it "
        "has both passes, of both."
    ]
    for (dtype, direction, nheads, nheads_k, headdim), group in _groups(rows).items():
        columns = sorted({row["seqlen_q"] for row in group})
        body = []
        mine = {(row["causal"], row["seqlen_q"]): row["us"] for row in group if row["system"] == "ours"}
        for rung in _order(group):
            for causal in (False, True):
                found = {row["seqlen_q"]: row for row in group if _name(row) == rung and row["causal"] == causal}
                if not found:
                    continue
                one = next(iter(found.values()))
                ratios = [mine[causal, n] / row["us"] for n, row in found.items() if (causal, n) in mine]
                share = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
                cells = [number(found[n]["tflops"] * scale) if n in found else "" for n in columns]
                shares = [row["max_err"] / row["err_budget"] for row in found.values()]
                first = f"{one['compile_s']:.2f} s" + (f" + nvcc {one['build_s']:.0f} s" if "build_s" in one else "")
                text = [rung, one["language"], str(one.get("lines", "")), first, MASKS[causal], *cells]
                text += [f"{share:.3g}" if share else "", f"{max(row['max_err'] for row in found.values()):.1e}"]
                body.append([*text, f"{max(shares):.0%}"])
        heads = f"{nheads}" if nheads == nheads_k else f"{nheads}/{nheads_k}"
        batch = {row["batch"] for row in group}
        title = f"## {SHORT[dtype]} {_PASSES[direction]}, {heads} heads, headdim {headdim}"
        title += f", batch {batch.pop()}" if len(batch) == 1 else ""
        head = ["rung", "language", "lines of code", "first use", "mask", *map(str, columns), "of ours", "error"]
        head.append("of its budget")
        lines += ["", title, "", *markdown_table(head, body)]
    return lines


_PASSES = {"fwd": "forward", "bwd": "backward"}


def picture(data: dict, rows: list[dict]):
    """The first shape of the run, with its mask: a panel for each dtype and pass, a bar for each rung."""
    name, scale = unit(data)
    first = rows[0]
    same = [
        row for row in rows if all(row[x] == first[x] for x in ("batch", "seqlen_q", "nheads", "headdim", "causal"))
    ]
    groups = _groups(same)
    columns = min(4, len(groups))
    height = max(len(group) for group in groups.values())
    lines = math.ceil(len(groups) / columns)
    figure, axes = figure_of(lines, columns, max(7, 4.6 * columns), 1.4 + lines * (0.8 + 0.3 * height))
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, ((dtype, direction, *_), group) in zip(axes.flat, groups.items(), strict=False):
        ordered = [next(row for row in group if _name(row) == rung) for rung in _order(group)]
        values = [row["tflops"] * scale for row in ordered]
        colours = [
            "#9A9A9A" if row.get("peer") else LINES[0] if row["system"] == "ours" else LINES[5] for row in ordered
        ]
        bars = axis.barh(range(len(ordered)), values, color=colours, height=0.7)
        axis.bar_label(bars, [f" {number(value)}" for value in values], fontsize=8)
        axis.set_yticks(range(len(ordered)), [_name(row) for row in ordered], fontsize=8)
        axis.set_ylim(height - 0.5, -0.5)  # bars are as thick in every panel
        axis.grid(axis="y", visible=False)
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 2, max(values) * 4)
        plain_log(axis.xaxis)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(f"{SHORT[dtype]} {_PASSES[direction]}")
        axis.set_xlabel(f"{name}, logarithmic")
    what = (
        f"The ladder: headdim {first['headdim']}, {MASKS[first['causal']]}, batch {first['batch']} x {first['nheads']} "
    )
    set_title(figure, data, what + f"heads, seqlen {first['seqlen_q']}")
    return figure


def curves(data: dict, rows: list[dict]):
    """Speed over seqlen, both axes logarithmic, for the heads and headdim with the most lengths: a panel for each dtype
    and pass."""
    name, scale = unit(data)
    shapes = {_group(row)[2:]: set() for row in rows}
    for row in rows:
        shapes[_group(row)[2:]].add(row["seqlen_q"])
    most = max(shapes, key=lambda key: len(shapes[key]))
    causal = min(row["causal"] for row in rows)
    chosen = [row for row in rows if _group(row)[2:] == most and row["causal"] == causal]
    groups = _groups(chosen)
    names = _order(chosen)
    others = [rung for rung in names if rung != label("ours")]
    looks = {rung: {"color": LINES[1 + i % 7], "marker": "oDP*Xsv^"[i // 7 % 8]} for i, rung in enumerate(others)}
    looks[label("ours")] = {"color": LINES[0], "marker": "o", "linewidth": 2.4, "zorder": 3}
    for name_of_peer in {_name(row) for row in chosen if row.get("peer")}:
        looks[name_of_peer]["linestyle"] = "--"
    columns = min(4, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure, axes = figure_of(lines, columns, max(7, 3.8 * columns), 1.8 + 3.2 * lines)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, ((dtype, direction, *_), group) in zip(axes.flat, groups.items(), strict=False):
        for rung in _order(group):
            mine = sorted((row["seqlen_q"], row["tflops"] * scale) for row in group if _name(row) == rung)
            axis.plot(*zip(*mine, strict=True), label=rung, markersize=4, **looks[rung])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        plain_log(axis.yaxis)
        seqlens = sorted({row["seqlen_q"] for row in group})
        axis.set_xticks(seqlens, [f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens])
        axis.minorticks_off()
        axis.set_title(f"{SHORT[dtype]} {_PASSES[direction]}")
        axis.set_xlabel("sequence length")
    axes[0][0].set_ylabel(name)
    nheads, _, headdim = most
    set_title(figure, data, f"The ladder: {nheads} heads, headdim {headdim}, {MASKS[causal]} (more is better)")
    handles = {text: h for axis in axes.flat for h, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, len(handles)), fontsize=8)
    return figure


register(
    Suite(
        name="languages",
        about="every rung of the ladder (NumPy, C, CUDA, Triton, ...) that runs on the device, both passes, on the\n"
        "tutorial's shape, batch 8, 12 heads, seqlen 1024, headdim 64; then 16384 tokens, 16 heads, headdim 128,\n"
        "seqlen 128 to 16384 (on a CPU batch 1, 3 heads; then 2048 tokens, 4 heads). Needs a checkout",
        options=SHAPES | frozenset({"kernel", "peers", "rounds", "quick", "seed", "output", "minutes"}),
        run=run,
        table=table,
        pictures={"": picture, "_curves": curves},
        checked="every answer checked against float64 before it was timed",
        how="median of the bursts, rungs in shuffled turns",
    )
)
