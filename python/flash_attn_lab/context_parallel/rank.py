"""The work of a rank: its arrays, the check of answers against one device, and the bursts.

All ranks run these functions together, in the same order. For each case one device alone and all ranks take turns:

    round   every device alone; all ranks with mode A, all ranks with mode B, ...

so that a device that grows warm, or a busy neighbour, affects each of them equally. When devices work alone, all of
them do so at the same time, without communication; ranks that share a device do it one after another.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flash_attn_minimal import distributed, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_minimal.backward import backward

from ..bench.machine import BenchError, Meter, Numpy, TorchCuda
from ..bench.suite import rounded
from . import timeline
from .cases import Case, Protocol
from .crew import Meeting, Spec

HEAD_START = 0.002  # seconds in which every rank learns when all start
BLOCK = 4096  # rows compared at once
GROUP_S = 60  # for a collective of torch.distributed
WARM_S = 0.1  # a call that takes longer needs no warm-up

# How far a rank's rows may be from those of one device, relative to their norms: (all rows together, the worst row). To
# the norm of a single row the usual norm is added, because some rows are 0 except for rounding.
TOLERANCE = {"float32": (1e-5, 1e-4), "float16": (2e-3, 2e-2), "bfloat16": (1e-2, 1e-1)}


@dataclass(frozen=True)
class Order:
    """The job that the command gives to the ranks."""

    case: Case
    modes: tuple[str, ...]  # modes of this library; () for a peer
    protocol: Protocol
    traced: bool = False  # also record timelines of this library


# ---- devices ----


class Gpu(TorchCuda):
    """The GPU of this rank."""

    def __init__(self, index: int):
        import torch

        torch.cuda.set_device(index)
        super().__init__()
        self.index = index

    def enter(self) -> None:
        """Makes this GPU the current device of the thread."""
        self.torch.cuda.set_device(self.index)

    def random(self, shape, dtype, seed):
        device = f"cuda:{self.index}"
        generator = self.torch.Generator(device).manual_seed(seed)
        return self.torch.randn(shape, generator=generator, device=device, dtype=getattr(self.torch, dtype))

    def take(self, x, rows, axis=0):
        rows = self.torch.as_tensor(rows, device=self.device)
        return x.index_select(axis, rows)

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[int]]:
        """A list that afterwards holds the peak of bytes that the framework allocated inside the block."""
        found: list[int] = []
        self.synchronize()
        before = self.torch.cuda.memory_allocated()
        self.torch.cuda.reset_peak_memory_stats()
        yield found
        self.synchronize()
        found.append(self.torch.cuda.max_memory_allocated() - before)


class Host(Numpy):
    """The CPU."""

    def enter(self) -> None:
        pass

    def take(self, x, rows, axis=0):
        return x.take(rows, axis)

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[int]]:
        """An empty list: not known."""
        yield []


class Here:
    """A rank, and its connection to the other ranks."""

    def __init__(self, spec: Spec, rank: int, meeting: Meeting, on_host: type = Host):
        """on_host: the class that makes the arrays of a rank on the CPU."""
        self.rank, self.size, self.threads, self.meeting = rank, spec.size, spec.threads, meeting
        self.turns = spec.turns
        device = spec.devices[rank]
        self.machine = on_host() if device == "cpu" else Gpu(int(device))

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.gather(self.rank, value)

    def together(self) -> float:
        """Returns on all ranks at the same moment. The ranks share one clock, that of the host."""
        start = max(self.gather(time.perf_counter())) + HEAD_START
        time.sleep(max(0.0, start - time.perf_counter() - 2e-4))
        while time.perf_counter() < start:
            time.sleep(0)  # other threads run
        return start


# ---- the arrays of a case, and the answer of one device ----


class Work:
    """The arrays of all tokens, for one device alone, and the positions of this rank's rows. The arrays are the same on
    every rank."""

    def __init__(self, here: Here, case: Case, rows: np.ndarray | None = None):
        """rows: positions of this rank's rows; None takes them from the case's layout."""
        self.here, self.case, self.machine = here, case, here.machine
        self.cu = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
        self.rows = distributed.indices(case.layout, here.rank, here.size, self.cu) if rows is None else rows
        self.options = case.options | {"num_threads": here.threads}
        tokens, heads, keys, dim = case.tokens, case.nheads, case.nheads_k, case.headdim
        machine, dtype = here.machine, case.dtype
        inputs = [machine.random((tokens, n, dim), dtype, 17 + i) for i, n in enumerate((heads, keys, keys))]
        self.q, self.k, self.v = inputs
        self._check_same(inputs)
        self.out = machine.nans((tokens, heads, dim), dtype)
        self._one = len(case.lengths) == 1
        self._starts = None if self._one else machine.int32(self.cu.tolist())
        self.lse = self._forward(return_lse=True)[1]
        self.lse = self.lse[0] if self._one else self.lse
        if case.of == "backward":
            self.dout = machine.random((tokens, heads, dim), dtype, 29)
            self.gradients = tuple(machine.nans(x.shape, dtype) for x in inputs)
            self._backward()
        machine.synchronize()
        here.gather(None)  # a collective that follows waits less long for a rank than this does

    @property
    def alone(self) -> Callable[[], Any]:
        """The call of one device."""
        return self._backward if self.case.of == "backward" else self._forward

    @property
    def answer(self) -> tuple:
        return self.gradients if self.case.of == "backward" else (self.out,)

    def _whole(self, *arrays):
        """The arrays as the call takes them: a single sequence becomes a dense batch."""
        return [x[None] for x in arrays] if self._one else arrays

    def _forward(self, **more):
        q, k, v, out = self._whole(self.q, self.k, self.v, self.out)
        if self._one:
            return flash_attn_func(q, k, v, out=out, **self.options, **more)
        longest = max(self.case.lengths)
        return flash_attn_varlen_func(
            q, k, v, self._starts, self._starts, longest, longest, out=out, **self.options, **more
        )

    def _backward(self):
        arrays = self._whole(self.dout, self.q, self.k, self.v, self.out, self.lse)
        given = dict(zip(("dq", "dk", "dv"), self._whole(*self.gradients), strict=True))
        if not self._one:
            given |= {f"cu_seqlens_{x}": self._starts for x in "qk"}
            given |= {f"max_seqlen_{x}": max(self.case.lengths) for x in "qk"}
        return backward(*arrays, **given, **self.options)

    def _check_same(self, inputs) -> None:
        """Raises if the ranks have drawn different numbers."""
        some = [self.machine.host(x[:: max(1, len(x) // 64)]) for x in inputs]
        sums = self.here.gather([float(np.abs(x).sum(dtype=np.float64)) for x in some])
        if any(other != sums[0] for other in sums):
            raise BenchError(f"the devices draw different random numbers: {sums}")

    def mine(self, x, axis: int = 0):
        """This rank's rows of an array of all tokens."""
        return self.machine.take(x, self.rows, axis)

    def judge(self, results: tuple, room: float = 1.0) -> dict[str, Any]:
        """Compares the rows of all ranks with the answer of one device. Collective. room: see verdict()."""
        found = [difference(self.machine, x, y, self.rows) for x, y in zip(results, self.answer, strict=True)]
        return verdict([error for errors in self.here.gather(found) for error in errors], self.case.dtype, room)


class DecodeWork:
    """One query of each sequence over a cache: the shard of this rank, and the whole cache if one device can hold
    it."""

    def __init__(self, here: Here, case: Case):
        self.here, self.case, self.machine = here, case, here.machine
        batch, length, options = len(case.lengths), case.lengths[0], {"num_threads": here.threads}
        cuts = [length * r // here.size for r in range(here.size + 1)]
        self.q = here.machine.random((batch, 1, case.nheads, case.headdim), case.dtype, 17)
        self.options, self.rows = options, np.arange(batch)
        self.k, self.v = (self._cache(which, cuts, [here.rank]) for which in (0, 1))
        try:
            whole = [self._cache(which, cuts, range(here.size)) for which in (0, 1)]
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "out of memory" not in str(error):
                raise
            whole = []
        self.answer: tuple = ()
        self.alone: Callable | None = None
        if all(here.gather(len(whole))):
            out = here.machine.nans(self.q.shape, case.dtype)
            self.alone = functools.partial(flash_attn_with_kvcache, self.q, *whole, out=out, **options)
            self.alone()
            self.answer = (out,)
        here.machine.synchronize()
        here.gather(None)

    def _cache(self, which: int, cuts: list[int], ranks: Iterable[int]):
        """Keys (which=0) or values (1) of these ranks, which must be neighbours. A rank's part is the same on whatever
        rank it is drawn."""
        case, first, ranks = self.case, cuts[min(ranks)], list(ranks)
        shape = len(case.lengths), cuts[ranks[-1] + 1] - first, case.nheads_k, case.headdim
        cache = self.machine.nans(shape, case.dtype)
        for rank in ranks:
            start, end = cuts[rank], cuts[rank + 1]
            for i in range(len(case.lengths)):
                seed = 1000 + 2 * (rank * len(case.lengths) + i) + which
                rows = self.machine.random((end - start, *shape[2:]), case.dtype, seed)
                cache[i, start - first : end - first] = rows
        return cache

    def judge(self, results: tuple, room: float = 1.0) -> dict[str, Any]:
        """As Work.judge. If no device can hold the cache, checks only that there is no NaN or Inf."""
        if self.answer:
            found = [difference(self.machine, results[0], self.answer[0], self.rows)]
            return verdict([error for errors in self.here.gather(found) for error in errors], self.case.dtype, room)
        if not all(self.here.gather(self.machine.finite(results[0]))):
            return {"wrong": True, "why": "NaN or Inf in the answer"}
        return {"unchecked": True}


def verdict(errors: list[tuple[float, float]], dtype: str, room: float = 1.0) -> dict[str, Any]:
    """The fields of a row that say whether the answer is right. errors: (norm error, worst row) of each rank and array.
    room: a factor on the tolerance."""
    if not all(map(math.isfinite, (x for pair in errors for x in pair))):
        return {"wrong": True, "why": "NaN or Inf in the answer"}
    err, worst = max(e for e, _ in errors), max(w for _, w in errors)
    found: dict[str, Any] = {"err": err, "err_row": worst}
    if err > room * TOLERANCE[dtype][0] or worst > room * TOLERANCE[dtype][1]:
        found |= {"wrong": True, "why": f"error {err:.2e}, worst row {worst:.2e}"}
    return found


def difference(machine, got, want, rows: np.ndarray) -> tuple[float, float]:
    """(|got - want[rows]| / |want[rows]|, the largest such ratio of a row and head). In the second, the mean square of
    all rows is added under the root of the row's norm. Not finite if got has NaN or Inf."""
    apart, norms = [], []
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        a, b = (machine.cast(x, "float32") for x in (got[part], machine.take(want, rows[part])))
        apart.append(((a - b) ** 2).sum(-1))
        norms.append((b**2).sum(-1))
    whole, total = (sum(float(x.sum()) for x in parts) for parts in (apart, norms))
    if not whole or not total or not math.isfinite(whole):
        return (math.inf if whole else 0.0,) * 2
    usual = total / sum(int(np.prod(x.shape)) for x in norms)
    worst = max(float((d / (n + usual)).max()) for d, n in zip(apart, norms, strict=True))
    return (whole / total) ** 0.5, worst**0.5


# ---- ours ----


class Ours:
    """This library's calls across the ranks, in one mode."""

    def __init__(self, work: Work, group: distributed.Group, mode: str):
        self.work, self.group, case, machine = work, group, work.case, work.machine
        self.backward = case.of == "backward"
        self.options = work.options | {"cu_seqlens_q": work.cu, "layout": case.layout, "mode": mode}
        self.inputs = [work.mine(x) for x in (work.q, work.k, work.v)]
        if self.backward:
            self.inputs = [work.mine(work.dout), *self.inputs, work.mine(work.out), work.mine(work.lse, 1)]
            shapes = [x.shape for x in self.inputs[1:4]]
        else:
            shapes = [self.inputs[0].shape]
        self.results = tuple(machine.nans(shape, case.dtype) for shape in shapes)
        q, k, v = self.inputs[1:4] if self.backward else self.inputs
        plan = distributed.plan(group, q, k, v, backward=self.backward, **self.options)
        self.refusal, self.mode = plan.error, plan.mode
        self.memory = {name: getattr(plan, name) for name in ("workspace_bytes", "shared_bytes", "received_bytes")}

    def launch(self) -> Any:
        if self.backward:
            dq, dk, dv = self.results
            return distributed.backward(self.group, *self.inputs, dq=dq, dk=dk, dv=dv, **self.options)
        return distributed.forward(self.group, *self.inputs, out=self.results[0], **self.options)

    def poison(self) -> None:
        """Fills the results with NaN, so that a row that is not written is noticed."""
        for x in self.results:
            x[...] = float("nan")

    def check(self) -> dict[str, Any]:
        """Makes one call. Returns the verdict on it, and the memory that it takes."""
        self.poison()
        with self.work.machine.peak() as peak:
            self.launch()
        found = self.work.judge(self.results)
        held = sum(x.nbytes for x in (*self.inputs, *self.results))
        memory = {"rank_bytes": held + self.memory.get("shared_bytes", 0), **self.memory}
        memory["rank_bytes"] += peak[0] if peak else self.memory.get("workspace_bytes", 0)
        sizes = self.work.here.gather(memory)
        return found | {name: max(size[name] for size in sizes) for name in memory}

    def check_again(self) -> dict[str, Any]:
        """Judges the results of the last burst."""
        return self.work.judge(self.results)


class Decode(Ours):
    """A step of decoding over the shards of the cache."""

    def __init__(self, work: DecodeWork, group: distributed.Group):
        self.work, self.group = work, group
        self.inputs = [work.q, work.k, work.v]
        self.results = (work.machine.nans(work.q.shape, work.case.dtype),)
        self.refusal, self.mode, self.memory = "", "decode", {}

    def launch(self) -> Any:
        return distributed.decode(self.group, *self.inputs, out=self.results[0], **self.work.options)


def measure(here: Here, group: distributed.Group, order: Order) -> list[dict[str, Any]]:
    """Checks and times a case; returns a row for each mode. Collective."""
    here.machine.enter()
    case, rows, systems = order.case, [], []
    decode = case.of == "decode"
    work = DecodeWork(here, case) if decode else Work(here, case)
    for mode in ("decode",) if decode else order.modes:
        ours = Decode(work, group) if decode else Ours(work, group, mode)
        row = {"asked": mode}
        rows.append(row)
        if ours.refusal:
            row |= {"error": ours.refusal, "refused": True}
            continue
        row |= {"mode": ours.mode} | ours.check()
        if not row.get("wrong"):
            systems.append((row, ours))
    race(here, order.protocol, work.alone, systems)
    if order.traced and isinstance(here.machine, Gpu):
        for row, system in systems:
            if (recorded := timeline.record(here, system.launch, here.machine.index)) is not None:
                row["timeline"] = recorded
    found = [rounded(case.row() | row) for row in rows]
    del work, systems, ours
    here.machine.release()
    return found


# ---- time ----


def race(here: Here, protocol: Protocol, alone: Callable | None, systems: list[tuple[dict, Any]]) -> None:
    """Times, in turns, each device alone and every system on all ranks. Adds the times to the systems' rows. A system
    has launch, poison and check_again."""
    if not systems:
        return
    once_alone = max(here.gather(_once(here.machine, alone))) if alone else 0.0
    count_alone = protocol.count(once_alone)
    each: list[list[float]] = [[] for _ in range(here.size)]
    runs = []
    for row, system in systems:
        _all_together(here, system.launch, 1)
        single = [_all_together(here, system.launch, 1)]
        single += [_all_together(here, system.launch, 1) for _ in range(3 if single[0] < 1 else 0)]
        row["single_ms"] = 1e3 * median(single)
        runs.append((row, system, protocol.count(median(single)), []))
    rounds = protocol.turns(max(once_alone, *(row["single_ms"] * 1e-3 for row, *_ in runs)))
    for number in range(rounds):
        if alone and number < protocol.rounds_alone:
            for rank, seconds in enumerate(_each_alone(here, alone, count_alone, once_alone < WARM_S)):
                each[rank].append(seconds)
        for row, system, count, found in runs:
            last = number + 1 == rounds
            if last:
                system.poison()
            found.append(_all_together(here, system.launch, count))
            if last:  # the results after bursts must be right, too
                again = system.check_again()
                row |= again if again.get("wrong") else {}
    for row, _, count, found in runs:
        row |= {"ms": 1e3 * median(found), "ms_min": 1e3 * min(found), "ms_max": 1e3 * max(found), "calls": count}
        row |= {"rounds": rounds}
        if alone:
            one = [1e3 * median(times) for times in each]
            row |= {"one_each_ms": [float(f"{ms:.5g}") for ms in one], "one_calls": count_alone}
            row |= {"one_ms": sum(one) / len(one), "one_slowest_ms": max(one)}
            row |= {"one_min_ms": 1e3 * min(map(min, each)), "one_max_ms": 1e3 * max(map(max, each))}


def _once(machine, launch: Callable) -> float:
    """Seconds of a call. Calls of up to a second are made twice, and the second one counts."""
    for _ in range(2):
        start = time.perf_counter()
        launch()
        machine.synchronize()
        seconds = time.perf_counter() - start
        if seconds > 1:
            break
    return seconds


def _alone(machine, launch: Callable, count: int, warm: bool) -> float:
    """Seconds per call, of `count` calls without a pause. warm: one more call first, because the device has waited for
    the other ranks."""
    if warm:
        launch()
        machine.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        launch()
    machine.synchronize()
    return (time.perf_counter() - start) / count


def _each_alone(here: Here, launch: Callable, count: int, warm: bool) -> list[float]:
    """_alone() for the device of every rank."""
    mine = 0.0
    for turn in range(max(here.turns) + 1):
        here.gather(None)
        if here.turns[here.rank] == turn:
            mine = _alone(here.machine, launch, count, warm)
    return here.gather(mine)


def _all_together(here: Here, launch: Callable, count: int) -> float:
    """Seconds per call of all ranks together, from their common start to the end of the last rank."""
    here.machine.synchronize()
    start = here.together()
    for _ in range(count):
        launch()
    here.machine.synchronize()
    return (max(here.gather(time.perf_counter())) - start) / count


# ---- for serve() ----


class Ranks:
    """The ranks of one process: all ranks as threads, or a single rank."""

    def __init__(self, groups: list[distributed.Group], heres: list[Here]):
        self.groups, self.heres = groups, heres
        self.about = about(heres[0])

    def measure(self, order: Order) -> list[dict[str, Any]]:
        if len(self.groups) == 1:
            return measure(self.heres[0], self.groups[0], order)

        def rank(group: distributed.Group) -> list[dict[str, Any]]:
            here = self.heres[group.rank]
            try:
                return measure(here, group, order)
            except BaseException:
                here.meeting.barrier.abort()
                raise

        return distributed.run(self.groups, rank)[0]


@contextlib.contextmanager
def open_ranks(spec: Spec, rank: int, meeting: Meeting) -> Iterator[Ranks]:
    """Opens this library's groups of the ranks in this process."""
    if spec.kind == "threads":
        heres = [Here(spec, r, meeting) for r in range(spec.size)]
        groups = distributed.thread_groups(devices=spec.devices, timeout=60)
    else:
        here = Here(spec, rank, meeting)
        heres = [here]
        gather = functools.partial(meeting.gather_bytes, rank)
        made: dict[str, Any] = {"kind": "processes"}
        if spec.kind in ("nccl", "hosts"):
            made = {"kind": "nccl", "nccl_comm": _nccl_comm(spec, rank)}
        groups = [distributed.create_group(rank, spec.size, gather, device=spec.devices[rank], timeout=60, **made)]
    try:
        yield Ranks(groups, heres)
    finally:
        for group in groups:
            group.close()


def join_process_group(spec: Spec, rank: int) -> Any:
    """Opens torch.distributed among the processes of a crew: NCCL between GPUs, gloo on the CPU. Returns the device."""
    import torch
    import torch.distributed as dist

    cpu = spec.devices[rank] == "cpu"
    device = torch.device("cpu") if cpu else torch.device("cuda", int(spec.devices[rank]))
    dist.init_process_group(
        "gloo" if cpu else "nccl", init_method=f"file://{Path(spec.folder) / 'torch'}", rank=rank,
        world_size=spec.size, timeout=datetime.timedelta(seconds=GROUP_S), **({} if cpu else {"device_id": device}),
    )  # fmt: skip
    return device


def _nccl_comm(spec: Spec, rank: int) -> int:
    """The communicator of a process group of PyTorch, which lives as long as the process."""
    import torch
    import torch.distributed as dist

    if spec.kind == "hosts":  # NCCL takes ranks with different names for ranks of different hosts
        here = {"NCCL_HOSTID": f"host{2 * rank // spec.size}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ.update(here)
    device = join_process_group(spec, rank)
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
    return dist.group.WORLD._get_backend(device)._comm_ptr()


def about(here: Here) -> dict[str, Any]:
    """Facts about the machine that this process knows."""
    found = here.machine.describe()
    if here.machine.device == "cuda":
        found["driver"] = Meter(here.machine).driver
    return {key: value for key, value in found.items() if value is not None}
