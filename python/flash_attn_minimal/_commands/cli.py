"""The command line: runs one command and imports only what that command needs."""

from __future__ import annotations

import importlib.util
import sys

from .. import __version__
from .command import choose, program

_COMMANDS = {
    "info": ("flash_attn_minimal._commands.info", "version, library, devices, kernels, and which kernel serves what"),
    "verify": ("flash_attn_minimal._commands.verify", "check large shapes against NumPy float64"),
    "generate": ("flash_attn_minimal.llama.generate", "text from a Llama model, with this attention"),
    "quantize": ("flash_attn_minimal.llama.quantize", "a model with 4-bit weights"),
}
_LABORATORY = "flash_attn_lab"  # a package of checkouts, not of wheels
_MOVED = ("bench", "context-parallel", "experiment", "fuzz", "synthetic")  # there


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status of the process: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    if argv and argv[0] in _MOVED:
        command = f"python -m {_LABORATORY} {argv[0]}"
        if importlib.util.find_spec(_LABORATORY) is None:
            where = f"is not in the installed package; in a checkout, `PYTHONPATH=python {command}` runs it"
        else:
            where = f"is now `{command}`"
        print(f"{argv[0]!r} {where}", file=sys.stderr)
        return 2
    return choose(program(), __version__, _COMMANDS, argv)
