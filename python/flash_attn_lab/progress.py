"""Shows the progress of a long command: a bar on a terminal with rich, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class Silent:
    """Prints nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def say(self, line: str) -> None:
        """Prints a line apart from the steps."""

    def step(self, line: str) -> None:
        """Counts one finished step; `line` describes it."""


class Progress(Silent):
    """Counts steps and shows them. total: how many there will be; 0 where nobody knows.

    every: the least number of seconds between two lines of `step`. With 0 every step's line is kept. Otherwise a
    terminal shows only the latest line, beside the bar.
    """

    def __init__(self, total: int, title: str = "", every: float = 0.0, file: TextIO | None = None):
        self.total, self.done, self.every, self.file = total, 0, every, file or sys.stdout
        self._bar, self._last = None, time.monotonic()
        if self.file.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Bar(*columns, console=Console(file=self.file), transient=not every)
            self._task = self._bar.add_task(title, total=total or None)

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self.file, flush=True)

    def step(self, line: str) -> None:
        self.done += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=line if self.every else None)
            if not self.every:
                self.say(line)
        elif time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            of = f"/{self.total}" if self.total else ""
            print(f"[{self.done}{of}] {line}", file=self.file, flush=True)
