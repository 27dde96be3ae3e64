"""Ranks that are processes of one host."""

import os
import signal
from pathlib import Path

import numpy as np
import processes
import pytest
import ranks
from conftest import CPU, CUDA, NO_CUDA, torch
from process_calls import X, asks_for_threads, comes_late, decodes, dies, disagrees, grows, several_calls, stopped
from ranks import LEAST, MODES, Shards, Split, small

import flash_attn_minimal as fa

SIZES = sorted({max(size, LEAST) for size in (2, 3)})
CASES = [
    (small(causal=True, sinks=True, alibi=1), "zigzag"),
    (small(cu_seqlens_q=(0, 5, 21, 60), cu_seqlens_k=(0, 41, 57, 130), window_size=(20, 3), dlse=True), "contiguous"),
    (small(dtype="float16", nheads=6, nheads_k=1, causal=True), "flat"),
    (small(cu_seqlens_q=(0, 1, 1, 4), cu_seqlens_k=(0, 0, 2, 30)), "zigzag"),
]


@pytest.mark.parametrize(
    "on_gpu", [False, pytest.param(True, marks=pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA))]
)
@pytest.mark.parametrize("size", SIZES)
def test_processes_give_the_bits_of_threads(size, on_gpu):
    found = processes.run(size, several_calls, on_gpu)
    device = CUDA if on_gpu else CPU
    for i, (case, layout) in enumerate(CASES):
        for j, mode in enumerate(MODES):
            split = Split(size, layout, mode)
            cut = [Shards(case, split, rank) for rank in range(size)]
            got = ranks.together(case, cut, [each[len(MODES) * i + j] for each in found], None)
            ranks.check_results(case, got)
            if not on_gpu:
                threads = ranks.compute(case, split, device)
                for name, x in got.items():
                    assert np.array_equal(x, threads[name]), (name, split)


# ---- processes that end, or come late ----


def left_behind(pids) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("flash_attn_*") if int(path.name.split("_")[2]) in pids]


ENDED = r"rank 1 \(process \d+\) has ended"


@pytest.mark.parametrize(
    "how, text", [("killed", ENDED), ("exits", ENDED), ("dropped", "rank 1 dropped its group without closing it")]
)
@pytest.mark.parametrize("size", SIZES)
def test_a_process_that_ends(size, how, text):
    ranks_of = processes.Ranks(size, dies, how)
    pids = [process.pid for process in ranks_of.processes]
    said = ranks_of.results()
    assert said[1] == (("ended", None) if how == "killed" else ("result", ("", 0.0)))
    for kind, (told, seconds) in (each for rank, each in enumerate(said) if rank != 1):
        assert kind == "result" and seconds < 10
        with pytest.raises(AssertionError, match=f"the group has ended: {text}"):
            raise AssertionError(told)
    assert not left_behind(pids)


LATE = "the group has ended: rank 1 did not come within timeout_ms=1000, and rank 0 stopped waiting"


def test_late_processes():
    assert processes.run(2, comes_late, 0.5, 20.0) == ["(1, 6, 2, 16)"] * 2
    assert processes.run(2, comes_late, 0.0, 1.0) == [LATE] * 2


def test_a_process_that_is_stopped():
    ranks_of = processes.Ranks(2, stopped)

    def go_on(rank: int) -> None:
        if rank == 0:
            os.kill(ranks_of.processes[1].pid, signal.SIGCONT)

    assert ranks_of.results(go_on) == [("result", LATE)] * 2


def test_processes_that_disagree():
    first, second = processes.run(2, disagrees)
    assert first[0] == second[0] == "causal=1 on rank 1, but 0 on rank 0: all ranks make the same call"
    assert second[1] == "softmax_scale='x' is not a number" and first[1] == f"rank 1: {second[1]}"
    assert first[2] == second[2] == "right"


def test_a_process_with_a_wrong_number_of_threads():
    first, second = processes.run(2, asks_for_threads)
    wrong = "FLASH_ATTN_NUM_THREADS=many is not a number of threads"
    assert [text.split(":")[0] for text in second] == [wrong] * 2 + ["right"] * 2
    assert first == [f"rank 1: {text}" for text in second[:2]] + ["right"] * 2


def test_decode_across_processes():
    right = fa.flash_attn_func(X[:, :1], X, X)
    for out in processes.run(3, decodes):
        np.testing.assert_allclose(out, right, atol=1e-6)


def test_shared_memory_grows():
    assert processes.run(2, grows) == [True, True]
