"""Runs ranks in separate processes, so that a rank that hangs or crashes does not end the command.

    the command   Crew: starts the processes, gives each an order, waits for the answers, ends them
    a process     serve(): opens the ranks, answers orders until there are no more

"threads" and "jax" have one process for all ranks; every other kind, and a peer, has one rank in a process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from flash_attn_minimal.errors import FlashAttnError, RankLost

from ..bench.machine import first_line

# How ranks of this library are made. "nccl": processes whose group moves data by NCCL. "hosts": the same, where the
# ranks' first and second half pretend to be on two hosts, so that NCCL's sockets join them.
# "jax": one process in which JAX has all devices.
KINDS = ("processes", "threads", "nccl", "hosts", "jax")
ONE_PROCESS = ("threads", "jax")
START_S = 120.0  # imports, CUDA contexts, communicators
MEETING_S = 180.0  # how long ranks wait for each other while they open
_SLOT = 1 << 16  # bytes for a rank's message and its length


class Lost(FlashAttnError):
    """The ranks gave no answer; the text says why. final: other crews of this kind would give no answer either."""

    def __init__(self, text: str, final: bool = False):
        super().__init__(text)
        self.final = final


@dataclass(frozen=True)
class Spec:
    """The description of a crew."""

    kind: str  # one of KINDS, or the name of a peer
    devices: tuple[int | str, ...]  # the device of each rank
    threads: int  # threads of a rank on the CPU
    folder: str = ""  # where processes find each other
    peer: bool = False

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def turns(self) -> list[int]:
        """The turn in which each rank works alone. Ranks on different devices have the same turn; ranks that share a
        device have different turns."""
        return [self.devices[:rank].count(device) for rank, device in enumerate(self.devices)]


class Meeting:
    """Exchanges messages between ranks (processes or threads): every rank gives a message and gets those of all ranks.
    A rank waits for the others for up to `seconds`, which serve() sets for each order: one rank may work alone for as
    long as the order may take."""

    def __init__(self, size: int, barrier: Any, slots: Any):
        self.size, self.barrier, self.slots, self.seconds = size, barrier, slots, MEETING_S

    def gather_bytes(self, rank: int, mine: bytes) -> list[bytes]:
        if len(mine) + 8 > _SLOT:
            raise ValueError(f"a message of {len(mine)} bytes")
        at = rank * _SLOT
        self.slots[at : at + 8 + len(mine)] = len(mine).to_bytes(8, "little") + mine
        self.barrier.wait(self.seconds)
        everything = []
        for start in range(0, self.size * _SLOT, _SLOT):
            length = int.from_bytes(self.slots[start : start + 8], "little")
            everything.append(bytes(self.slots[start + 8 : start + 8 + length]))
        self.barrier.wait(self.seconds)  # nobody writes the next message before all have read this one
        return everything

    def gather(self, rank: int, value: Any) -> list[Any]:
        return [pickle.loads(part) for part in self.gather_bytes(rank, pickle.dumps(value))]


class Crew:
    """The processes of a Spec. After Lost the crew cannot be used again."""

    def __init__(self, spec: Spec, open_ranks: Callable):
        """open_ranks: a function of a module, because the processes import it; see serve()."""
        context = multiprocessing.get_context("spawn")
        self.log = tempfile.NamedTemporaryFile(prefix="context-parallel-", suffix=".log")
        self.folder = tempfile.TemporaryDirectory(prefix="context-parallel-")
        spec = Spec(spec.kind, spec.devices, spec.threads, self.folder.name, spec.peer)
        count = 1 if spec.kind in ONE_PROCESS else spec.size
        barrier = context.Barrier(spec.size)
        slots = context.RawArray("c", spec.size * _SLOT)
        self.connections, self.processes = [], []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(spec, rank, barrier, slots, theirs, self.log.name, open_ranks), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)
        try:
            self.about = self._answer(START_S)
        except Lost as error:
            raise Lost(str(error), final=True) from None

    def ask(self, order: Any, seconds: float) -> Any:
        """The answer of rank 0. Raises Lost if a rank fails, dies, or takes longer than `seconds`."""
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a process that has ended is found in _answer
                connection.send((order, seconds))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        until = time.monotonic() + seconds
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            while len(answers) < len(self.connections):
                waiting = {c: r for r, c in enumerate(self.connections) if r not in answers}
                ready = wait(list(waiting), max(0.0, until - time.monotonic()))
                if not ready:
                    raise Lost(f"no answer within {seconds:.0f} seconds{self._said()}", final=True)
                for connection in ready:
                    rank = waiting[connection]
                    try:
                        answers[rank] = connection.recv()
                    except (EOFError, OSError):
                        self.processes[rank].join(5)
                        how = _how(self.processes[rank].exitcode)
                        raise Lost(f"the process of rank {rank} ended: {how}{self._said()}") from None
                    if not answers[rank][0]:  # a failure: the other ranks answer soon
                        until = min(until, time.monotonic() + 10)
            failed = [answer[1] for answer in answers.values() if not answer[0]]
            if failed:
                raise Lost(min(failed)[1])
            return answers[0][1]
        except Lost as lost:
            texts = [answer[1] for answer in answers.values() if not answer[0]]
            self.kill()
            if texts:
                raise Lost(min(texts)[1]) from None
            raise lost from None
        except BaseException:
            self.kill()
            raise

    def _said(self) -> str:
        """The last line that the processes printed, in brackets."""
        with contextlib.suppress(OSError):
            lines = [line for line in open(self.log.name, errors="replace").read().splitlines() if line.strip()]
            return f" ({lines[-1][:300]})" if lines else ""
        return ""

    def close(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        until = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)
        for connection in self.connections:
            connection.close()
        self.log.close()
        self.folder.cleanup()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


# ---- in a process of the crew ----


def serve(spec: Spec, rank: int, barrier: Any, slots: Any, connection: Any, log: str, open_ranks: Callable) -> None:
    """Answers orders until None comes. `open_ranks(spec, rank, meeting)` is a context manager; its value has `about`,
    which is the first answer, and `measure(order)`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its processes
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    if spec.kind == "threads":
        barrier = threading.Barrier(spec.size)
    meeting = Meeting(spec.size, barrier, slots)
    with _failures(meeting, connection), open_ranks(spec, rank, meeting) as ranks:
        gc.collect()
        gc.freeze()
        connection.send((True, ranks.about))
        while (asked := connection.recv()) is not None:
            order, seconds = asked
            meeting.seconds = seconds + 10  # the command gives up first
            connection.send((True, ranks.measure(order)))


@contextlib.contextmanager
def _failures(meeting: Meeting, connection: Any) -> Iterator[None]:
    """Sends an error to the command as (distance from the cause, text), and breaks the barrier for the other ranks."""
    try:
        yield
    except (EOFError, BrokenPipeError):  # the command has ended
        meeting.barrier.abort()
    except BaseException as error:
        meeting.barrier.abort()
        far = 2 if isinstance(error, threading.BrokenBarrierError) else int(isinstance(error, RankLost))
        text = "another rank left" if far == 2 else f"{type(error).__name__}: {first_line(error)}"
        with contextlib.suppress(OSError):
            connection.send((False, (far, text)))
        os._exit(1)  # without waiting for the other ranks
