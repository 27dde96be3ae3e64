"""`python -m flash_attn_minimal COMMAND`: see cli.py."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
