"""Ranks that are processes of one host."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import processes
import pytest
import ranks
from conftest import CPU, CUDA, CUDA_DEVICES, NO_CUDA, torch
from ranks import MODES, Shards, Split, small

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

CASES = [
    (small(causal=True, sinks=True, alibi=1), "zigzag"),
    (small(cu_seqlens_q=(0, 5, 21, 60), cu_seqlens_k=(0, 41, 57, 130), window_size=(20, 3), dlse=True), "contiguous"),
    (small(dtype="float16", nheads=6, nheads_k=1, causal=True), "flat"),
    (small(cu_seqlens_q=(0, 1, 1, 4), cu_seqlens_k=(0, 0, 2, 30)), "zigzag"),
]


def several_calls(rank: int, size: int, all_gather, on_gpu: bool) -> list[dict]:
    """Every case in every mode, through the same group; this rank's rows."""
    device = ranks.on(CUDA, rank) if on_gpu else CPU
    found = []
    with fad.create_group(rank, size, all_gather, device=rank % CUDA_DEVICES if on_gpu else "cpu") as group:
        for case, layout in CASES:
            for mode in MODES:
                found.append(ranks.rank_of(group, case, Split(size, layout, mode), device))
    return found


@pytest.mark.parametrize(
    "on_gpu", [False, pytest.param(True, marks=pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA))]
)
@pytest.mark.parametrize("size", [2, 3])
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

Q = np.random.default_rng(0).standard_normal((1, 12, 2, 16), dtype=np.float32)


def attend(group: fad.Group, **options) -> np.ndarray:
    part = fad.shard(Q, "zigzag", group.rank, group.size)
    return fad.forward(group, part, part, part, seqlen_q=12, num_threads=1, **options)


def left_behind(pids) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("flash_attn_*") if int(path.name.split("_")[2]) in pids]


KEPT = []


def dies(rank: int, size: int, all_gather, how: str) -> tuple[str, float]:
    """Rank 1 ends between two calls; the others say what they were told, and after how long."""
    group = fad.create_group(rank, size, all_gather, timeout=20)
    attend(group, mode="gather")
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            KEPT.append(group)  # until its process is no more
        return "", 0.0  # else without a reference to the group
    begin = time.monotonic()
    try:
        attend(group)
    except fa.RankLost as error:
        text = str(error)
    try:
        group.close()
        attend(group)
    except fa.BadArgument as error:
        assert "is closed" in str(error)
    return text, time.monotonic() - begin


ENDED = r"rank 1 \(process \d+\) has ended"


@pytest.mark.parametrize(
    "how, text", [("killed", ENDED), ("exits", ENDED), ("dropped", "rank 1 dropped its group without closing it")]
)
@pytest.mark.parametrize("size", [2, 3])
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


def comes_late(rank: int, size: int, all_gather, pause: float) -> str:
    with fad.create_group(rank, size, all_gather, timeout=1.0) as group:
        attend(group)
        if rank == 1:
            time.sleep(pause)
        try:
            return str(attend(group).shape)
        except fa.RankLost as error:
            return str(error)


def test_late_processes():
    assert processes.run(2, comes_late, 0.3) == ["(1, 6, 2, 16)"] * 2
    assert (
        processes.run(2, comes_late, 2.0)
        == ["the group has ended: rank 1 did not come within timeout_ms=1000, and rank 0 stopped waiting"] * 2
    )


def stopped(rank: int, size: int, all_gather) -> str:
    """Rank 1 is stopped in the middle of its calls, and goes on after the others have given up."""
    group = fad.create_group(rank, size, all_gather, timeout=1.0)
    attend(group)
    all_gather(b"ready")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(3):
            attend(group)
    except fa.RankLost as error:
        return str(error)
    return "no error"


def test_a_process_that_is_stopped():
    ranks_of = processes.Ranks(2, stopped)
    pid = ranks_of.processes[1].pid
    timer = processes.later(3.0, lambda: os.kill(pid, signal.SIGCONT))
    said = ranks_of.results()
    timer.cancel()
    for kind, text in said:
        assert kind == "result" and "rank 1 did not come within timeout_ms=1000" in text


def disagrees(rank: int, size: int, all_gather) -> list[str]:
    said = []
    with fad.create_group(rank, size, all_gather, timeout=20) as group:
        for options in ({"causal": bool(rank)}, {"softmax_scale": "x" if rank else None}, {"mode": "ulysses"}):
            try:
                attend(group, **options)
                said.append("right")
            except fa.FlashAttnError as error:
                said.append(str(error))
        np.testing.assert_array_equal(attend(group), attend(group))
    return said


def test_processes_that_disagree():
    first, second = processes.run(2, disagrees)
    assert first[0] == second[0] == "causal=1 on rank 1, but 0 on rank 0: all ranks make the same call"
    assert second[1] == "softmax_scale='x' is not a number" and first[1] == f"rank 1: {second[1]}"
    assert first[2] == second[2] == "right"


def decodes(rank: int, size: int, all_gather) -> np.ndarray:
    """Each rank has a third of the keys, and merges; then the same by itself."""
    with fad.create_group(rank, size, all_gather, timeout=20) as group:
        mine = np.ascontiguousarray(Q[:, 4 * rank : 4 * rank + 4])
        out = fad.decode(group, Q[:, :1], mine, mine, num_threads=1)
        merged, lse = (x[0] for x in fa.flash_attn_func(Q[:, :1], mine, mine, return_lse=True, num_threads=1))
        np.testing.assert_allclose(fad.merge(group, merged, lse)[0], out[0], atol=1e-6)
        return out


def test_decode_across_processes():
    right = fa.flash_attn_func(Q[:, :1], Q, Q)
    for out in processes.run(3, decodes):
        np.testing.assert_allclose(out, right, atol=1e-6)


def grows(rank: int, size: int, all_gather) -> bool:
    """Calls that need more and more shared memory."""
    with fad.create_group(rank, size, all_gather, timeout=20) as group:
        for rows in (4, 400, 40, 4000, 4):
            q = np.random.default_rng(rows).standard_normal((size * rows, 2, 8), dtype=np.float32)
            part, cu = fad.shard(q, "flat", rank, size, [0, len(q)]), [0, len(q)]
            out = fad.forward(group, part, part, part, cu_seqlens_q=cu, layout="flat", mode="ulysses", num_threads=1)
            if rows < 1000:
                right = fa.flash_attn_func(q[None], q[None], q[None])[0]
                np.testing.assert_allclose(out, fad.shard(right, "flat", rank, size, cu), atol=1e-6)
    return True


def test_shared_memory_grows():
    assert processes.run(2, grows) == [True, True]
