"""`python -m flash_attn_lab context-parallel`: check and time attention across ranks.

cases.py    the cases, and how often each runs
crew.py     processes for the ranks, which may hang or crash
rank.py     the work of a rank: arrays, the answer of one device, bursts in turns
timeline.py the kernels and copies on a rank's GPU during a call
jax_ranks.py  the same in JAX, which has all devices in one process
peers.py    PyTorch's context_parallel, a ring over NCCL
report.py   efficiency, tables, the picture
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_attn_minimal import __version__
from flash_attn_minimal._commands.command import Parser, check_file, command, integer, one_of
from flash_attn_minimal._commands.report import cores, cpu_model, plural
from flash_attn_minimal._core.library import load
from flash_attn_minimal.distributed._structs import MODES

from .. import PROGRAM
from ..bench import figure
from ..bench.machine import BenchError
from ..bench.report import encoded
from ..command import check_folder, integers, some_of, without
from ..progress import Progress
from ..report import commit, show_table
from . import cases, jax_ranks, peers, rank, report, timeline
from .crew import KINDS, Crew, Lost, Spec

MOST_LOST = 2  # after so many lost crews of a kind, its other cases are left out


@dataclass(frozen=True)
class Task:
    """One case on one crew."""

    spec: Spec
    order: rank.Order

    @property
    def seconds(self) -> float:
        """An estimate of the time it takes."""
        order, device = self.order, "cpu" if self.spec.devices[0] == "cpu" else "cuda"
        turns = max(self.spec.turns) + 1
        return order.case.seconds(device, self.spec.size, turns, order.protocol, max(1, len(order.modes)))

    def labelled(self, rows: list[dict]) -> list[dict]:
        """The rows that the ranks sent, with the fields that ranks do not know."""
        spec = self.spec
        who = {"system": spec.kind} if spec.peer else {"system": "ours", "kind": spec.kind}
        who |= {"ranks": spec.size, "devices": spec.size if spec.devices[0] == "cpu" else len(set(spec.devices))}
        return [row | who | {"flops": self.order.case.flops} for row in rows]

    def failed(self, reason: str) -> list[dict]:
        return self.labelled(
            [self.order.case.row() | {"asked": mode, "error": reason} for mode in self.order.modes or ("",)]
        )


def _parser() -> Parser:
    def numbers(text: str) -> list[int]:
        return sorted(set(integers(text)))

    names = {device: list(cases.known(device)) for device in cases.USUAL}
    parser = Parser(
        "context-parallel",
        PROGRAM,
        description="Check attention across GPUs, or ranks of the CPU, against one of them; then time both in turns.",
        epilog="\n".join(
            f"cases on {'GPUs' if device == 'cuda' else 'the CPU'}: {', '.join(found)}"
            for device, found in names.items()
        ),
    )
    add, positive = parser.add_argument, integer()
    add("--gpus", type=positive, metavar="N", help="default: all")
    add("--ranks", type=numbers, metavar="N,...",
        help="how many take part; several numbers are groups of these sizes, one after another; ranks may share a GPU; "
        "default: 2, 4, 8, ... as far as there are GPUs, 2 on the CPU")  # fmt: skip
    add("--device", **one_of(("cpu", "cuda")), help="default: cuda where there is one, else cpu")
    add("--threads", type=positive, metavar="N", help="of a rank on the CPU; default: its share of the cores")
    add("--cases", metavar="NAME,...", help="default: the usual ones")
    add("--modes", type=some_of(MODES), default=["auto"], metavar="NAME,...", help=f"{', '.join(MODES)}; default: auto")
    add("--kinds", type=some_of(KINDS), default=["processes", "threads"], metavar="NAME,...",
        help="how ranks of ours are made: processes; threads; nccl: processes whose data NCCL moves; hosts: so, half "
        "of them on another host, as NCCL believes; jax; default: processes and, in some cases, threads")  # fmt: skip
    add(
        "--peers", metavar="NAME,...", help=f"{', '.join(peers.PEERS)}; all; none; default: all, on GPUs, in some cases"
    )
    add("--quick", action="store_true", help="fewer cases, by processes alone, no peers")
    add("--long", action="store_true", help="also a million tokens")
    add("--rounds", type=positive, metavar="N", help="bursts of each system")
    add("--json", type=Path, metavar="FILE")
    add("--md", type=Path, metavar="FILE")
    add("--png", type=Path, metavar="FILE", help="a picture; needs matplotlib")
    add("--trace", type=Path, metavar="FOLDER",
        help="where timelines go, of what the GPU of rank 0 does in a call of each case: JSON, and a picture where "
        "there is matplotlib")  # fmt: skip
    return parser


@command("context-parallel")
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    options.modes, options.kinds = (list(dict.fromkeys(names)) for names in (options.modes, options.kinds))
    return _run(options, argv)


def devices_of(options, gpus: int, built: str) -> list[tuple[int | str, ...]]:
    """The device of each rank, for each group. gpus: the number of GPUs that the library sees."""
    on_gpus = options.device == "cuda" or (options.device is None and (options.gpus is not None or gpus > 0))
    if options.device == "cpu" and options.gpus is not None:
        raise BenchError(f"--gpus {options.gpus} with --device cpu: give --ranks {options.gpus}")
    if not on_gpus:
        groups: list[tuple[int | str, ...]] = [("cpu",) * size for size in options.ranks or [2]]
    else:
        asked = f"--gpus {options.gpus}" if options.gpus else "--device cuda"
        if not gpus:
            ranks = ",".join(map(str, options.ranks or [max(2, options.gpus or 2)]))
            raise BenchError(f"{asked}: the library sees no GPU ({built}): give --ranks {ranks} --device cpu")
        if options.gpus and options.gpus > gpus:
            raise BenchError(f"--gpus {options.gpus}: this machine has {gpus} GPU{'s' * (gpus > 1)}")
        used = options.gpus or gpus
        groups = [tuple(r % used for r in range(size)) for size in options.ranks or _sizes(used)]
        if importlib.util.find_spec("torch") is None:
            raise BenchError(f"{asked}: PyTorch holds the arrays on GPUs, and it is not installed")
    if min(map(len, groups)) < 2:
        raise BenchError("1 rank: context parallelism is for 2 or more; --ranks 2 may share a device")
    return groups


def _sizes(gpus: int) -> list[int]:
    """The default sizes of groups: 2, 4, 8, ... and all GPUs."""
    return [2**i for i in range(1, gpus.bit_length()) if 2**i < gpus] + [gpus]


def tasks_of(options, groups: list[tuple[int | str, ...]]) -> list[Task]:
    """The tasks, for each group: ours with processes, ours with threads, then each peer."""
    device = "cpu" if groups[0][0] == "cpu" else "cuda"
    names = options.cases.split(",") if options.cases else None
    for name in names or ():
        if name not in cases.known(device):
            raise BenchError(f"--cases {options.cases}: {name!r} is not one of {', '.join(cases.known(device))}")
    found = cases.chosen(device, names, options.quick, options.long)
    protocol = cases.CPU if device == "cpu" else cases.Protocol()
    rounds = options.rounds or (cases.QUICK_ROUNDS if options.quick else protocol.rounds)
    order = rank.Order(found[0], tuple(options.modes), replace(protocol, rounds=rounds), bool(options.trace))
    of_peers = replace(order, modes=(), traced=False, protocol=replace(order.protocol, rounds_alone=1))
    known, tasks = _peers(options, device), []
    for devices in groups:
        threads = options.threads or max(1, cores() // len(devices))
        for kind in options.kinds:
            if kind in ("nccl", "hosts") and (device == "cpu" or len(set(devices)) < len(devices)):
                raise BenchError(f"--kinds {kind}: NCCL needs a GPU for each of {len(devices)} ranks")
            if kind == "threads" and options.quick and len(options.kinds) > 1:
                continue
            mine = [case for case in found if kind == "processes" or case.widely or len(options.kinds) == 1]
            tasks += [Task(Spec(kind, devices, threads), replace(order, case=case)) for case in mine]
        for name in known:
            asked = options.peers is not None and names is not None
            tasks += [
                Task(Spec(name, devices, threads, peer=True), replace(of_peers, case=case))
                for case in found if case.widely or asked
            ]  # fmt: skip
    return tasks


def _peers(options, device: str) -> tuple[str, ...]:
    if options.peers == "none" or (options.peers is None and (options.quick or device == "cpu")):
        return ()
    if options.peers in (None, "all"):
        return peers.PEERS
    names = tuple(dict.fromkeys(options.peers.split(",")))
    for name in names:
        if name not in peers.PEERS:
            raise BenchError(f"--peers {options.peers}: {name!r} is not one of {', '.join(peers.PEERS)}")
    return names


def _run(options, argv: list[str]) -> int:
    lib = load()
    groups = devices_of(options, lib.fa_cuda_device_count(), lib.fa_build_info().decode())
    tasks = tasks_of(options, groups)
    if options.png and not figure.available():
        raise BenchError(f"--png {options.png} needs matplotlib (pip install matplotlib)")
    for name in ("json", "md", "png"):
        check_file(f"--{name}", getattr(options, name))
    if options.trace:
        if groups[0][0] == "cpu":
            raise BenchError(f"--trace {options.trace}: timelines are of GPUs, and the ranks are on the CPU")
        check_folder("--trace", options.trace)
        with _writing(options.trace):
            options.trace.mkdir(exist_ok=True)
    data, measured, started = _document(groups, argv), [], time.monotonic()

    def unit(row: dict) -> str:
        return f"{row['ranks']} {'GPUs' if groups[0][0] != 'cpu' and row['devices'] == row['ranks'] else 'ranks'}"

    with Progress(len(tasks), "context-parallel") as progress:
        try:
            for rows, left in _measure(tasks, data["machine"]):
                measured += [_traced(row, options.trace) for row in rows]
                data["rows"] = report.completed(measured)
                data["seconds"] = round(time.monotonic() - started)
                said = report.sentence(data["rows"][-len(rows) :], unit(rows[0]))
                progress.step(said + (f" (about {_clock(left)} left)" if left >= 1 else ""))
                _write(options, data)
        except KeyboardInterrupt:
            data["interrupted"] = True
            progress.say("interrupted: the table has the rows measured so far")
    return _finish(options, data)


def _measure(tasks: list[Task], machine: dict[str, Any]) -> Iterator[tuple[list[dict], float]]:
    """Runs the tasks; yields the rows of each, and an estimate of the seconds left. Adds to `machine` what the crews
    know about it."""
    crew, spec, failures = None, None, []
    started, done = time.monotonic(), 0.0
    try:
        for i, task in enumerate(tasks):
            if task.spec != spec:
                if crew:
                    crew.close()
                crew, spec, failures = None, task.spec, []
            if len(failures) >= MOST_LOST:
                rows = task.failed(f"left out, after: {failures[0]}")
            else:
                try:
                    if crew is None:
                        crew = Crew(spec, _opener(spec))
                        machine |= {key: value for key, value in crew.about.items() if key not in machine}
                    rows = task.labelled(crew.ask(task.order, 60 + 10 * task.seconds))
                except Lost as error:
                    crew = None
                    failures += [str(error)] * (MOST_LOST if error.final else 1)
                    rows = task.failed(str(error))
            done += task.seconds
            yield rows, (time.monotonic() - started) * sum(t.seconds for t in tasks[i + 1 :]) / done
        if crew:
            crew.close()
            crew = None
    finally:
        if crew:
            crew.kill()


def _opener(spec: Spec) -> Any:
    """The function that opens the ranks of a crew in its processes."""
    return peers.open_peers if spec.peer else jax_ranks.open_jax if spec.kind == "jax" else rank.open_ranks


def _traced(row: dict, folder: Path | None) -> dict:
    """The row with a summary in place of its timeline. The timeline goes into separate files."""
    if "timeline" not in row or folder is None:
        return row
    found = row.pop("timeline")
    row["trace"] = timeline.summary(found)
    name = "_".join([row["case"], row["asked"], str(row["ranks"]), *[row["kind"]] * (row["kind"] != "processes")])
    about = f"{row['case']}, {report.label(row)}, {row['ranks']} ranks: the GPU of rank 0"
    with _writing(folder / name):
        (folder / f"{name}.json").write_text(encoded(found))
        if figure.available():
            timeline.picture(found, about, folder / f"{name}.png")
            row["trace"]["picture"] = f"{folder.name}/{name}.png"
    return row


def _clock(seconds: float) -> str:
    return f"{int(seconds)} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} minutes"


def _document(groups: list[tuple[int | str, ...]], argv: list[str]) -> dict[str, Any]:
    """The object that goes into the file, without rows."""
    kept = without(argv, "--json", "--md", "--png", "--trace")  # where results go does not change them
    about = {
        "host": f"{cpu_model()}, {plural(cores(), 'core')}",
        "library": f"{__version__}, {load().fa_build_info().decode()}",
    }
    return {
        "machine": about,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": shlex.join([*PROGRAM.split(), "context-parallel", *kept]),
        "ranks": [len(devices) for devices in groups],
        "gpus": 0 if groups[0][0] == "cpu" else len({device for devices in groups for device in devices}),
        "rows": [],
    }


def _write(options, data: dict[str, Any]) -> None:
    if options.json:
        with _writing(options.json):
            options.json.write_text(encoded(data))


@contextlib.contextmanager
def _writing(file: Path):
    try:
        yield
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror}") from None


def _finish(options, data: dict[str, Any]) -> int:
    """Table, files, exit status."""
    rows = data["rows"]
    show_table(report.title(data), *report.columns(data, wide=False), left=2)
    for line in report.untimed(data):
        print(line)
    print(f"{report.summary(data)}, {_clock(data.get('seconds', 0))}")
    _write(options, data)
    drawn = False
    if options.png:
        with _writing(options.png):
            drawn = report.picture(data, options.png)
        if not drawn:
            print(f"{options.png} is not written: no case of the picture was timed", file=sys.stderr)
    if options.md:
        link = None
        if drawn:
            link = options.png.name if options.png.parent == options.md.parent else str(options.png)
        with _writing(options.md):
            options.md.write_text(report.markdown(data, link))
    for file in (options.json, options.md, options.png if drawn else None):
        if file:
            print(f"wrote {file}")
    if data.get("interrupted"):
        return 130
    mine = [row for row in rows if row["system"] == "ours"]
    failed = any("error" in row and not row.get("refused") for row in mine)
    return int(failed or any(row.get("wrong") for row in mine) or not any("ms" in row for row in rows))
