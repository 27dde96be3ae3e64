"""`python -m flash_attn_minimal bench`: check, then time, then write JSON, a table and pictures."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from .._library import load
from . import (
    attention,
    block,
    decode,
    languages,
    ledger,
    linear,
    llama,
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
from .machine import DTYPES, SHORT, BenchError, device_slug, library_has_cuda
from .rows import timed
from .suite import SUITES, Suite
from .systems import PEERS
from .timing import QUICK, Protocol

MODULES = (  # of suites
    attention, shapes, prices, languages, profile, prefill, decode, queries, llama, block, overhead, linear, small_ops,
    transformers, sweep, ledger,
)  # fmt: skip


def _about(suite: Suite) -> str:
    first, *rest = suite.about.splitlines()
    return "\n".join([f"{suite.name:<16} {first}", *(f"{'':<16} {line}" for line in rest)])


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        number = int(text)
        if number < 1:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return number

    def natural(text: str) -> int:
        number = int(text)
        if number < 0:
            raise argparse.ArgumentTypeError(f"{text} is negative")
        return number

    def numbers(text: str) -> list[int]:
        return [positive(part) for part in text.split(",")]

    def words(text: str) -> list[str]:
        return text.split(",")

    def masks(text: str) -> list[str]:
        for word in words(text):
            if word not in ("full", "causal"):
                raise argparse.ArgumentTypeError(f"{word!r} is neither full nor causal")
        return words(text)

    def dtype(text: str) -> str:
        name = {short: long for long, short in SHORT.items()}.get(text, text)
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join([*DTYPES, *SHORT.values()])}")
        return name

    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_minimal bench",
        description="Check, then time, then write JSON, a table and pictures. PyTorch, when installed, brings peers.",
        epilog="suites:\n" + "\n".join(map(_about, SUITES.values())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", choices=list(SUITES), help="default: forward on a GPU, cpu without one")
    add("--device", choices=["cpu", "cuda"], help="default: cuda when there is a GPU")
    add(
        "--framework",
        choices=["numpy", "torch", "cupy"],
        help="whose arrays; default: torch if installed, else cupy or numpy",
    )
    add("--dtype", type=dtype, help="fp32, fp16, bf16, fp8; default: bf16 on a GPU, fp32 on the CPU")
    add("--allow-tf32", action="store_const", const=True, help="let fp32 inputs use tf32 tensor cores")
    add("--headdim", type=numbers, metavar="N,...")
    add("--seqlen", type=numbers, metavar="N,...")
    add("--mask", type=masks, metavar="full,causal")
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
    add("--peers", metavar="NAME,...", help=f"{'; '.join(', '.join(names) for names in PEERS.values())}; all; none")
    add("--model", metavar="NAME", help="llama: a shape that `synthetic` knows; transformers: 1b, tiny")
    add("--threads", type=positive, metavar="N", help="CPU threads; default: all cores")
    add("--rounds", type=positive, metavar="N", help="bursts of each system on each shape")
    add("--minutes", type=positive, metavar="N", help="languages: report what there is after so long; default: 20")
    add("--seconds", type=positive, metavar="N", help="sweep: how long; default: 300, or until --calls are done")
    add("--calls", type=positive, metavar="N", help="sweep: how many")
    add("--call", metavar="LINE", help="sweep: this call alone, as a line of its table has it")
    add(
        "--before",
        type=Path,
        metavar="FILE.json",
        help="sweep: time the calls of an earlier result (with --seed those of the seed), and compare with it",
    )
    add("--devices", metavar="N,...", help="sweep, ledger: GPUs by number; default: all")
    add("--against", metavar="LIBRARY", help="ledger: a library, a checkout that is built, or a commit to compile")
    add("--row", type=words, metavar="TEXT,...", help="ledger: the rows with one of these texts in their name")
    add("--quick", action="store_const", const=True, help="fewer shapes, shorter bursts")
    add(
        "--sustained", action="store_const", const=True, help="also time a third of a second each, with clock and power"
    )
    add("--seed", type=natural, metavar="N", help="of the random inputs, the order, and in the sweep the calls")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="default: docs/benchmarks/<device> if docs/benchmarks exists, else benchmarks/<device>",
    )
    add("--run", action="store_const", const=True, help="profile: run the command instead of printing it")
    add("--inner", action="store_const", const=True, help="profile: be the profiled process")
    add("--backward", action="store_const", const=True, help="profile: the backward pass")
    add("--plot-only", type=Path, metavar="FILE.json", help="make table and pictures again from a result")
    return parser


def main(argv: list[str]) -> int:
    """0 done, 1 a wrong answer or a failure on the way, 2 wrong usage."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        if options.plot_only:
            if len(given := [name for name, value in vars(options).items() if value is not None]) > 1:
                parser.error(f"--plot-only stands alone, but --{given[0].replace('_', '-')} was given too")
            return _written(report.redraw(options.plot_only))
        return _run(options, parser, argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _run(options, parser, argv) -> int:
    load()  # a missing library is reported before anything else
    if options.suite is None and options.against:
        options.suite = "ledger"
    if options.suite is None:
        options.suite = "cpu" if options.device == "cpu" or not library_has_cuda() else "forward"
        if options.suite == "cpu":
            options.device = None
    suite = SUITES[options.suite]
    for name, value in vars(options).items():
        if value is not None and name not in suite.options | {"suite", "plot_only"}:
            parser.error(f"--{name.replace('_', '-')} has no meaning in suite {options.suite}")
    if options.heads_k and not options.heads:
        parser.error(f"--heads-k {options.heads_k} needs --heads")
    if options.heads_k and options.heads % options.heads_k:
        parser.error(f"--heads {options.heads} is not a multiple of --heads-k {options.heads_k}")
    if options.run and options.inner:
        parser.error("--run and --inner exclude each other")
    protocol = Protocol(**vars(QUICK)) if options.quick else Protocol()
    protocol.rounds = options.rounds or protocol.rounds
    protocol.sustained = bool(options.sustained)

    found = suite.run(options, protocol)
    if isinstance(found, int):  # nothing to write
        return found
    machine, outcome = found
    # The recorded command leaves out where the results go: it reproduces the numbers anywhere.
    command = shlex.join(["python", "-m", "flash_attn_minimal", "bench", *_without_output(argv), *outcome.chosen])
    data = report.result(options.suite, command, machine, outcome)
    folder = options.output or report.default_folder(device_slug(machine))
    status = _written(report.write(data, folder))
    if outcome.wrong:
        print(f"{outcome.wrong} wrong answers", file=sys.stderr)
    if not timed(data):
        print("nothing was timed", file=sys.stderr)
        return 1
    return 1 if outcome.wrong else status


def _without_output(argv: list[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        if not skip and not word.startswith("--output="):
            kept.append(word)
        skip = word == "--output"
        if skip:
            kept.pop()
    return kept


def _written(paths: list[Path]) -> int:
    for path in paths:
        print(f"wrote {report.relative(path)}")
    return 0
