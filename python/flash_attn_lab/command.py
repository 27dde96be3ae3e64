"""Shared by the laboratory's commands, beside what all commands share (flash_attn_minimal/_commands/command.py): lists
as values of options, folders, and Ctrl-C."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from flash_attn_minimal._commands.command import integer, known, refused


def integers(text: str) -> list[int]:
    """Positive whole numbers: 64,128."""
    return [integer()(part) for part in text.split(",")]


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Some of the names, separated by commas."""

    def parsed(text: str) -> list[str]:
        return [known(word, names) for word in text.split(",")]

    return parsed


def without(argv: list[str], *options: str) -> list[str]:
    """The arguments without these options and their values: where results go does not change them."""
    kept, skip = [], False
    for word in argv:
        if not skip and word not in options and not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
        skip = not skip and word in options
    return kept


def check_folder(option: str, folder: str | os.PathLike[str]) -> None:
    """Refuses, before anything is measured, a folder that can be neither made nor written to."""
    path = Path(folder)
    with refused(option, folder):
        while not path.exists() and path != path.parent:
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            pass


class Interrupt:
    """Whether a signal has come inside `interruptible`."""

    came = False

    def check(self) -> None:
        """Raises what was lost: a KeyboardInterrupt raised inside a callback of the interpreter goes nowhere."""
        if self.came:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Ctrl-C, and SIGTERM, which `timeout` sends, raise a KeyboardInterrupt inside the block."""
    interrupt = Interrupt()

    def stop(number: int, frame: Any) -> None:
        interrupt.came = True
        raise KeyboardInterrupt

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread, which alone gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for(threads: Collection[threading.Thread], seconds: float = math.inf) -> None:
    """Returns when all threads have ended, or after `seconds`.

    Unlike Thread.join, it notices a signal that arrives just before it begins to wait; and Python before 3.13 takes a
    thread for ended whose join() was interrupted.
    """
    ends = time.monotonic() + seconds
    while any(thread.is_alive() for thread in threads) and time.monotonic() < ends:
        time.sleep(0.05)
