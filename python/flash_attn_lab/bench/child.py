"""A child process that answers orders, a line of JSON for each, and that may die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from typing import Any

FIRST_S = 180  # of its start, before it counts as hanging


class Lost(Exception):
    """A child died or hangs; the text says which."""


class Child:
    """`said` is the first line, which a child writes once it is ready."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=env,
            start_new_session=True,  # Ctrl-C is for the command, which ends its children
        )  # fmt: skip
        self._text = b""
        try:
            self.said = self._line(FIRST_S)
        except BaseException:
            self.end()
            raise

    def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to an order. Lost where there is none within `seconds`."""
        assert self.process.stdin
        with contextlib.suppress(OSError):  # reading finds it dead
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        return self._line(seconds)

    def _line(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout
        ends = time.monotonic() + seconds
        while b"\n" not in self._text:
            if not select.select([self.process.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise Lost(f"no answer after {seconds:.0f} s")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise Lost(f"the process ended: exit status {self.process.wait()}. {self._last_words()}")
            self._text += part
        line, self._text = self._text.split(b"\n", 1)
        return json.loads(line)

    def _last_words(self) -> str:
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(size - 500, 0))
        lines = self.errors.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if not line.startswith("[W")]  # without PyTorch's warnings
        return " ".join(" ".join(errors).split())[-300:]

    def end(self) -> None:
        """Ends the process, also one that hangs."""
        if self.process.stdin:
            with contextlib.suppress(OSError):  # an order may still be in its buffer
                self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self.errors.close()
