"""`python -m flash_attn_lab experiment NAME`: one question, its measurement, and a page with the answer.

    experiment.py     the classes of an experiment and of a run
    report.py         the files: JSON, the page, pictures
    _measure.py       checks and times kernels and variants, with the clocks and checks of `bench`
    _variants.py      the library of variants of kernels, which only a checkout builds
    _ncu.py           GPU counters of calls
    _calls.py         the process that ncu watches
    _counted.py       attention in NumPy that counts the bytes it moves
    _traffic.py       the same bytes by formula
    _tiles.py         the tiles of the kernels

Every other module is one experiment, or several similar ones. Only the command line imports this package.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from flash_attn_minimal._commands.command import Parser, any_seed, command, one_of, real
from flash_attn_minimal._commands.report import plural
from flash_attn_minimal._core.library import load

from .. import PROGRAM
from ..bench import figure
from ..bench.machine import BenchError, Meter, Numpy, device_slug, load_average, open_machine
from ..bench.timing import QUICK, Protocol
from ..command import check_folder, interruptible, without
from . import block_size, dtype, online_softmax, optimisation, report, roofline, sweeps, traffic
from .experiment import DEFAULT_FOLDER, EXPERIMENTS, Experiment, Run, Stopped

MODULES = block_size, traffic, dtype, sweeps, online_softmax, optimisation, roofline


def _list() -> str:
    return "experiments:\n" + "".join(f"  {e.name:<16} {e.about}\n" for e in EXPERIMENTS.values())


def _parser() -> Parser:
    parser = Parser(
        "experiment",
        PROGRAM,
        description="Answer one question by measurement: NAME.json with every row, NAME.md with question, method, "
        "table and what one sees, and pictures where matplotlib is installed. A run that is interrupted, or cut off "
        "by --limit, writes what it has.",
        epilog=_list(),
    )
    add = parser.add_argument
    add("name", nargs="?", **one_of(EXPERIMENTS, "NAME"), help="one of the experiments below")
    add("--list", action="store_true", help="list the experiments and stop")
    add("--device", **one_of(("cpu", "cuda")), help="default: cuda when there is a GPU")
    add("--framework", **one_of(("numpy", "torch", "cupy")), help="whose arrays; default: as in `bench`")
    add("--quick", action="store_true", help="fewer points, shorter bursts")
    add("--limit", type=real(above=True), metavar="SECONDS", help="end after the step that passes this time")
    add("--seed", type=any_seed, default=0, metavar="N", help="of the random inputs and of the order")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="default: experiments/<device>, in the current folder; experiments, where the result says nothing of "
        "the device's speed",
    )
    add("--plot-only", type=Path, metavar="FILE.json", help="make page and pictures again from a result")
    return parser


@command("experiment")
def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.list:
        print(_list(), end="")
        return 0
    if options.plot_only:
        if options.name:
            parser.error(f"--plot-only stands alone, but {options.name} was given too")
        return _written(report.redraw(options.plot_only))
    if options.name is None:
        parser.error("which experiment? --list shows them")
    return _run(EXPERIMENTS[options.name], options, argv)


def _open(experiment: Experiment, options):
    if options.device and options.device not in experiment.devices:
        raise BenchError(f"--device {options.device}: {experiment.name} runs on {', '.join(experiment.devices)}")
    if experiment.framework == "numpy":
        if options.framework not in (None, "numpy"):
            raise BenchError(f"--framework {options.framework}: {experiment.name} runs in NumPy")
        return Numpy()
    return open_machine(options.device, options.framework)


def _run(experiment: Experiment, options, argv: list[str]) -> int:
    load()  # a missing library is reported before anything else
    check_folder("--output", options.output or DEFAULT_FOLDER)
    machine = _open(experiment, options)
    portable = experiment.portable(machine.device)
    folder = options.output or DEFAULT_FOLDER / ("" if portable else device_slug(machine))
    line = shlex.join([*PROGRAM.split(), "experiment", *without(argv, "--output")])
    protocol = Protocol(**vars(QUICK)) if options.quick else Protocol()
    print(f"{experiment.name}: {machine.title}, {machine.framework} arrays", flush=True)

    stopped, status = None, 0
    with Meter(machine) as meter:
        run = Run(machine, options.quick, options.seed, protocol, meter, limit=options.limit)
        run.outcome.load = load_average()

        def data() -> dict:
            run.outcome.conditions, run.outcome.driver = meter.between(), meter.driver
            return report.result(experiment.name, line, machine, run.outcome, portable)

        begun = data()

        def save() -> None:
            found = {"rows": run.outcome.rows, "left_out": run.outcome.left_out}
            report.save({**begun, **found, "stopped": "it was still running"}, folder)

        run.save = save
        try:
            with interruptible() as run.interrupt:
                experiment.run(run)
        except Stopped as stop:
            stopped = str(stop)
        except KeyboardInterrupt:
            stopped, status = "interrupted", 130
        except BaseException as error:
            if run.outcome.rows:
                report.write(data() | {"stopped": f"{type(error).__name__}: {error}"}, folder)
            raise
        whole = data() | ({"stopped": stopped} if stopped else {})
    _written(report.write(whole, folder))
    if stopped:
        print(f"ended early: {stopped}", file=sys.stderr)
    if run.outcome.wrong:
        print(plural(run.outcome.wrong, "wrong answer"), file=sys.stderr)
        return status or 1
    if not run.outcome.rows and not experiment.may_be_empty:
        reasons = dict.fromkeys(item["reason"] for item in run.outcome.left_out)
        print("nothing was measured" + "".join(f"\n  {reason}" for reason in reasons), file=sys.stderr)
        return status or 1
    return status


def _written(paths: list[Path]) -> int:
    for path in paths:
        print(f"wrote {path}")
    figure.say_if_missing()
    return 0
