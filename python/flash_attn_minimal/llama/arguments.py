"""The argument parser shared by the command lines for models."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .._library import BadArgument


class ArgumentParser(argparse.ArgumentParser):
    """Reports an error as a BadArgument, whose text is one line, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)
