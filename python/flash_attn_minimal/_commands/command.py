"""Shared by all commands: options that say what is wrong with them, exit statuses, Ctrl-C, and files to be written.

Exit statuses: 0 done, 1 failed (a wrong answer, a finding, no memory), 2 wrong usage, 130 interrupted. Wrong usage is
one line on standard error that names an option as it was typed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import math
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..errors import BadArgument, FlashAttnError, Unsupported

LARGEST = 2**31 - 1  # of a size: sizes of the C ABI have 32 bits
LARGEST_SEED = 2**63 - 1


class UsageError(BadArgument):
    """The command line asks for what this command, or this machine, cannot do."""


def program() -> str:
    """How this process was started, for messages: as the installed script, or as a module."""
    script = "flash-attn-minimal"
    return script if Path(sys.argv[0]).name == script else "python -m flash_attn_minimal"


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The end of a message, "; did you mean ...?", or "" where no known name is close."""
    names = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), names, 1)
    return f"; did you mean {names[close[0]]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """The options of one command. Errors are UsageErrors of one line. Options cannot be abbreviated."""

    def __init__(self, command: str, start: str | None = None, **about: Any):
        """start: what starts the command in messages; default: as this process was started."""
        start = start or program()
        about.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        for key in ("description", "epilog"):
            text = about.get(key, "").replace("python -m flash_attn_minimal", start)
            width = shutil.get_terminal_size().columns - 2
            about[key] = text if "\n" in text.strip() else textwrap.fill(text, max(width, 20))
        super().__init__(prog=f"{start} {command}", allow_abbrev=False, **about)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument ").replace("expected one argument", "a value is missing"))

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{name!r} is one argument too many; `{self.prog} --help` lists what there is")
            options = [option for action in self._actions for option in action.option_strings]
            hint = did_you_mean(name, options) or f"; `{self.prog} --help` lists the options"
            self.error(f"{name} is not an option of this command{hint}")
        return found


# ---- types of options ----


def _in_range(text: str, value: float, least: float, most: float, above: bool = False) -> Any:
    """The value of `text`, if it is from `least` to `most`; with `above`, `least` itself is too small."""
    if value < least or (above and value == least):
        whole = isinstance(value, int)
        what = f"not above {least:g}" if above else f"below {least if whole else format(least, 'g')}"
        if least == 0 or whole and least == 1:
            what = "not positive" if above or least == 1 else "negative"
        raise argparse.ArgumentTypeError(f"{text} is {what}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text} is above {most if isinstance(value, int) else format(most, 'g')}")
    return value


def integer(least: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return _in_range(text, value, least, most)

    return parsed


any_seed = integer(0, LARGEST_SEED)


def real(least: float = 0.0, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """A number from `least` to `most`; with `above`, `least` itself is too small."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number")
        return _in_range(text, value, least, most, above)

    return parsed


def one_of(names: Collection[str], what: str | None = None) -> dict[str, Any]:
    """Arguments of add_argument for an option that takes one of some names. `what` stands for them in the usage."""

    def parsed(text: str) -> str:
        return known(text, names)

    return {"type": parsed, "metavar": what or "{" + ",".join(names) + "}"}


def known(text: str, names: Collection[str]) -> str:
    """The text, if it is one of the names."""
    if text not in names:
        hint = did_you_mean(text, names) if len(names) > 6 else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}{hint}")
    return text


# ---- running a command ----


def choose(start: str, version: str, commands: dict[str, tuple[str, str]], argv: list[str]) -> int:
    """Runs the command that the first argument names. commands: by name, a module with a function main and what it
    does. start: what starts this process, for messages."""
    usage = f"usage: {start} COMMAND [--help] ...\n       {start} --version\n\ncommands:\n" + "".join(
        f"  {name:<16} {summary}\n" for name, (_, summary) in commands.items()
    )
    if not argv:
        print(usage, end="", file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help"):
        return run("help", lambda: _say(usage))
    if name == "--version":
        return run("version", lambda: _say(f"flash-attn-minimal {version}\n"))
    if name not in commands:
        what = "an option" if name.startswith("-") else "a command"
        hint = did_you_mean(name, [*commands, "--help", "--version"]) or f"; `{start} --help` lists the commands"
        print(f"{name!r} is not {what}{hint}", file=sys.stderr)
        return 2
    return run(name, lambda: importlib.import_module(commands[name][0]).main(rest))


def _say(text: str) -> int:
    print(text, end="")
    return 0


def command(name: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str] | None], int]]:
    """Makes a function of the arguments into a command: it returns an exit status and raises for nothing that a user
    does."""

    def decorate(body: Callable[[list[str]], int]) -> Callable[[list[str] | None], int]:
        @functools.wraps(body)
        def main(argv: list[str] | None = None) -> int:
            return run(name, functools.partial(body, sys.argv[1:] if argv is None else argv))

        return main

    return decorate


def run(name: str, body: Callable[[], int]) -> int:
    """The exit status of body(); an error is printed after the command's name."""
    try:
        status = body()
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # --help, --version
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads our output has closed it, such as `head`
        drop_output()
        return 1
    except (BadArgument, Unsupported) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except FlashAttnError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:  # NumPy's and CuPy's say how much they were asked for
        print(f"{name}: out of memory: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        usage = FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError
        return 2 if isinstance(error, usage) else 1


def drop_output() -> None:
    """Discards all further output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- files that a command will write ----


def check_file(option: str, file: str | os.PathLike[str] | None) -> None:
    """Refuses, before anything is measured, a file that cannot be written."""
    if file is None:
        return
    path = Path(file)
    with refused(option, file):
        if path.is_file():
            with path.open("ab"):
                pass
        elif path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        elif not path.exists():
            with tempfile.TemporaryFile(dir=path.parent):
                pass


@contextlib.contextmanager
def refused(option: str, name: str | os.PathLike[str]) -> Iterator[None]:
    """Errors inside mean that the named file or folder cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UsageError(f"{option} {name}: cannot write there: {getattr(error, 'strerror', None) or error}") from None
