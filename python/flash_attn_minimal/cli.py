"""The command line: runs one command and imports only what that command needs."""

from __future__ import annotations

import importlib
import sys

from ._library import FlashAttnError

_COMMANDS = {
    "info": ("flash_attn_minimal.info", "version, library, devices, kernels, and which kernel serves what"),
    "verify": ("flash_attn_minimal.verify", "check large shapes against NumPy float64"),
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
    usage = "usage: python -m flash_attn_minimal COMMAND [--help] ...\n\ncommands:\n" + "".join(
        f"  {name:<16} {summary}\n" for name, (_, summary) in _COMMANDS.items()
    )
    if argv and argv[0] in ("-h", "--help"):
        print(usage, end="")
        return 0
    if not argv or argv[0] not in _COMMANDS:
        print(f"unknown command {argv[0]!r}\n\n{usage}" if argv else usage, end="", file=sys.stderr)
        return 2
    module, _ = _COMMANDS[argv[0]]
    try:
        return importlib.import_module(module).main(argv[1:])
    except FlashAttnError as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        sys.stderr.close()
        return 1
