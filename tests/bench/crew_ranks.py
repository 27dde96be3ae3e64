"""Ranks for the tests of crews, in processes that import this file. The order says what they do."""

import contextlib
import os
import signal
import time
from types import SimpleNamespace


@contextlib.contextmanager
def open_ranks(spec, rank, meeting):
    def measure(order):
        what, who = order
        if what == "gather":
            return meeting.gather(rank, (rank, who))
        if rank == who:
            if what == "raise":
                raise ValueError(f"rank {rank} does not like it")
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hang":
                time.sleep(1000)
        meeting.gather(rank, None)
        return rank

    yield SimpleNamespace(measure=measure, about={"rank": rank})


@contextlib.contextmanager
def open_badly(spec, rank, meeting):
    raise RuntimeError("there is no such device")
    yield
