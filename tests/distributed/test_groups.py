"""Groups: how they are made and ended, and faults of ranks, which give a clear error or the right answer, and never a
hang."""

import gc
import os
import threading
import time

import numpy as np
import pytest
from conftest import CPU
from ranks import (
    OPTIONS,
    Q,
    Split,
    attend,
    each,
    new_groups,
    one_call,
    rank_of,
    shared_groups,
    small,
    still_works,
    watchdog,
)

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad
from flash_attn_minimal._core import recordings

# ---- making and ending groups ----


def test_what_a_group_says():
    groups = fad.thread_groups(3, timeout=5)
    assert [(g.rank, g.size, g.device, g.kind) for g in groups] == [(r, 3, "cpu", "threads") for r in range(3)]
    assert repr(groups[1]) == "<Group: rank 1 of 3, threads, cpu>"
    groups[1].close()
    assert repr(groups[1]) == "<Group: rank 1 of 3, threads, cpu, closed>"


def test_devices_in_place_of_a_size():
    assert [group.device for group in fad.thread_groups(devices=["cpu", "cpu"])] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({}, "size=None without devices"),
        ({"size": 0}, "size=0 is outside 1 .. 1024"),
        ({"size": 1025}, "size=1025 is outside"),
        ({"size": 2.0}, "size=2.0 is not an integer"),
        ({"size": 3, "devices": ["cpu"]}, "size=3, but devices names 1"),
        ({"size": 1, "device": "cuda"}, "device='cuda' is neither 'cpu' nor the number of a CUDA device"),
        ({"size": 1, "device": -1}, "device=-1 is outside"),
        ({"size": 1, "device": True}, "device=True is neither"),
        ({"size": 1, "timeout": 0}, "timeout=0 is outside 0.001"),
        ({"size": 1, "timeout": "soon"}, "timeout='soon' is not a number"),
    ],
)
def test_refusals_of_thread_groups(arguments, text):
    with pytest.raises(fa.BadArgument, match=text):
        fad.thread_groups(**arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"rank": 2}, "rank=2 is outside 0 .. 1"),
        ({"kind": "mpi"}, "kind='mpi' is not one of 'threads', 'processes', 'nccl'"),
        ({"kind": "nccl"}, "nccl_comm is NULL with kind='nccl'"),
        ({"nccl_comm": 64}, "nccl_comm is set, but kind is not 'nccl'"),
        ({"kind": "nccl", "nccl_comm": 64}, "kind='nccl' with device='cpu'"),
        ({"nccl_comm": "x"}, "nccl_comm='x' is not an integer"),
    ],
)
def test_refusals_of_create_group(arguments, text):
    with pytest.raises(fa.BadArgument, match=text):
        fad.create_group(**{"rank": 0, "size": 2, "all_gather": lambda x: [x, x], **arguments})


@pytest.mark.parametrize(
    "all_gather, cause, text",
    [
        (lambda x: 1 / 0, ZeroDivisionError, "division"),
        (lambda x: [x], fa.BadArgument, r"all_gather returned parts of \[\d+\] bytes: expected 2 of"),
        (lambda x: [x, x[:3]], fa.BadArgument, r"all_gather returned parts of \[\d+, 3\]"),
        (lambda x: None, TypeError, "not iterable"),
    ],
)
def test_an_all_gather_that_fails(all_gather, cause, text):
    with pytest.raises(fa.RankLost, match="all_gather returned 1") as caught:
        fad.create_group(0, 2, all_gather)
    assert isinstance(caught.value.__cause__, cause)
    with pytest.raises(cause, match=text):
        raise caught.value.__cause__


def test_an_all_gather_of_the_wrong_ranks():
    with pytest.raises(fa.BadArgument, match="all_gather gave rank 0 of 2 at place 1"):
        fad.create_group(0, 2, lambda x: [x, x], kind="threads")


def test_groups_are_closed_from_one_thread_without_waiting():
    begin = time.monotonic()
    for order in ((0, 1, 2), (2, 0, 1)):
        groups = fad.thread_groups(3, timeout=20)
        still_works(groups)
        for rank in order:
            groups[rank].close()
            groups[rank].close()
    with fad.thread_groups(1)[0] as group:
        attend(group)
    assert time.monotonic() - begin < 10


def test_groups_that_nobody_refers_to_are_freed():
    groups = fad.thread_groups(2)
    still_works(groups)
    finalizers = [group._finalizer for group in groups]
    del groups
    gc.collect()
    assert not any(finalizer.alive for finalizer in finalizers)


def test_create_group_of_threads():
    barrier, slots = threading.Barrier(2), [b"", b""]

    def make(rank: int) -> np.ndarray:
        def all_gather(mine: bytes) -> list[bytes]:
            slots[rank] = mine
            barrier.wait(10)
            found = list(slots)
            barrier.wait(10)
            return found

        with fad.create_group(rank, 2, all_gather, kind="threads", timeout=10) as group:  # each closes its own
            return attend(group)

    results = [None, None]
    threads = [threading.Thread(target=lambda r=r: results.__setitem__(r, make(r))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(fad.unshard(results, "zigzag"), fa.flash_attn_func(Q, Q, Q), atol=1e-6)


def test_a_fork_does_not_end_the_group():
    groups = fad.thread_groups(2, timeout=20)
    child = os.fork()
    if child == 0:
        try:
            attend(groups[0])
            os._exit(1)
        except fa.BadArgument as error:
            wrong = "belongs to process" not in str(error)
            groups[0].close()
            del groups
            gc.collect()
            os._exit(2 * wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    still_works(groups)


# ---- run ----


def test_run_gives_the_results_by_rank():
    assert fad.run(shared_groups(3), lambda group, x: (group.rank, x), "y") == [(0, "y"), (1, "y"), (2, "y")]


def test_a_rank_that_raises_ends_the_waiting_of_the_others():
    groups, told, begin = new_groups(3), [], time.monotonic()

    def rank(group):
        if group.rank == 1:
            raise KeyError("mine")
        try:
            attend(group)
        except fa.RankLost as error:
            told.append(str(error))
            raise

    with watchdog(30, groups), pytest.raises(KeyError, match="mine"):
        fad.run(groups, rank)
    assert told == ["the group has ended: rank 1 raised KeyError: 'mine'"] * 2 and time.monotonic() - begin < 10


def test_run_raises_the_error_of_the_rank_that_has_the_reason():
    groups = new_groups(3)

    def rank(group):
        attend(group, softmax_scale="x" if group.rank == 2 else None)

    with watchdog(30, groups), pytest.raises(fa.BadArgument, match="^softmax_scale='x' is not a number"):
        fad.run(groups, rank)
    still_works(groups)


# ---- ranks that come late, or not at all ----


def test_a_late_rank_is_waited_for():
    groups = new_groups(2, timeout=20)

    def rank(group):
        time.sleep(0.3 * group.rank)
        return attend(group)

    with watchdog(30, groups):
        out = fad.unshard(fad.run(groups, rank), "zigzag")
    np.testing.assert_allclose(out, fa.flash_attn_func(Q, Q, Q), atol=1e-6)


def test_a_rank_that_comes_too_late():
    groups, given_up = new_groups(3, timeout=0.5), threading.Barrier(3, timeout=20)

    def rank(group):
        if group.rank == 2:
            given_up.wait()
        try:
            attend(group)
        finally:
            if group.rank != 2:
                given_up.wait()

    raised = each(groups, rank)
    for error in raised:
        with pytest.raises(fa.RankLost, match="the group has ended: rank 2 did not come within timeout_ms=500"):
            raise error
    begin = time.monotonic()
    for error in [error for _ in range(3) for error in each(groups, attend)]:  # at once, from now on
        with pytest.raises(fa.RankLost, match="rank 2 did not come"):
            raise error
    for group in groups:
        group.close()
    assert time.monotonic() - begin < 1.5  # not 500 ms for each


def test_abort_from_another_thread():
    groups = new_groups(2)
    threading.Timer(0.2, lambda: groups[1].abort("no more work")).start()
    with watchdog(30, groups), pytest.raises(fa.RankLost, match="the group has ended: no more work"):
        attend(groups[0])
    groups[0].abort("a second reason")
    with pytest.raises(fa.RankLost, match="no more work"):
        attend(groups[1])
    for group in groups:
        group.close()
        group.abort("too late to matter")


def test_a_second_call_while_one_waits():
    groups, results = new_groups(2), {}
    first = threading.Thread(target=lambda: results.update(first=attend(groups[0])))
    first.start()
    while not groups[0]._calling:
        time.sleep(0.001)
    with pytest.raises(fa.BadArgument, match="is in another call of this rank: a rank makes one call at a time"):
        attend(groups[0])
    results["second"] = attend(groups[1])
    first.join()
    out = fad.unshard([results["first"], results["second"]], "zigzag")
    np.testing.assert_allclose(out, fa.flash_attn_func(Q, Q, Q), atol=1e-6)


def test_close_waits_for_the_call_of_another_thread():
    groups, results = new_groups(2), {}
    first = threading.Thread(target=lambda: results.update(first=attend(groups[0])))
    first.start()
    while not groups[0]._calling:
        time.sleep(0.001)
    closer = threading.Thread(target=groups[0].close)
    closer.start()
    attend(groups[1])
    first.join()
    closer.join()
    assert "first" in results
    with pytest.raises(fa.BadArgument, match="is closed"):
        attend(groups[0])


def test_two_groups_at_once():
    case, split = small(causal=True), Split(2)
    pairs = [new_groups(split.size), new_groups(split.size)]
    alone, _ = one_call(case)
    found = [None, None]

    def many(i: int) -> None:
        found[i] = [fad.run(pairs[i], rank_of, case, split, CPU) for _ in range(10)]

    threads = [threading.Thread(target=many, args=(i,)) for i in range(2)]
    with watchdog(30, pairs[0] + pairs[1]):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def both(first: fad.Group) -> list:  # a rank in two groups, with calls that alternate
        return [rank_of(pairs[i % 2][first.rank], case, split, CPU) for i in range(4)]

    with watchdog(30, pairs[0] + pairs[1]):
        mixed = fad.run(pairs[0], both)
    for parts in [*found[0], *found[1], *zip(*mixed, strict=True)]:
        rows = [fad.indices("zigzag", rank, split.size, case.cu_seqlens_q) for rank in range(split.size)]
        out = np.concatenate([part["out"] for part in parts])[np.argsort(np.concatenate(rows))]
        np.testing.assert_allclose(out, alone, atol=1e-6)


def test_a_rank_that_closes_while_another_calls():
    """The messages of ranks at the end of a group are not taken for a call."""
    groups = []
    barrier, slots = threading.Barrier(2), [b"", b""]

    def rank(r: int) -> Exception | None:
        def all_gather(mine: bytes) -> list[bytes]:
            slots[r] = mine
            barrier.wait(10)
            found = list(slots)
            barrier.wait(10)
            return found

        group = fad.create_group(r, 2, all_gather, kind="threads", timeout=10)
        groups.append(group)
        for _ in range(2):
            attend(group)
        try:
            attend(group) if r else group.close()
        except fa.RankLost as error:
            return error
        finally:
            group.close()

    raised = [None, None]
    threads = [threading.Thread(target=lambda r=r: raised.__setitem__(r, rank(r))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised[0] is None and "ranks 0 and 1 called different functions" in str(raised[1])


# ---- memory, and calls like ones before ----


def test_reserve():
    groups = new_groups(2)
    assert fad.run(groups, lambda group: group.reserve(1 << 20)) == [None, None]
    still_works(groups)
    for error in each(groups, lambda group: group.reserve(group.rank - 1)):
        with pytest.raises(fa.BadArgument, match="shared_bytes=-1 is outside"):
            raise error
    still_works(groups)


def test_reserve_on_one_rank_alone():
    groups = new_groups(2)
    for error in each(groups, lambda group: attend(group) if group.rank else group.reserve(100)):
        with pytest.raises(fa.BadArgument, match="these are fa_distributed_forward and fa_group_reserve"):
            raise error
    still_works(groups)


def test_repeated_calls_take_what_differs():
    """Repeated calls with other arrays, other options, and numbers that are equal but of different types."""
    rng = np.random.default_rng(1)
    groups = new_groups(2)
    arrays = rng.standard_normal((4, 3, 1, 8, 2, 16), dtype=np.float32)
    sinks = rng.standard_normal((4, 2), dtype=np.float32)

    def rank(group):
        found = []
        for i in range(4):
            part = [fad.shard(x, "zigzag", group.rank, group.size) for x in arrays[i]]
            for options in ({"causal": True}, {"causal": False}, {"sinks": sinks[i]}):
                found.append(fad.forward(group, *part, **options, **OPTIONS))
        assert len(group.calls) == 3
        with pytest.raises(fa.BadArgument, match="causal=1.0 is neither"):
            fad.forward(group, *part, causal=1.0, **OPTIONS)
        return found

    with watchdog(30, groups):
        results = fad.run(groups, rank)
    for i in range(4):
        for j, options in enumerate(({"causal": True}, {"causal": False}, {"sinks": sinks[i]})):
            out = fad.unshard([each[3 * i + j] for each in results], "zigzag")
            np.testing.assert_allclose(out, fa.flash_attn_func(*arrays[i], **options), atol=1e-6)


def test_prepared_calls_keep_no_arrays():
    groups, sizes = new_groups(1), []

    class Counted(np.ndarray): ...  # not NumPy's own: the long way

    for _ in range(3):
        q = np.zeros((1, 8, 2, 16), np.float32)
        attend_one = fad.forward(groups[0], q, q, q, **OPTIONS)
        sizes.append(len(gc.get_referrers(q)))
        assert attend_one.shape == q.shape
    assert sizes[0] == sizes[1] == sizes[2]
    q = q.view(Counted)
    assert fad.forward(groups[0], q, q, q, **OPTIONS).shape == q.shape
    assert len(groups[0].calls) == 1


def test_a_collective_call_is_not_recorded():
    group = fad.thread_groups(1)[0]
    with recordings.Recording(), pytest.raises(fa.Unsupported, match="a collective call is not recorded"):
        attend(group)


# ---- plans ----


def test_plans():
    q, k = np.zeros((1, 256, 8, 64), np.float32), np.zeros((1, 256, 2, 64), np.float32)
    plans = {mode: fad.plan((0, 4), q, k, k, mode=mode, causal=True) for mode in ("auto", "gather", "ulysses")}
    assert {mode: plan.mode for mode, plan in plans.items()} == {**{m: m for m in plans}, "auto": "gather"}
    assert fad.plan((0, 4), q, q, q).mode == "ulysses"
    for plan in plans.values():
        assert plan.status == "FA_OK" and plan.error == "" and plan.rows == (256, 256) and plan.calls >= 1
    bytes_k = 2 * 256 * 2 * 64 * 4
    assert plans["gather"].received_bytes == 3 * bytes_k  # rank 0 has the last chunk, which sees all others,
    last = fad.plan((3, 4), q, k, k, mode="gather", causal=True)
    assert last.received_bytes == 3 * bytes_k // 2  # and rank 3 those in the middle
    assert plans["ulysses"].shared_bytes >= 1024 * 2 * 64 * 4
    back = fad.plan((0, 4), q, k, k, backward=True)
    assert back.received_bytes > plans["auto"].received_bytes
    processes = fad.plan((0, 4), q, k, k, kind="processes")
    assert processes.shared_bytes > plans["auto"].shared_bytes  # the inputs are copied there


def test_a_window_fetches_what_it_reaches():
    q = np.zeros((1, 256, 2, 16), np.float32)
    near, far = (fad.plan((1, 4), q, q, q, mode="gather", layout="contiguous", window_size=(w, 0)) for w in (16, 256))
    assert near.received_bytes == 2 * 16 * 2 * 16 * 4 and far.received_bytes == 2 * 256 * 2 * 16 * 4


def test_the_plan_is_that_of_the_group():
    group = fad.thread_groups(1)[0]
    assert fad.plan(group, Q, Q, Q).rows == (8, 8)
    with pytest.raises(fa.BadArgument, match="group=3 is neither a Group nor"):
        fad.plan(3, Q, Q, Q)
    with pytest.raises(fa.BadArgument, match="rank=2 is outside 0 .. 1"):
        fad.plan((2, 2), Q, Q, Q)
