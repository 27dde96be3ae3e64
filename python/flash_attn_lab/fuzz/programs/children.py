"""Runs work in a forked process, with a time limit."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..function import CRASH, HANG, told

DONE, RAISED = "done", "raised"
_inside: list[bool] = []  # not empty in a process that in_child has made


def in_child(work: Callable[[], Any], seconds: float) -> tuple[str, Any]:
    """Runs work() in a forked process. Returns (DONE, its result), (RAISED, text), or (HANG or CRASH, the process's
    last output)."""
    with tempfile.TemporaryFile() as errors:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            _run(work, writes, errors.fileno(), seconds)
        os.close(writes)
        text, late = _read(reads, time.monotonic() + seconds)
        os.close(reads)
        if late:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if not late and status == 0 and text:
            return pickle.loads(text)
        size = errors.seek(0, os.SEEK_END)
        errors.seek(max(size - 3000, 0))
        said = errors.read().decode(errors="replace").strip()
    if late:
        return HANG, f"no end after {seconds:.0f} s\n{said}"
    how = f"signal {signal.Signals(status & 127).name}" if status & 127 else f"exit status {status >> 8}"
    return CRASH, f"the process ended: {how}\n{said}"


def _run(work: Callable[[], Any], writes: int, errors: int, seconds: float) -> NoReturn:
    code = 1
    try:
        gc.disable()
        os.dup2(errors, 2)
        faulthandler.enable()
        if seconds > 2 and not _inside:  # a forked process lacks the thread that would dump, and waits for it
            faulthandler.dump_traceback_later(seconds - 1)
        _inside.append(True)
        if torch := sys.modules.get("torch"):  # a forked process lacks its OpenMP threads, and would wait for them
            torch.set_num_threads(1)
        try:
            found = DONE, work()
        except Exception as error:
            found = RAISED, told(error)
        with os.fdopen(writes, "wb") as out:
            pickle.dump(found, out, pickle.HIGHEST_PROTOCOL)
        code = 0
    finally:
        os._exit(code)


def _read(reads: int, until: float) -> tuple[bytes, bool]:
    """(all bytes that are written, False), or (b"", True) if the time is over first."""
    parts: list[bytes] = []
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([reads], [], [], left)[0]:
            return b"", True
        part = os.read(reads, 1 << 20)
        if not part:
            return b"".join(parts), False
        parts.append(part)
