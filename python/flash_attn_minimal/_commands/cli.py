"""The command line: runs one command and imports only what that command needs."""

from __future__ import annotations

import importlib
import sys

from .. import __version__
from .command import did_you_mean, program, run

_COMMANDS = {
    "info": ("flash_attn_minimal._commands.info", "version, library, devices, kernels, and which kernel serves what"),
    "verify": ("flash_attn_minimal._commands.verify", "check large shapes against NumPy float64"),
    "fuzz": ("flash_attn_minimal.fuzz", "random calls of every function, right and wrong ones, against float64"),
    "bench": ("flash_attn_minimal.bench", "time the kernels, write JSON, tables and pictures"),
    "experiment": ("flash_attn_minimal.experiments", "one question, its measurement, and a page with the answer"),
    "context-parallel": ("flash_attn_minimal.bench.context_parallel", "check and time attention across ranks"),
    "generate": ("flash_attn_minimal.llama.generate", "text from a Llama model, with this attention"),
    "quantize": ("flash_attn_minimal.llama.quantize", "what 4-bit weights cost a model, and the model with them"),
    "synthetic": ("flash_attn_minimal.llama.synthetic", "write a random model of a known shape"),
}


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status of the process: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    usage = f"usage: {program()} COMMAND [--help] ...\n       {program()} --version\n\ncommands:\n" + "".join(
        f"  {name:<16} {summary}\n" for name, (_, summary) in _COMMANDS.items()
    )
    if not argv:
        print(usage, end="", file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help"):
        return run("help", lambda: _say(usage))
    if name == "--version":
        return run("version", lambda: _say(f"flash-attn-minimal {__version__}\n"))
    if name not in _COMMANDS:
        what = "an option" if name.startswith("-") else "a command"
        hint = did_you_mean(name, [*_COMMANDS, "--help", "--version"]) or f"; `{program()} --help` lists the commands"
        print(f"{name!r} is not {what}{hint}", file=sys.stderr)
        return 2
    return run(name, lambda: importlib.import_module(_COMMANDS[name][0]).main(rest))


def _say(text: str) -> int:
    print(text, end="")
    return 0
