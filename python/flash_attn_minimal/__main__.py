"""`python -m flash_attn_minimal COMMAND`, installed as `flash-attn-minimal COMMAND`: see _commands/cli.py."""

import sys

from ._commands.cli import main


def run() -> int:
    """Runs the command in this process's arguments; returns the exit status."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
