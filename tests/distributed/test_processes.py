"""Ranks that are processes of one host."""

import numpy as np
import processes
import pytest
import ranks
from conftest import CPU, CUDA, CUDA_DEVICES, NO_CUDA, torch
from ranks import MODES, Shards, Split, small

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
