"""`python -m flash_attn_lab bench`: check, then time, then write JSON, a table and pictures."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from flash_attn_minimal._commands.command import Parser, any_seed, command, integer, one_of
from flash_attn_minimal._commands.report import plural
from flash_attn_minimal._core.library import load

from .. import PROGRAM
from ..command import check_folder, integers, some_of, without
from . import (
    attention,
    block,
    decode,
    dispatch,
    figure,
    languages,
    ledger,
    linear,
    llama,
    masked,
    masks,
    overhead,
    prefill,
    prices,
    profile,
    queries,
    report,
    shapes,
    small_ops,
    sweep,
    transformers,
)
from .machine import DTYPES, SHORT, device_slug, library_has_cuda
from .rows import timed
from .suite import SUITES, Suite
from .systems import PEERS
from .timing import QUICK, Protocol

MODULES = (  # the modules that register suites
    attention, shapes, prices, masks, languages, profile, prefill, decode, queries, llama, block, overhead, linear,
    small_ops, transformers, sweep, dispatch, ledger,
)  # fmt: skip


def _about(suite: Suite) -> str:
    first, *rest = suite.about.splitlines()
    return "\n".join([f"{suite.name:<16} {first}", *(f"{'':<16} {line}" for line in rest)])


def _names(peers: Mapping[str, Collection[str]]) -> str:
    """The names of both devices' peers."""
    return "; ".join(", ".join(names) for names in peers.values())


def _parser() -> argparse.ArgumentParser:
    positive = integer()

    def words(text: str) -> list[str]:
        return text.split(",")

    def dtype(text: str) -> str:
        name = {short: long for long, short in SHORT.items()}.get(text, text)
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join([*SHORT.values(), *DTYPES])}")
        return name

    parser = Parser(
        "bench",
        PROGRAM,
        description="Check, then time, then write JSON, a table and pictures. PyTorch, when installed, brings peers.",
        epilog="suites:\n" + "\n".join(map(_about, SUITES.values())),
    )
    add = parser.add_argument
    add("--suite", **one_of(SUITES, "NAME"), help="default: forward on a GPU, cpu without one")
    add("--device", **one_of(("cpu", "cuda")), help="default: cuda when there is a GPU")
    add(
        "--framework",
        **one_of(("numpy", "torch", "cupy")),
        help="whose arrays; default: torch if installed, else cupy or numpy",
    )
    add("--dtype", type=dtype, help="fp32, fp16, bf16, fp8; default: bf16 on a GPU, fp32 on the CPU")
    add("--allow-tf32", action="store_const", const=True, help="let fp32 inputs use tf32 tensor cores")
    add("--headdim", type=integers, metavar="N,...")
    add("--seqlen", type=integers, metavar="N,...")
    add("--mask", type=some_of(("full", "causal")), metavar="full,causal")
    add("--batch", type=positive, metavar="N")
    add("--tokens", type=positive, metavar="N", help="batch x seqlen")
    add("--heads", type=positive, metavar="N")
    add("--heads-k", type=positive, metavar="N", help="key heads")
    add(
        "--kernel",
        type=words,
        metavar="NAME,...",
        help="ours: kernels by name, or best; default: best, in the ladder all; languages: rungs",
    )
    add("--peers", metavar="NAME,...", help=f"{_names(PEERS)}; masks: {_names(masked.PEERS)}; all; none")
    add("--model", metavar="NAME", help="llama: a shape that `synthetic` knows; transformers: 1b, tiny")
    add("--threads", type=integer(most=4096), metavar="N", help="CPU threads; default: all cores")
    add("--rounds", type=positive, metavar="N", help="bursts of each system on each shape")
    add("--minutes", type=positive, metavar="N", help="languages: report what there is after so long; default: 20")
    add(
        "--seconds",
        type=positive,
        metavar="N",
        help="sweep, dispatch: how long; default: 300, or until all --calls",
    )
    add("--calls", type=positive, metavar="N", help="sweep, dispatch: how many")
    add("--call", metavar="LINE", help="sweep, dispatch: this call alone, as a line of its table has it")
    add(
        "--before",
        type=Path,
        metavar="FILE.json",
        help="sweep: time the calls of an earlier result (with --seed those of the seed), and compare with it; masks: "
        "add to the rows of an earlier result",
    )
    add("--devices", metavar="N,...", help="sweep, ledger: GPUs by number; default: all")
    add("--against", metavar="LIBRARY", help="ledger: a library, a checkout that is built, or a commit to compile")
    add("--row", type=words, metavar="TEXT,...", help="ledger, masks: the rows with one of these texts in their name")
    add("--quick", action="store_const", const=True, help="fewer shapes, shorter bursts")
    add(
        "--sustained", action="store_const", const=True, help="also time a third of a second each, with clock and power"
    )
    add("--seed", type=any_seed, metavar="N", help="of the random inputs, the order, and in the sweep the calls")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="default: benchmarks/<device>, in the current folder",
    )
    add("--run", action="store_const", const=True, help="profile: run the command instead of printing it")
    add("--inner", action="store_const", const=True, help="profile: be the profiled process")
    add("--backward", action="store_const", const=True, help="profile: the backward pass")
    add("--plot-only", type=Path, metavar="FILE.json", help="make table and pictures again from a result")
    return parser


@command("bench")
def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plot_only:
        if len(given := [name for name, value in vars(options).items() if value is not None]) > 1:
            parser.error(f"--plot-only stands alone, but --{given[0].replace('_', '-')} was given too")
        _written(report.redraw(options.plot_only))
        figure.say_if_missing()
        return 0
    return _run(options, parser, argv)


def _run(options, parser, argv) -> int:
    load()  # a missing library is reported before anything else
    chosen = "" if options.suite else " (the default here)"
    if options.suite is None and options.against:
        options.suite = "ledger"
    if options.suite is None:
        options.suite = "forward" if options.device == "cuda" or library_has_cuda() else "cpu"
        if options.device == "cpu":
            options.suite, options.device = "cpu", None
    suite = SUITES[options.suite]
    for name, value in vars(options).items():
        if value is not None and name not in suite.options | {"suite", "plot_only"}:
            parser.error(f"--{name.replace('_', '-')} has no meaning in suite {options.suite}{chosen}")
    if options.heads_k and not options.heads:
        parser.error(f"--heads-k {options.heads_k} needs --heads")
    if options.heads_k and options.heads % options.heads_k:
        parser.error(f"--heads {options.heads} is not a multiple of --heads-k {options.heads_k}")
    if options.run and options.inner:
        parser.error("--run and --inner exclude each other")
    if "output" in suite.options:
        check_folder("--output", options.output or report.DEFAULT_FOLDER)
    protocol = Protocol(**vars(QUICK)) if options.quick else Protocol()
    protocol.rounds = options.rounds or protocol.rounds
    protocol.sustained = bool(options.sustained)

    found = suite.run(options, protocol)
    if isinstance(found, int):  # nothing to write
        return found
    machine, outcome = found
    # The recorded command leaves out where the results go: it reproduces the numbers anywhere.
    line = shlex.join([*PROGRAM.split(), "bench", *without(argv, "--output"), *outcome.chosen])
    data = report.result(options.suite, line, machine, outcome)
    _written(report.write(data, options.output or report.DEFAULT_FOLDER / device_slug(machine)))
    if outcome.wrong:
        print(plural(outcome.wrong, "wrong answer"), file=sys.stderr)
    if outcome.failure:
        print(f"ended early: {outcome.stopped}", file=sys.stderr)
        raise outcome.failure
    if not timed(data):
        reasons = dict.fromkeys(item["reason"] for item in outcome.left_out)
        print("nothing was timed" + "".join(f"\n  {reason}" for reason in reasons), file=sys.stderr)
        return 1
    figure.say_if_missing()
    return 1 if outcome.wrong else 0


def _written(paths: list[Path]) -> None:
    for path in paths:
        print(f"wrote {report.relative(path)}")
