"""What the command lines of a model share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .._library import BadArgument


class ArgumentParser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error here, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)
