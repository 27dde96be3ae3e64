"""Groups: how they are made and ended, and what goes wrong with ranks: a clear error or the right answer, and never a
hang."""

import gc
import os
import threading
import time

import numpy as np
import pytest
from conftest import CPU
from ranks import Split, new_groups, rank_of, shared_groups, small, watchdog

import flash_attn_minimal as fa
from flash_attn_minimal import _record
from flash_attn_minimal import distributed as fad

Q = np.random.default_rng(0).standard_normal((1, 8, 2, 16), dtype=np.float32)
OPTIONS = {"num_threads": 1}


def attend(group: fad.Group, tokens: int = 8, **options) -> np.ndarray:
    """The same rows on every rank, of keys that do not matter: attention over the mean of equal keys."""
    part = fad.shard(Q[:, :tokens], "zigzag", group.rank, group.size)
    return fad.forward(group, part, part, part, seqlen_q=tokens, **(OPTIONS | options))


def still_works(groups) -> None:
    out = fad.unshard(fad.run(groups, attend), "zigzag")
    np.testing.assert_allclose(out, fa.flash_attn_func(Q, Q, Q), atol=1e-6)


def each(groups, function) -> list:
    """What each rank raises, on threads; None for none."""
    raised = [None] * len(groups)

    def rank(group):
        try:
            function(group)
        except Exception as error:
            raised[group.rank] = error

    threads = [threading.Thread(target=rank, args=(group,)) for group in groups]
    with watchdog(30, groups):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return raised


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
        ({"kind": "mpi"}, "kind='mpi' is none of 'threads', 'processes', 'nccl'"),
        ({"kind": "nccl"}, "nccl_comm is NULL with kind=FA_GROUP_NCCL"),
        ({"nccl_comm": 64}, "nccl_comm is set, but kind is not FA_GROUP_NCCL"),
        ({"kind": "nccl", "nccl_comm": 64}, "kind=FA_GROUP_NCCL with device=FA_CPU"),
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


# ---- ranks that disagree, and ranks with wrong arguments: all raise, and the group stays usable ----


@pytest.mark.parametrize(
    "ours, theirs, text",
    [
        ({"causal": True}, {}, "causal=0 on rank 1, but 1 on rank 0: all ranks make the same call"),
        ({"softmax_scale": 0.5}, {"softmax_scale": 0.25}, "softmax_scale=0.25 on rank 1, but 0.5 on rank 0"),
        ({"mode": "gather"}, {"mode": "ring"}, "mode=3 on rank 1, but 1 on rank 0"),
        ({"layout": "contiguous"}, {}, "layout=2 on rank 1, but 1 on rank 0"),
        ({"window_size": (3, 0)}, {}, "window_left=-1 on rank 1, but 3 on rank 0|mode=2 on rank 1"),
        ({"softcap": 2.0}, {}, "softcap=0 on rank 1, but 2 on rank 0"),
        ({"return_lse": True}, {}, "lse wanted=0 on rank 1, but 1"),
        ({"sinks": np.zeros(2, np.float32)}, {}, "sinks set=0 on rank 1, but 1"),
        ({"dropout_p": 0.5, "dropout_seed": 1}, {"dropout_p": 0.5, "dropout_seed": 2}, "dropout_seed=2 on rank 1"),
        ({"groups": 2}, {}, "groups=0 on rank 1, but 2"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_about_an_option(ours, theirs, text):
    groups = shared_groups(2)
    raised = each(groups, lambda group: attend(group, **(theirs if group.rank else ours)))
    for error in raised:
        with pytest.raises(fa.BadArgument, match=text):
            raise error
    still_works(groups)


def forward_of(group, shape_q, shape_k=None, **options):
    q, k = (np.zeros(shape, np.float32) for shape in (shape_q, shape_k or shape_q))
    return fad.forward(group, q, k, k, **OPTIONS, **options)


@pytest.mark.parametrize(
    "shapes, text",
    [
        ([(1, 8, 2, 16), (1, 6, 2, 16)], "total_q=12 on rank 1, but 16 on rank 0"),
        ([(1, 8, 2, 16), (1, 8, 4, 16)], "nheads=4 on rank 1, but 2"),
        ([(1, 8, 2, 16), (1, 8, 2, 8)], "headdim=8 on rank 1, but 16"),
        ([(2, 8, 2, 16), (4, 4, 2, 16)], "batch=4 on rank 1, but 2"),
        ([(1, 8, 2, 16), (1, 4000, 2, 16)], "total_q=8000 on rank 1, but 16"),  # with memory to be shared on one alone
    ],
)
@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_ranks_that_disagree_about_shapes(shapes, text, mode):
    groups = new_groups(2)
    for error in each(groups, lambda group: forward_of(group, shapes[group.rank], mode=mode)):
        with pytest.raises(fa.BadArgument, match=text):
            raise error
    still_works(groups)


def test_ranks_that_disagree_about_lengths_of_equal_sum():
    groups = shared_groups(2)
    cu = [[0, 8, 16], [0, 4, 16]]
    raised = each(groups, lambda g: forward_of(g, (8, 2, 16), cu_seqlens_q=cu[g.rank], layout="contiguous"))
    assert all("a checksum of cu_seqlens_q" in str(error) for error in raised)
    still_works(groups)


def test_ranks_that_call_different_functions():
    groups = shared_groups(2)

    def rank(group):
        if group.rank == 0:
            return attend(group)
        return fad.merge(group, np.zeros((4, 2, 16), np.float32), np.zeros((2, 4), np.float32))

    for error in each(groups, rank):
        with pytest.raises(fa.BadArgument, match="the operation=4 on rank 1, but 1 on rank 0"):
            raise error
    still_works(groups)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        (lambda g, q: fad.forward(g, q.astype(np.float64), q, q), fa.BadArgument, "q is float64: expected float32"),
        (lambda g, q: fad.forward(g, q, q[:, :1], q), fa.BadArgument, "v has shape .* but k has"),
        (lambda g, q: fad.forward(g, q, q, q, mode="fast"), fa.BadArgument, "mode='fast' is none of 'auto'"),
        (lambda g, q: fad.forward(g, q, q, q, layout=2), fa.BadArgument, "layout=2 is none of"),
        (lambda g, q: fad.forward(g, q, q, q, groups=17), fa.BadArgument, "groups=17 is outside 0 .. 16"),
        (lambda g, q: fad.forward(g, q, q, q, groups=2**40), fa.BadArgument, "groups=1099511627776 is outside"),
        (lambda g, q: fad.forward(g, q, q, q, kernel="no"), fa.BadArgument, "kernel=no"),
        (lambda g, q: fad.forward(g, q, q, q, num_threads=-1), fa.BadArgument, "num_threads=-1"),
        (lambda g, q: fad.forward(g, q, q, q, out=q), fa.BadArgument, "out starts at the same address as q"),
        (lambda g, q: fad.forward(g, q, q, q, dropout_p=0.5), fa.BadArgument, "dropout_p=0.5 without dropout_seed"),
        (lambda g, q: fad.forward(g, q, q, q, dropout_p=2, dropout_seed=1), fa.BadArgument, "dropout_p=2 is outside"),
        (lambda g, q: fad.forward(g, q, q, q, window_size=(-2, 0)), fa.BadArgument, "window_left=-2"),
        (lambda g, q: fad.forward(g, q, q, q, window_size=3), fa.BadArgument, "window_size=3 is not a pair"),
        (lambda g, q: fad.forward(g, q, q, q, fast_accum=True), fa.Unsupported, "fast_accum=True: float8 is not"),
        (lambda g, q: fad.forward(g, q, q, q, out_dtype="float16"), fa.Unsupported, "out_dtype='float16'"),
        (lambda g, q: fad.forward(g, q, q, q, sinks=Q), fa.BadArgument, "sinks has shape"),
        (lambda g, q: fad.forward(g, q, q, q, bias=Q[0, :4, :, :4]), fa.BadArgument, "bias has shape"),
        (lambda g, q: fad.forward(g, q, q, q, nope=1), TypeError, "unexpected keyword argument 'nope'"),
        (lambda g, q: fad.forward(g, q, q, q, seqlen_q=99), fa.BadArgument, "q has shape .* holds .* of the 99 tokens"),
        (lambda g, q: fad.forward(g, q, q, q, cu_seqlens_q=[0, 8]), fa.BadArgument, r"cu_seqlens_q=\[0, 8\] with q of"),
        (lambda g, q: fad.forward(g, q[0], q[0], q[0]), fa.BadArgument, "cu_seqlens_q is None: packed arrays need"),
        (lambda g, q: fad.forward(g, q[0], q[0], q[0], cu_seqlens_q=[1, 8]), fa.BadArgument, r"cu_seqlens_q=\[1, 8\]"),
        (lambda g, q: fad.forward(g, q[0], q[0], q[0], cu_seqlens_q=[0.5]), fa.BadArgument, r"cu_seqlens_q=\[0.5\] is"),
        (
            lambda g, q: fad.forward(g, q[0], q[0], q[0], cu_seqlens_q=[0, 8], seqlen_k=8),
            fa.BadArgument,
            "seqlen_k=8 with packed",
        ),
        (lambda g, q: fad.forward(g, q[..., ::2], q, q), fa.BadArgument, "q has stride 2 along its last axis"),
        (lambda g, q: fad.forward(g, q[:, :, ::-1], q, q), fa.Unsupported, "q.head_stride=-16"),
        (lambda g, q: fad.forward(g, q.tolist(), q, q), fa.BadArgument, "q is a builtins.list"),
        (lambda g, q: fad.forward(g, *[np.repeat(q, 2, 0)[:, :-1]] * 3), fa.BadArgument, "q has strides"),
    ],
)  # fmt: skip
def test_one_rank_with_a_wrong_argument(wrong, kind, text, size):
    groups = shared_groups(size)
    culprit = size - 1

    def rank(group):
        if group.rank != culprit:
            return attend(group)
        return wrong(group, fad.shard(Q, "zigzag", group.rank, group.size))

    raised = each(groups, rank)
    with pytest.raises(kind, match=text):
        raise raised[culprit]
    told = fa.BadArgument if kind is TypeError else kind
    for error in raised[:culprit]:
        with pytest.raises(told, match=f"^rank {culprit}: .*({text})"):
            raise error
    still_works(groups)


MISTAKES = {
    "ring_bias": ({"mode": "ring", "bias": np.zeros((8, 8), np.float32)}, "mode=ring: bias: its columns"),
    "ring_mask": ({"mode": "ring", "mask": np.ones(8, bool)}, "mode=ring: mask: its columns"),
    "ring_dropout": (
        {"mode": "ring", "dropout_p": 0.5, "dropout_seed": 0},
        "mode=ring: dropout: a rank's keys begin at",
    ),
    "ulysses_bias": ({"mode": "ulysses", "bias": np.zeros((4, 8), np.float32)}, "mode=ulysses: bias has rows"),
    "ulysses_mask": ({"mode": "ulysses", "mask": np.ones((4, 8), bool)}, "mode=ulysses: mask has rows"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_modes_that_do_not_serve_a_call(mistake):
    options, text = MISTAKES[mistake]
    groups = shared_groups(2)
    if mistake == "ring_bias":
        options = {**options, "bias": options["bias"][:4]}
    part = fad.shard(Q, "zigzag", 0, 2)
    plan = fad.plan((0, 2), part, part, part, seqlen_q=8, seqlen_k=8, **options)
    assert plan.status == "FA_UNSUPPORTED" and text in plan.error
    assert list(plan.why_not) == [options["mode"]]
    for error in each(groups, lambda group: attend(group, **options)):
        with pytest.raises(fa.Unsupported, match=text):
            raise error
    still_works(groups)


def test_ulysses_refuses_a_bias_of_which_no_rank_can_say_whether_it_has_rows():
    """Two tokens on two ranks: a bias with one row may be the rank's own, or one that all share."""
    groups = shared_groups(2)
    bias = np.array([[0.0, 1.0]], np.float32)
    right = fa.flash_attn_func(*[Q[:, :2]] * 3, bias=bias)
    for shared, mode in ((bias, "gather"), (bias[0], "ulysses")):
        parts = fad.run(groups, lambda group, x=shared, m=mode: attend(group, 2, bias=x, mode=m))
        np.testing.assert_allclose(fad.unshard(parts, "zigzag"), right, atol=1e-6)
    for error in each(groups, lambda group: attend(group, 2, bias=bias, mode="ulysses")):
        with pytest.raises(fa.Unsupported, match="mode=ulysses: bias has rows"):
            raise error
    still_works(groups)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_threads": 4097}, "num_threads=4097 is outside"),
        ({"softcap": -1.0}, "softcap=-1 is not a finite"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf is not finite"),
    ],
)
def test_a_rank_without_queries_checks_the_options(options, text):
    groups = shared_groups(2)
    for tokens in (1, 0):
        for error in each(groups, lambda group, n=tokens: attend(group, n, **options)):
            with pytest.raises(fa.BadArgument, match=text):
                raise error
    still_works(groups)


def test_ulysses_needs_as_many_heads_as_ranks():
    groups = shared_groups(3)
    for error in each(groups, lambda group: attend(group, mode="ulysses")):
        with pytest.raises(fa.Unsupported, match="mode=ulysses: nheads=2 is below the 3 ranks"):
            raise error
    still_works(groups)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"return_dbias": True}, "return_dbias=True, but bias is None"),
        ({"return_dsinks": True}, "return_dsinks=True, but sinks is None"),
        ({"return_dsinks": 2}, "return_dsinks=2 is neither True nor False"),
        ({"dlse": np.zeros((2, 9), np.float32)}, r"dlse has shape \(2, 9\): expected \(2, 4\)"),
        ({"lse": np.zeros((1, 2, 4), np.float32)}, r"lse has shape \(1, 2, 4\): expected \(2, 4\)"),
        ({"dout": Q}, r"dout has shape \(1, 8, 2, 16\): expected \(1, 4, 2, 16\)"),
        ({"dq": Q}, "dq is float32 .*: expected float32"),
        ({"accumulate": True}, "unexpected keyword argument 'accumulate'"),
        ({"bias": np.zeros((1, 8), np.float32), "return_dbias": True, "mode": "ulysses"}, "mode=ulysses: dbias"),
    ],
)
def test_refusals_of_backward(wrong, text):
    groups = shared_groups(2)

    def rank(group):
        part = fad.shard(Q, "zigzag", group.rank, group.size)
        given = {"dout": part, "q": part, "k": part, "v": part, "out": part, "lse": np.zeros((2, 4), np.float32)}
        fad.backward(group, **{**given, **OPTIONS, **wrong})

    for error in each(groups, rank):
        with pytest.raises((fa.BadArgument, fa.Unsupported, TypeError), match=text):
            raise error
    still_works(groups)


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_results_that_overlap_inputs_are_refused_before_anything_is_written(mode):
    """Other ranks may still read the inputs. A kernel would not see it: it works on copies."""
    groups = shared_groups(2)
    buffers = np.random.default_rng(0).standard_normal((2, 4, 1, 5, 2, 16), dtype=np.float32)
    before = buffers.copy()

    def forward(group):
        q, k, v = buffers[group.rank, :3, :, :4]
        out = buffers[group.rank, 2, :, 1:] if group.rank else np.empty_like(q)
        fad.forward(group, q, k, v, out=out, mode=mode, **OPTIONS)

    def backward(group):
        q, k, v, dk = buffers[group.rank, :, :, :4]
        dv = buffers[group.rank, 3, :, 1:] if group.rank else np.empty_like(q)
        lse = np.zeros((2, 4), np.float32)
        fad.backward(group, q, q, k, v, v, lse, dk=dk, dv=dv, mode=mode, **OPTIONS)

    for function, text in ((forward, "out.data=.* overlaps v"), (backward, "dv.data=.* overlaps dk")):
        for error in each(groups, function):
            with pytest.raises(fa.BadArgument, match=text):
                raise error
    assert np.array_equal(buffers, before)
    still_works(groups)


@pytest.mark.parametrize("group", [None, 3, (0, 2)])
def test_what_is_no_group(group):
    with pytest.raises(fa.BadArgument, match="expected a Group"):
        fad.forward(group, Q, Q, Q)


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
    while not groups[0]._turn.locked():
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
    while not groups[0]._turn.locked():
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
    pairs = [new_groups(2), new_groups(2)]
    case = small(causal=True)
    alone = rank_of(shared_groups(1)[0], case, Split(1), CPU)
    found = [None, None]

    def many(i: int) -> None:
        found[i] = [fad.run(pairs[i], rank_of, case, Split(2), CPU) for _ in range(10)]

    threads = [threading.Thread(target=many, args=(i,)) for i in range(2)]
    with watchdog(30, pairs[0] + pairs[1]):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def both(first: fad.Group) -> list:  # a rank in two groups, with calls that alternate
        return [rank_of(pairs[i % 2][first.rank], case, Split(2), CPU) for i in range(4)]

    with watchdog(30, pairs[0] + pairs[1]):
        mixed = fad.run(pairs[0], both)
    for parts in [*found[0], *found[1], *zip(*mixed, strict=True)]:
        rows = [fad.indices("zigzag", rank, 2, case.cu_seqlens_q) for rank in range(2)]
        out = np.concatenate([part["out"] for part in parts])[np.argsort(np.concatenate(rows))]
        np.testing.assert_allclose(out, alone["out"], atol=1e-6)


def test_a_rank_that_closes_while_another_calls():
    """What ranks say at the end of a group is not taken for a call."""
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
    for error in each(groups, lambda group: group.reserve(-1)):
        with pytest.raises(fa.BadArgument, match="shared_bytes=-1 is outside"):
            raise error
    still_works(groups)


def test_reserve_on_one_rank_alone():
    groups = new_groups(2)
    for error in each(groups, lambda group: attend(group) if group.rank else group.reserve(100)):
        with pytest.raises(fa.RankLost, match="called different functions"):
            raise error


def test_repeated_calls_take_what_differs():
    """Other arrays, other options, and numbers that are equal but not alike."""
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
    with _record.Recording(), pytest.raises(fa.Unsupported, match="a collective call is not recorded"):
        attend(group)


# ---- plans ----


def test_plans():
    q, k = np.zeros((1, 256, 8, 64), np.float32), np.zeros((1, 256, 2, 64), np.float32)
    plans = {mode: fad.plan((0, 4), q, k, k, mode=mode, causal=True) for mode in ("auto", "gather", "ulysses", "ring")}
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
