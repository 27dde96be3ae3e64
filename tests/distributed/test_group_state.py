"""State that groups keep between calls: programs of calls whose shapes, ranks and groups change, ranks that leave,
calls that break off while other ranks read, and garbage collections and forks while a lock is held."""

import gc
import itertools
import os
import threading
import time

import numpy as np
import pytest
from conftest import CUDA, CUDA_DEVICES, NO_CUDA, torch
from ranks import MODES, attend, each, new_groups, still_works, watchdog

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

needs_cuda = pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA or "needs PyTorch")

# ---- programs ----


class Program:
    """Random calls, the same on every rank. Each is a function of the group, and returns a text about what is wrong."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def choose(self, *values):
        return values[self.rng.integers(len(values))]

    def normal(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32)

    def attention(self):
        lengths = self.rng.integers(0, self.choose(4, 40, 300), self.choose(1, 1, 2, 5))
        cu = np.cumsum([0, *lengths]).astype(np.int32)
        heads_k, group = self.choose(1, 2, 4), self.choose(1, 2)
        q = self.normal(cu[-1], heads_k * group, 16)
        k, v = self.normal(2, cu[-1], heads_k, 16)
        dout = self.normal(*q.shape)
        options = {"causal": self.choose(True, False)}
        layout, mode = self.choose("contiguous", "zigzag", "flat"), self.choose("gather", "ulysses", "auto")
        longest = int(lengths.max())
        whole = fa.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, return_lse=True, **options)
        bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        gradients = fa.backward(dout, q, k, v, *whole, **bounds, **options)

        def call(group):
            if mode == "ulysses" and q.shape[1] < group.size:
                return []
            rows = fad.indices(layout, group.rank, group.size, cu)
            mine = [np.ascontiguousarray(x[rows]) for x in (q, k, v, dout)]
            where = {"cu_seqlens_q": cu, "layout": layout, "mode": mode, **options}
            out, lse = fad.forward(group, *mine[:3], return_lse=True, **where)
            found = [out, lse.T, *fad.backward(group, mine[3], *mine[:3], out, lse, **where)]
            right = [whole[0], whole[1].T, *gradients]
            return [name for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, right, strict=True)
                    if not np.allclose(x, y[rows], atol=2e-4)]  # fmt: skip

        return call

    def decoding(self):
        keys, batch, heads_k = self.choose(3, 50, 700), self.choose(1, 3), self.choose(1, 2)
        cache, q = self.normal(2, batch, keys, heads_k, 16), self.normal(batch, 1, 2 * heads_k, 16)
        one, kernel = self.choose(True, False), self.choose(None, "cpu_naive")
        lengths = np.full(batch, self.rng.integers(keys + 1)) if one else self.rng.integers(0, keys + 1, batch)
        right = fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths.astype(np.int32))

        def call(group):
            mine = [np.ascontiguousarray(x[:, group.rank :: group.size]) for x in cache]
            held = np.maximum(0, (lengths - group.rank + group.size - 1) // group.size).astype(np.int32)
            held = int(held[0]) if one else held
            out = fad.decode(group, q, *mine, cache_seqlens=held, kernel=kernel)
            return [] if np.allclose(out, right, atol=1e-4) else ["decode"]

        return call

    def merging(self):
        out, lse = self.normal(5, 2, 8), self.normal(2, 5)

        def call(group):
            merged, total = fad.merge(group, out * (group.rank + 1), lse.copy())
            good = np.allclose(merged, out * (group.size + 1) / 2, atol=1e-5)
            return [] if good and np.allclose(total, lse + np.log(group.size), atol=1e-5) else ["merge"]

        return call

    def reserving(self):
        size = int(self.rng.integers(1 << 16))
        return lambda group: group.reserve(size * (group.rank + 1)) or []

    def refused(self):
        """A call with arguments that are wrong on one rank, or that differ between ranks."""
        wrong = self.choose({"softmax_scale": "x"}, {"softcap": 0.5}, {"kernel": "none"}, {"merge": True})
        which = int(self.rng.integers(8))

        def call(group):
            given = wrong if group.rank == which % group.size and group.size > 1 else {}
            try:
                if "merge" in given:
                    fad.merge(group, np.ones((4, 1, 8), np.float32), np.zeros((1, 4), np.float32))
                else:
                    attend(group, **given)
            except (fa.BadArgument, fa.Unsupported):
                return [] if group.size > 1 else ["an error without a reason"]
            return ["no error"] if group.size > 1 else []

        return call

    def calls(self, count: int):
        kinds = self.attention, self.attention, self.decoding, self.decoding, self.merging, self.reserving, self.refused
        return [self.choose(*kinds)() for _ in range(count)]


def run_program(seed: int, size: int, steps: int) -> list[str]:
    """Runs a program on ranks that belong to a group of all ranks, to a group of some, and to a group of one. Calls and
    groups take turns, calls are repeated, and all groups are closed and made again in between."""
    program = Program(seed)
    calls = program.calls(steps)
    order = [(int(program.rng.integers(3)), calls[program.rng.integers(len(calls))]) for _ in range(2 * steps)]
    half, made = size // 2, []

    def groups() -> list[list[fad.Group]]:
        parts = fad.thread_groups(half, timeout=60) + fad.thread_groups(size - half, timeout=60)
        made.append([fad.thread_groups(size, timeout=60), parts, sum((fad.thread_groups(1) for _ in parts), [])])
        return made[-1]

    def rank(group: fad.Group) -> list[str]:
        mine = [groups[group.rank] for groups in made[-1]]
        return [f"step {i}: {x}" for i, (which, call) in enumerate(order) for x in call(mine[which])]

    wrong = []
    for _ in range(2):
        current = groups()
        with watchdog(100, sum(current, [])):
            wrong += sum(fad.run(current[0], rank), [])
        for group in sum(current, []):
            group.close()
    return wrong


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("seed", range(4))
def test_programs(seed, threads, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_NUM_THREADS", threads)
    assert run_program(seed, 2 + seed, 12) == []


# ---- different calls at once ----

Q, ROW = np.ones((1, 4, 2, 16), np.float32), np.ones((1, 1, 2, 16), np.float32)
LSE = np.zeros((2, 4), np.float32)
CALLS = {
    "fa_distributed_forward": lambda group: fad.forward(group, Q, Q, Q),
    "fa_distributed_backward": lambda group: fad.backward(group, Q, Q, Q, Q, Q, LSE),
    "fa_distributed_decode": lambda group: fad.decode(group, ROW, Q, Q),
    "fa_distributed_merge": lambda group: fad.merge(group, Q.copy(), LSE.copy()),
    "fa_group_reserve": lambda group: group.reserve(1 << 14),
}


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("two", [*itertools.combinations(CALLS, 2)], ids=lambda two: "-".join(x[3:] for x in two))
def test_ranks_that_call_different_functions(two, reserved):
    groups = new_groups(3)
    if reserved:
        fad.run(groups, lambda group: group.reserve(1 << 20))
    for odd in range(3):
        for error in each(groups, lambda group, odd=odd: CALLS[two[group.rank == odd]](group)):
            with pytest.raises(fa.BadArgument, match=r"the operation=\d on rank \d, but \d on rank 0") as caught:
                raise error
            assert all(name in str(caught.value) for name in two)
    still_works(groups)


# ---- calls that break off ----


def test_a_call_that_breaks_off_returns_after_the_others_have_read():
    """Rank 0 sees few keys. When the group is aborted, it waits for the other ranks, which read its arrays. The caller
    may free these arrays as soon as the call returns."""
    groups, ended = new_groups(4), [0.0] * 4
    rows = np.ones((1, 1500, 8, 64), np.float32)

    def rank(group):
        try:
            fad.forward(group, rows, rows, rows, layout="contiguous", mode="gather", causal=True, num_threads=1)
        finally:
            ended[group.rank] = time.monotonic()

    begin = time.monotonic()
    threading.Timer(0.05, lambda: groups[2].abort("enough")).start()
    for error in each(groups, rank):
        with pytest.raises(fa.RankLost, match="the group has ended: enough"):
            raise error
    took = [time.monotonic() - begin] + [end - begin for end in ended]
    assert min(took) > 0.8 * max(took), took


@needs_cuda
@pytest.mark.parametrize("mode", MODES)
def test_memory_of_a_call_that_broke_off_on_a_gpu(mode):
    """After memory is given back in the order of the caller's stream, the group's own streams do not write to it."""
    for i in range(20):
        groups = new_groups(2, CUDA)

        def rank(group):
            device = f"cuda:{group.rank % CUDA_DEVICES}"
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                rows = torch.ones((1, 2048, 8, 128), device=device, dtype=torch.bfloat16)
                out = None
                try:
                    for _ in range(1000):
                        torch.cuda._sleep(20_000_000 * group.rank)  # 10 ms: hosts are ahead of the GPUs
                        out = fad.forward(group, rows, rows, rows, mode=mode, causal=True)
                except fa.RankLost:
                    shape = rows.shape
                    del out, rows
                    again = [torch.full(shape, 7.0, device=device, dtype=torch.bfloat16) for _ in range(20)]
                    torch.cuda.synchronize(device)
                    return all(bool((x == 7).all()) for x in again)
            return False

        threading.Timer(0.002 * i, groups[i % 2].abort, ("enough",)).start()
        with watchdog(60, groups):
            assert fad.run(groups, rank) == [True, True]


@needs_cuda
@pytest.mark.parametrize("refused", [False, True])
def test_calls_on_several_streams_of_a_gpu(refused):
    """A call does not write its data into the group's memory before other ranks have read the data of the last call."""
    groups = new_groups(2, CUDA)
    cache = torch.randn((2, 1, 64, 4, 64), dtype=torch.bfloat16)
    queries = torch.randn((6, 1, 1, 8, 64), dtype=torch.bfloat16) * 4

    def rank(group):
        device = f"cuda:{group.rank % CUDA_DEVICES}"
        torch.cuda.set_device(device)
        k, v = (x[:, group.rank :: 2].to(device) for x in cache)
        mine = queries.to(device)
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        for _ in range(2):
            for stream in streams:
                with torch.cuda.stream(stream):
                    fad.decode(group, mine[0], k, v)
        torch.cuda.synchronize(device)
        outs = []
        for i, q in enumerate(mine):
            if refused:  # by both ranks, when one has begun
                with torch.cuda.stream(streams[i % 2]):
                    torch.cuda._sleep(20_000_000 * (1 - group.rank))  # 10 ms
                    with pytest.raises(fa.BadArgument, match="softcap"):
                        fad.decode(group, -q, k, v, softcap=float(group.rank))
            with torch.cuda.stream(streams[(i + 1) % 2 if group.rank == 0 else 0]):
                torch.cuda._sleep(60_000_000 * group.rank)  # meanwhile the other rank's host makes all its calls
                outs.append(fad.decode(group, q, k, v))
        torch.cuda.synchronize(device)
        return [out.cpu() for out in outs]

    with watchdog(60, groups):
        for outs in fad.run(groups, rank):
            for q, out in zip(queries, outs, strict=True):
                wanted = fa.flash_attn_func(q.to("cuda:0"), *cache.to("cuda:0")).cpu()
                torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


@needs_cuda
@pytest.mark.parametrize("mode", MODES)
def test_groups_that_are_closed_while_a_gpu_works(mode):
    """No memory that a rank's GPU reads is freed before it has been read."""
    rows = torch.randn((1, 4096, 8, 128), dtype=torch.bfloat16)
    wanted = fa.flash_attn_func(*[rows.to("cuda:0")] * 3, causal=True).cpu()
    for late in (0, 1):
        groups = new_groups(2, CUDA)

        def rank(group, late=late):
            device = f"cuda:{group.rank % CUDA_DEVICES}"
            torch.cuda.set_device(device)
            mine = fad.shard(rows, "zigzag", group.rank, 2).to(device)
            if group.rank == late:
                torch.cuda._sleep(200_000_000)
            return fad.forward(group, mine, mine, mine, mode=mode, causal=True)

        with watchdog(60, groups):
            outs = fad.run(groups, rank)
        for group in groups:
            group.close()
        out = fad.unshard([out.cpu() for out in outs], "zigzag")
        torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


def test_the_first_to_close_ends_the_group():
    for closing in range(3):
        groups = new_groups(3, timeout=60)
        still_works(groups)
        begin = time.monotonic()
        groups[closing].close()
        others = [group for group in groups if group.rank != closing]
        for error in [error for error in each(groups, attend) if error is not None]:
            if "is closed" not in str(error):
                with pytest.raises(fa.RankLost, match=f"rank {closing} has closed its group"):
                    raise error
        assert time.monotonic() - begin < 30
        for group in others:
            group.close()


def test_ranks_that_close_at_once_after_the_last_call():
    for i in range(50):
        groups = new_groups(3)

        def rank(group, i=i):
            for n in (8, 32, 8 + 8 * i):
                out = fad.forward(group, *[np.ones((1, n, 2, 16), np.float32)] * 3)
            group.close()
            return out.shape[1]

        with watchdog(30, groups):
            assert fad.run(groups, rank) == [8 + 8 * i] * 3


def test_a_timeout_ends_where_all_cores_are_busy():
    """A waiting thread gives its core to other threads, which keep it for milliseconds."""
    groups, rows, stop = new_groups(2, timeout=0.3), np.ones((1, 600, 4, 64), np.float32), threading.Event()

    def work():
        while not stop.is_set():
            fa.flash_attn_func(rows, rows, rows, num_threads=1)

    busy = [threading.Thread(target=work) for _ in range(3 * (os.cpu_count() or 1))]
    for thread in busy:
        thread.start()
    try:
        begin = time.monotonic()
        with pytest.raises(fa.RankLost, match="rank 1 did not come within timeout_ms=300"):
            attend(groups[0])
        took = time.monotonic() - begin
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert took < 3


# ---- one row a rank ----


@pytest.mark.parametrize("tokens", [4, 5])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("mode", ["auto", "gather", "ulysses"])
def test_rows_of_a_mask_are_not_taken_for_one_that_all_share(mode, name, layout, tokens):
    """Four ranks, or two, with one row each: an axis with one row holds the rank's own row."""
    rng, groups = np.random.default_rng(0), new_groups(4)
    q, k, v = (rng.standard_normal((1, n, 4, 8), dtype=np.float32) for n in (tokens, 8, 8))
    scores = rng.standard_normal((1, 1, tokens, 8), dtype=np.float32)
    scores = scores > 0 if name == "mask" else scores
    wanted = fa.flash_attn_func(q, k, v, **{name: scores})

    def rank(group):
        rows = fad.positions(layout, group.rank, 4, [0, tokens])
        keys = [fad.shard(x, layout, group.rank, 4) for x in (k, v)]
        where = {"layout": layout, "mode": mode, "seqlen_q": tokens, "seqlen_k": 8}
        out = fad.forward(group, np.ascontiguousarray(q[:, rows]), *keys, **where, **{name: scores[:, :, rows]})
        np.testing.assert_allclose(out, wanted[:, rows], atol=1e-5)

    with watchdog(30, groups):
        if mode == "ulysses":
            with pytest.raises(fa.Unsupported, match=f"{name} has rows"):
                fad.run(groups, rank)
        else:
            fad.run(groups, rank)


# ---- locks ----


def within(seconds: float, function) -> None:
    """Calls function on a thread, and fails if it does not end in time."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


@pytest.mark.parametrize("first", [0, 1])
def test_a_collector_that_drops_a_group_while_another_is_closed(first, monkeypatch):
    """A garbage collection may run at any allocation, also while the crew counts its ranks."""
    groups, left = new_groups(2), []

    class Handles(list):
        def append(self, handle):
            super().append(handle)
            left.append(handle)
            if others:
                others.clear()
                gc.collect()

    groups[0]._crew.handles = Handles()
    closing, others = groups[first], [groups[1 - first]]
    del groups
    within(20, closing.close)
    assert len(left) == 2 and closing._crew.handles == []


def test_a_call_cannot_close_its_own_group():
    groups = new_groups(2)

    def rank(group):
        if group.rank == 0:
            return attend(group)
        return group.collective(group.close)

    for error in each(groups, rank):
        with pytest.raises(fa.BadArgument, match="is in a call of this thread, which cannot close it"):
            raise error
    still_works(groups)


@pytest.mark.parametrize("call", [attend, lambda group: group.close()], ids=["attend", "close"])
def test_a_signal_whose_handler_closes_the_group(call):
    """The signal may come after any instruction of a call or of `close`. Here it comes when one of them has just taken
    the turn."""
    (group,) = new_groups(1)
    ended = []

    class Turn:
        def __init__(self, lock):
            self.lock, self.closing = lock, False

        def acquire(self, blocking=True):
            mine = self.lock.acquire(blocking=blocking)
            if not self.closing:
                self.closing = True
                group.close()
            return mine

        def release(self):
            self.lock.release()

        __enter__ = acquire

        def __exit__(self, *_):
            self.release()

    def run():
        try:
            call(group)
        except fa.BadArgument as error:
            ended.append(str(error))
        else:
            ended.append("")

    group._turn = Turn(group._turn)
    within(20, run)
    assert ended == ([f"group={group} is closed"] if call is attend else [""])


def test_a_fork_while_another_thread_calls():
    """The child closes its copy without waiting for locks of threads that exist only in the parent."""
    groups, done = new_groups(2), threading.Event()
    first = threading.Thread(target=lambda: (attend(groups[0]), done.set()))
    first.start()
    while not groups[0]._calling:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        try:
            groups[0].abort("in the child")
            try:
                attend(groups[0])
            except fa.BadArgument as error:
                right = "belongs to process" in str(error)
            for group in groups:
                group.close()
            os._exit(0 if right else 2)
        except BaseException:
            os._exit(1)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and os.waitstatus_to_exitcode(status) == 0
    attend(groups[1])
    first.join(20)
    assert done.is_set()


def test_a_group_that_could_not_be_made_leaves_its_crew(monkeypatch):
    crews, make = [], fad.Group.__init__

    def fails(self, args, all_gather, kind, crew=None):
        crews.append(crew)
        if args.rank == 1:
            raise MemoryError("no group")
        make(self, args, all_gather, kind, crew)

    monkeypatch.setattr(fad.Group, "__init__", fails)
    with pytest.raises(MemoryError, match="no group"):
        fad.thread_groups(3)
    assert len(crews) == 3 and crews[0].handles == []  # all three have left
