"""`python -m flash_attn_minimal bench`: check, then time, then write JSON, a table and pictures."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .. import backward_kernels, kernels
from .._library import load
from . import report, small_ops, suites
from .machine import DTYPES, SHORT, BenchError, device_slug, library_has_cuda, open_machine
from .systems import PEERS
from .timing import QUICK, Protocol


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
        epilog=f"suites:\n{suites.__doc__.partition(chr(10) * 2)[2]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", choices=list(suites.SUITES), help="default: forward on a GPU, cpu without one")
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
        help="ours: kernels by name, or best; default: best, in the ladder all",
    )
    add("--peers", metavar="NAME,...", help=f"{'; '.join(', '.join(names) for names in PEERS.values())}; all; none")
    add("--model", metavar="NAME", help="llama: a shape that `synthetic` knows")
    add("--threads", type=positive, metavar="N", help="CPU threads; default: all cores")
    add("--rounds", type=positive, metavar="N", help="bursts of each system on each shape")
    add("--quick", action="store_const", const=True, help="fewer shapes, shorter bursts")
    add(
        "--sustained", action="store_const", const=True, help="also time a third of a second each, with clock and power"
    )
    add("--seed", type=natural, metavar="N", help="of the random inputs and of the order")
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
    load()  # a missing library is said before anything else
    if options.suite is None:
        options.suite = "cpu" if options.device == "cpu" or not library_has_cuda() else "forward"
        if options.suite == "cpu":
            options.device = None
    for name, value in vars(options).items():
        if value is not None and name not in suites.SUITES[options.suite].options | {"suite", "plot_only"}:
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

    if options.suite in ("ops", "overhead"):
        machine, outcome = (small_ops.run if options.suite == "ops" else suites.overhead)(options, protocol)
    elif options.suite == "linear":
        from . import linear

        machine, outcome = linear.run(options, protocol)
    elif options.suite == "decode":
        from . import decode

        machine, outcome = decode.run(options, protocol)
    elif options.suite == "block":
        from . import block

        machine, outcome = block.run(options, protocol)
    elif options.suite == "llama":
        from . import llama

        machine, outcome = llama.run(options, protocol)
    elif options.suite == "prefill":
        from . import prefill

        machine, outcome = prefill.run(options, protocol)
    else:
        machine = open_machine("cpu" if options.suite == "cpu" else options.device, options.framework)
        usual = suites.SUITES[options.suite].dtype or ("bfloat16" if machine.device == "cuda" else "float32")
        options.dtype = options.dtype or usual
        options.allow_tf32 = options.allow_tf32 or options.suite == "float32"
        options.backward = options.backward or options.suite.startswith("backward")
        if options.allow_tf32 and options.dtype != "float32":
            raise BenchError(f"--allow-tf32 needs --dtype fp32, not {SHORT[options.dtype]}")
        _check_kernels(options, machine)
        if options.suite == "profile":
            return _profile(options, machine)
        print(f"{machine.title}, {SHORT[options.dtype]}, {machine.framework} arrays", flush=True)
        outcome = suites.run(options, machine, protocol)
    # The folder is nobody's business but the caller's: the recorded command reproduces the numbers without it.
    command = shlex.join(["python", "-m", "flash_attn_minimal", "bench", *_without_output(argv)])
    data = report.result(options.suite, command, machine, outcome)
    folder = options.output or report.default_folder(device_slug(machine))
    status = _written(report.write(data, folder))
    if outcome.wrong:
        print(f"{outcome.wrong} wrong answers", file=sys.stderr)
    if not report.attention_rows(data) and not any("us" in row for row in outcome.rows if options.suite == "ops"):
        print("nothing was timed", file=sys.stderr)
        return 1
    return 1 if outcome.wrong else status


def _check_kernels(options, machine):
    table = backward_kernels() if options.backward else kernels()
    known = [kernel["name"] for kernel in table if kernel["device"] == machine.device]
    named = options.kernel or suites.SUITES[options.suite].kernels
    for name in named:
        if name not in known and name != "best":
            raise BenchError(
                f"--kernel {','.join(named)}: {name!r} is none of best, {', '.join(known)} on {machine.device}"
            )
    if options.threads and machine.device == "cuda":
        raise BenchError(f"--threads {options.threads} has no meaning on a GPU")
    if len(options.kernel or ()) > 1 and options.suite == "profile":
        raise BenchError(f"--kernel {','.join(options.kernel)}: suite profile takes one kernel")
    if options.kernel == ["best"] and options.suite == "profile":
        options.kernel = None


def _profile(options, machine) -> int:
    try:
        if options.inner:
            return suites.profile_inner(options, machine)
        if options.run:
            command = suites.profile_command(options, machine, sys.executable)
            if shutil.which(command[0]) is None:
                raise BenchError(f"{command[0]} is not on PATH; without --run the command is printed")
            return subprocess.run(command).returncode
        print(shlex.join(suites.profile_command(options, machine, "python")))
        return 0
    except suites.Refused as refusal:
        raise BenchError(str(refusal)) from None


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
