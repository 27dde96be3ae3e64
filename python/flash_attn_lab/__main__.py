"""`python -m flash_attn_lab COMMAND`."""

import sys

from flash_attn_minimal import __version__
from flash_attn_minimal._commands.command import choose

from . import PROGRAM

COMMANDS = {
    "bench": ("flash_attn_lab.bench", "time the kernels, write JSON, tables and pictures"),
    "context-parallel": ("flash_attn_lab.context_parallel", "check and time attention across ranks"),
    "compare": ("flash_attn_lab.models.compare", "a model's text with flash and with standard attention, in turns"),
    "experiment": ("flash_attn_lab.experiments", "one question, its measurement, and a page with the answer"),
    "fuzz": ("flash_attn_lab.fuzz", "random calls of every function, right and wrong ones, against float64"),
    "quality": ("flash_attn_lab.models.measure", "what 4-bit weights cost a model"),
    "synthetic": ("flash_attn_lab.models.synthetic", "write a random model of a known shape"),
}


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status of the process."""
    return choose(PROGRAM, __version__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
