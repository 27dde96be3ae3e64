"""Ranks that are processes, for the tests. Pipes connect them to the test, which does their all-gather."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

SPAWN = multiprocessing.get_context("spawn")


def _serve(pipe, function: Callable, rank: int, size: int, args: tuple) -> None:
    def all_gather(mine: bytes) -> list[bytes]:
        pipe.send(("gather", mine))
        return pipe.recv()

    try:
        pipe.send(("result", function(rank, size, all_gather, *args)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


class Ranks:
    """`size` processes, each of which calls function(rank, size, all_gather, *args)."""

    def __init__(self, size: int, function: Callable, *args: Any, timeout: float = 60.0):
        self.end = time.monotonic() + timeout
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = SPAWN.Pipe()
            process = SPAWN.Process(target=_serve, args=(there, function, rank, size, args), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _receive(self, rank: int) -> tuple[str, Any]:
        if not self.pipes[rank].poll(max(self.end - time.monotonic(), 0)):
            raise TimeoutError(f"rank {rank} said nothing until the watchdog barked")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return "ended", None

    def results(self, ended: Callable[[int], None] = lambda rank: None) -> list[tuple[str, Any]]:
        """The last message of each rank: ("result", x), ("error", text) or ("ended", None). Calls ended(rank) when a
        rank's last message has come."""
        try:
            said: list[Any] = [None] * len(self.pipes)
            while not all(said):
                gathered = {}
                for rank in range(len(said)):
                    if said[rank] is None:
                        kind, value = self._receive(rank)
                        if kind == "gather":
                            gathered[rank] = value
                        else:
                            said[rank] = kind, value
                            ended(rank)
                for rank in gathered:
                    self.pipes[rank].send([gathered.get(r, b"") for r in range(len(said))])
            return said
        finally:
            for process in self.processes:
                process.kill()
                process.join()


def run(size: int, function: Callable, *args: Any) -> list[Any]:
    """The results of the ranks. Raises if a rank fails."""
    said = Ranks(size, function, *args).results()
    assert all(kind == "result" for kind, _ in said), said
    return [value for _, value in said]


if sys.platform != "linux":
    raise ImportError("processes that share memory are for Linux")
