"""Groups of ranks: threads of this process, or processes that find each other through an all-gather.

A rank is a thread or a process with its own device, or with a share of one. Every rank has a Group and makes the same
calls on it in the same order. A call waits until all ranks have made it, at most `timeout` seconds. A missing rank is
therefore an error, not a hang.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .._core.checks import integer, number, one_of, quoted
from .._core.library import _ERRORS
from .._core.recordings import Scratch
from .._core.structs import CPU, CUDA, new
from ..errors import BadArgument, FlashAttnError, RankLost, Unsupported
from ._structs import KINDS, MOST_RANKS, AllGather, GroupArgs, load

AllGatherFunction = Callable[[bytes], Sequence[bytes]]
Result = TypeVar("Result")

_numbers = itertools.count()
named: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()  # a graph of operators holds only names


class Group:
    """One rank's membership of a group, made by thread_groups, create_group, from_torch or from_mpi.

    A rank makes one call at a time. If an argument is wrong on one rank, or the ranks disagree, all ranks raise and the
    group stays usable. After RankLost or a CudaError it is not usable.

    Attributes:
        rank, size: the number of this rank, 0 .. size - 1, and the number of ranks.
        device: the device of this rank's arrays, "cpu" or for example "cuda:0".
        kind: "threads", "processes" or "nccl".
        name: unique among the groups of this process; the key of the group in `named`.
    """

    def __init__(self, args: GroupArgs, all_gather: AllGatherFunction, kind: str, crew: _Crew | None = None):
        self.rank, self.size, self.kind = args.rank, args.size, kind
        self.device = "cpu" if args.device == CPU else f"cuda:{args.device_index}"
        self._failures: list[BaseException] = []  # exceptions of all_gather, which C cannot pass on
        self._callback = args.all_gather = _callback(all_gather, args.size, self._failures)
        # Reentrant locks: a garbage collector or a signal handler may run `close` or `abort` while this thread has one.
        self._turn, self._ending = threading.RLock(), threading.RLock()
        self._calling = False  # whether the thread that holds _turn is in a call
        self._crew, self._process = crew, os.getpid()
        self.scratch = Scratch()
        self.calls: dict[tuple, Any] = {}  # calls by signature; see _rank_call.py
        self._handle: int | None = None
        handle = ct.c_void_p()
        try:
            load().fa_group_create(args, ct.byref(handle))
        except FlashAttnError as error:
            raise error from (self._failures[0] if self._failures else None)
        self._handle = handle.value
        self.name = f"group {next(_numbers)}"
        named[self.name] = self
        self._finalizer = weakref.finalize(self, _drop, handle.value, crew, self._process, self.rank)
        self._finalizer.atexit = False  # the end of the process frees everything and waits for no rank

    def __repr__(self) -> str:
        state = "" if self._handle else ", closed"
        return f"<Group: rank {self.rank} of {self.size}, {self.kind}, {self.device}{state}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not _is_everybodys(error):
            self.abort(_reason(self.rank, error))
        self.close()

    def close(self) -> None:
        """Frees what the group holds on this rank. Collective: it waits for the other ranks, at most the timeout,
        unless the group has ended already. Groups of thread_groups do not wait: closing the first ends them all, and
        closing the last frees them."""
        if self._handle is None:
            return
        if os.getpid() != self._process:  # in the child of a fork, where locks of other threads are never released
            self._handle = None
            self._finalizer.detach()
            return
        with self._turn:  # waits for a call that another thread of this rank makes
            if self._calling:
                raise BadArgument(
                    f"group={self} is in a call of this thread, which cannot close it before the call ends"
                )
            with self._ending:
                handle, self._handle = self._handle, None
            if handle is None or not self._finalizer.detach():
                return
            self.calls.clear()
            if self._crew:
                self._crew.leave(handle, f"rank {self.rank} has closed its group")
            else:
                load().fa_group_destroy(handle)

    def abort(self, reason: str) -> None:
        """Ends the group, from any thread: calls of all ranks, waiting ones included, raise RankLost with the
        reason."""
        if os.getpid() != self._process:
            return
        with self._ending:
            if self._handle is not None:
                load().fa_group_abort(self._handle, str(reason).encode())

    def reserve(self, shared_bytes: int) -> None:
        """Makes sure that every rank has this much memory that other ranks can read: the largest `shared_bytes` of the
        plans to come. Collective. A call that needs more than there is reserves it by itself and then waits for the
        GPU. A program that captures CUDA graphs therefore reserves it before the capture."""

        def prepare() -> tuple:
            size = integer("shared_bytes", shared_bytes, 0, 2**63 - 1)
            return lambda handle: load().fa_group_reserve(handle, size), lambda: None

        self.collective(prepare)

    # ---- for calls.py ----

    def collective(self, prepare: Callable[[], tuple[Callable[[int], None], Callable[[], Result]]]) -> Result:
        """Makes a call of this rank. `prepare` returns two functions: one makes the call with the group's handle, the
        other returns its result. If `prepare` fails, the other ranks, which wait for this one, are told."""
        if os.getpid() != self._process:
            raise BadArgument(f"group={self} belongs to process {self._process}, and this is {os.getpid()}")
        mine = self._turn.acquire(blocking=False)
        try:
            if not mine or self._calling:
                raise BadArgument(f"group={self} is in another call of this rank: a rank makes one call at a time")
            try:
                self._calling = True
                if self._handle is None:
                    raise BadArgument(f"group={self} is closed")
                return self._start(prepare)()
            finally:
                self._calling = False
        finally:
            if mine:
                self._turn.release()

    def _start(self, prepare: Callable) -> Callable[[], Any]:
        """Makes the call. Its errors are marked as raised on all ranks."""
        try:
            try:
                launch, result = prepare()
            except Exception as error:
                self.refuse(error)
                raise
            launch(self._handle)
            return result
        except Exception as error:
            if isinstance(error, RankLost) and self._failures:
                error.__cause__ = self._failures[0]
            error._everybodys = True  # type: ignore[attr-defined]
            raise

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks, which wait for this rank's call, that it will not come."""
        status = next((number for number, kind in _ERRORS.items() if isinstance(error, kind)), 1)
        text = str(error) if isinstance(error, FlashAttnError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(FlashAttnError):  # `error` is the one to raise, not an error of refusing
            load().fa_group_refuse(self._handle, status, text.encode())


class _Crew:
    """The groups of one thread_groups, which a single thread may close one after another. The first that is closed ends
    the group, so that no rank waits for it. Nothing is freed before the last is closed."""

    def __init__(self, size: int):
        # Reentrant: a garbage collector may drop one group of the crew while this thread closes another.
        self.size, self.handles, self.lock = size, [], threading.RLock()

    def leave(self, handle: int | None, reason: str) -> None:
        """Closes the group of one rank; handle=None for a rank whose group could not be made."""
        lib = load()
        if handle is not None:
            lib.fa_group_abort(handle, reason.encode())
        with self.lock:
            self.handles.append(handle)
            if len(self.handles) < self.size:
                return
            handles, self.handles = self.handles, []
        for handle in handles:
            lib.fa_group_destroy(handle)


def _drop(handle: int, crew: _Crew | None, process: int, rank: int) -> None:
    """Ends a group that nothing refers to any more, without waiting for other ranks: a garbage collector cannot
    wait."""
    if os.getpid() != process:
        return  # in the child of a fork
    reason = f"rank {rank} dropped its group without closing it"
    if crew:
        crew.leave(handle, reason)
    else:
        load().fa_group_abort(handle, reason.encode())
        load().fa_group_destroy(handle)


def _callback(all_gather: AllGatherFunction, size: int, failures: list[BaseException]) -> Any:
    """The C function that calls all_gather."""

    def gather(context, mine, everything, count):
        try:
            parts = [bytes(part) for part in all_gather(ct.string_at(mine, count))]
            if [len(part) for part in parts] != [count] * size:
                lengths = [len(part) for part in parts]
                raise BadArgument(f"all_gather returned parts of {lengths} bytes: expected {size} of {count} bytes")
            ct.memmove(everything, b"".join(parts), count * size)
            return 0
        except BaseException as error:
            failures.append(error)
            return 1

    return AllGather(gather)


def _device(device: Any) -> tuple[int, int]:
    if isinstance(device, (int, np.integer)) and not isinstance(device, bool):
        return CUDA, integer("device", device, 0, 2**31 - 1)
    name = str(device)
    if name == "cpu":
        return CPU, 0
    if found := re.fullmatch(r"cuda:(\d{1,6})", name):
        return CUDA, int(found[1])
    raise BadArgument(f"device={quoted(device)} is neither 'cpu' nor the number of a CUDA device")


def _args(kind: str, rank: Any, size: Any, device: Any, timeout: Any) -> GroupArgs:
    args = new(GroupArgs)
    args.kind = KINDS[one_of("kind", kind, KINDS)]
    args.size = integer("size", size, 1, MOST_RANKS)
    args.rank = integer("rank", rank, 0, args.size - 1)
    args.device, args.device_index = _device(device)
    seconds = number("timeout", timeout)
    if not 0.001 <= seconds <= 1e9:
        raise BadArgument(f"timeout={quoted(timeout)} is outside 0.001 .. 1e9 seconds")
    args.timeout_ms = round(1000 * seconds)
    return args


def create_group(
    rank: int,
    size: int,
    all_gather: AllGatherFunction,
    *,
    kind: str = "processes",
    device: Any = "cpu",
    timeout: float = 30.0,
    nccl_comm: int | None = None,
    nccl_library: str | None = None,
) -> Group:
    """Makes a rank's Group, by means of any channel between the ranks. Collective.

    Arguments:
        rank, size: the number of this rank, 0 .. size - 1, and the number of ranks.
        all_gather: a function that takes a bytes object and returns those of all ranks, in the order of ranks. It is
            called a few times while the group is made, and with kind="nccl" also in every later call.
        kind: "processes" of one host, "threads" of one process, or "nccl": GPUs of any hosts.
        device: "cpu", or the number of this rank's CUDA device; ranks may share one.
        timeout: seconds that a call waits for the other ranks.
        nccl_comm: with kind="nccl", the address of an ncclComm_t of the same ranks, which the caller still owns.
        nccl_library: path of libnccl; None means the one loaded in this process, else libnccl.so.2.
    """
    args = _args(kind, rank, size, device, timeout)
    if nccl_comm is not None:
        args.nccl_comm = integer("nccl_comm", nccl_comm, 1, 2**64 - 1)
    if nccl_library is not None:
        args.nccl_library = os.fsencode(nccl_library)
    if not callable(all_gather):
        raise BadArgument(f"all_gather={quoted(all_gather)} is not a function: it gathers the bytes of all ranks")
    return Group(args, all_gather, kind)


def from_torch(
    process_group: Any = None, device: Any = None, timeout: float = 30.0, *, kind: str = "processes"
) -> Group:
    """The Group of a PyTorch process group (None: all processes). Collective among its ranks.

    Arguments:
        device: "cpu" or the number of this rank's CUDA device. None means the current CUDA device, or "cpu" without
            one.
        kind: "processes" for processes of one host; or "nccl" for any hosts, through the process group's NCCL
            communicator.
    """
    import torch

    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        raise BadArgument("torch.distributed has no process group: call init_process_group before")
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    elif isinstance(device, (str, torch.device)) and (named := torch.device(device)).type == "cuda":
        device = torch.cuda.current_device() if named.index is None else named.index
    size = dist.get_world_size(process_group)

    def all_gather(mine: bytes) -> list[bytes]:
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, mine, process_group)
        return everything

    rank = dist.get_rank(process_group)
    if one_of("kind", kind, KINDS) != "nccl":
        return create_group(rank, size, all_gather, kind=kind, device=device, timeout=timeout)
    comm = _nccl_comm(process_group or dist.group.WORLD, torch.device("cuda", device), all_gather)
    return create_group(rank, size, all_gather, kind=kind, device=device, timeout=timeout, nccl_comm=comm)


def _nccl_comm(process_group: Any, device: Any, all_gather: AllGatherFunction) -> int:
    """The address of PyTorch's ncclComm_t, which PyTorch makes in the first collective call on the device."""
    backend = process_group._get_backend(device)
    pointer = getattr(backend, "_comm_ptr", None)
    if pointer is None:
        raise Unsupported(
            f"kind='nccl': the backend {type(backend).__name__} of this PyTorch does not show its ncclComm_t"
        )
    all_gather(b"")
    comm = pointer()
    if not comm:
        raise Unsupported("kind='nccl': PyTorch has not made its ncclComm_t yet")
    return comm


def from_mpi(comm: Any, device: Any = "cpu", timeout: float = 30.0) -> Group:
    """The Group of an mpi4py communicator whose processes are on one host. Collective among its ranks."""
    return create_group(comm.Get_rank(), comm.Get_size(), comm.allgather, device=device, timeout=timeout)


def thread_groups(
    size: int | None = None, device: Any = "cpu", timeout: float = 30.0, *, devices: Sequence[Any] | None = None
) -> list[Group]:
    """Makes the Groups of ranks that are threads of this process, one for each rank; `run` starts such threads.

    Arguments:
        size: the number of ranks, all on `device`.
        devices: the device of each rank, in place of size and device.

    >>> import numpy as np
    >>> from flash_attn_minimal import distributed, flash_attn_func
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 40, 2, 8), dtype=np.float32)
    >>> groups = distributed.thread_groups(4)
    >>> def rank(group):
    ...     part = [distributed.shard(x, "zigzag", group.rank, group.size) for x in (q, k, v)]
    ...     return distributed.forward(group, *part, causal=True)
    >>> out = distributed.unshard(distributed.run(groups, rank), "zigzag")
    >>> bool(np.allclose(out, flash_attn_func(q, k, v, causal=True), atol=1e-6))
    True
    """
    if devices is None:
        if size is None:
            raise BadArgument("size=None without devices: how many ranks are there?")
        devices = [device] * integer("size", size, 1, MOST_RANKS)
    elif size is not None and size != len(devices):
        raise BadArgument(f"size={size}, but devices names {len(devices)}")
    size = len(devices)
    every = [_args("threads", rank, size, device, timeout) for rank, device in enumerate(devices)]
    crew, barrier, slots = _Crew(size), threading.Barrier(size), [b""] * size

    def make(rank: int) -> Group:
        def all_gather(mine: bytes) -> list[bytes]:
            slots[rank] = mine
            barrier.wait(every[rank].timeout_ms / 1000)
            everything = list(slots)
            barrier.wait(every[rank].timeout_ms / 1000)  # all ranks have read before anybody writes the next message
            return everything

        try:
            return Group(every[rank], all_gather, "threads", crew)
        except BaseException:
            crew.leave(None, "")
            barrier.abort()
            raise

    return _on_threads([lambda rank=rank: make(rank) for rank in range(size)])


def run(groups: Sequence[Group], function: Callable[..., Result], *args: Any) -> list[Result]:
    """Calls function(group, *args) for each group of thread_groups, each on its own thread; returns the results.

    If some raise, `run` waits for all threads and then raises the first error of a rank that caused one. An error that
    the other ranks do not know of ends the group, so that they do not wait for this rank.
    """

    def call(group: Group) -> Result:
        try:
            return function(group, *args)
        except BaseException as error:
            if not _is_everybodys(error):
                group.abort(_reason(group.rank, error))
            raise

    try:
        return _on_threads([lambda group=group: call(group) for group in groups])
    except KeyboardInterrupt as error:
        for group in groups:
            group.abort(_reason(group.rank, error))
        raise


def _on_threads(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=_distance)
    return results


def _distance(error: BaseException) -> int:
    """How far an error is from its cause: 0 on the rank itself, 1 reported by another rank, 2 on a rank that waited."""
    if isinstance(error, RankLost) or isinstance(error.__cause__, threading.BrokenBarrierError):
        return 2
    return int(isinstance(error, FlashAttnError) and re.match(r"rank \d+: ", str(error)) is not None)


def _is_everybodys(error: BaseException | None) -> bool:
    """Whether all ranks of the group raise because of this error, or because of one that led to it."""
    while error is not None:
        if getattr(error, "_everybodys", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(rank: int, error: BaseException) -> str:
    return f"rank {rank} raised {type(error).__name__}: {error}"
