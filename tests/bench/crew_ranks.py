"""Ranks for the tests of crews, in processes that import this file. The order says what they do."""

import contextlib
import os
import signal
import time
from types import SimpleNamespace

from flash_attn_lab.context_parallel import crew


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
def open_impatient(spec, rank, meeting):
    """Ranks that do not wait long for each other while they open. Rank 0 then works alone for as long as an order
    says."""
    meeting.seconds = crew.MEETING_S = 0.5

    def measure(seconds):
        time.sleep(seconds * (rank == 0))
        return meeting.gather(rank, rank)

    yield SimpleNamespace(measure=measure, about={"rank": rank})


@contextlib.contextmanager
def open_badly(spec, rank, meeting):
    raise RuntimeError("there is no such device")
    yield
