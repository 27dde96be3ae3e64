"""Groups over an NCCL communicator: two GPUs or more, a thread for each. NCCL comes from PyTorch's wheels."""

import ctypes as ct
import threading

import numpy as np
import pytest
from ranks import CUDA, CUDA_DEVICES, LEAST, MODES, NO_CUDA, Split, check_results, compute, small

import flash_attn_minimal.distributed as fad
from flash_attn_minimal import BadArgument

SIZE = max(2, LEAST)


@pytest.fixture(scope="module")
def communicators():
    """The addresses of the ncclComm_t of this process's ranks."""
    if NO_CUDA or CUDA.framework != "torch" or CUDA_DEVICES < SIZE:
        pytest.skip(NO_CUDA or f"needs PyTorch and {SIZE} GPUs")
    try:
        nccl = ct.CDLL("libnccl.so.2")  # loaded by torch
    except OSError as error:
        pytest.skip(str(error))
    found = (ct.c_void_p * SIZE)()
    assert nccl.ncclCommInitAll(found, SIZE, (ct.c_int * SIZE)(*range(SIZE))) == 0
    yield [int(x) for x in found]
    for x in found:
        nccl.ncclCommDestroy(ct.c_void_p(x))


def all_gathers(size: int):
    """For each rank an all-gather between threads."""
    barrier, box = threading.Barrier(size), [b""] * size

    def of(rank: int):
        def gather(mine: bytes) -> list[bytes]:
            box[rank] = mine
            barrier.wait(30)
            found = list(box)
            barrier.wait(30)
            return found

        return gather

    return [of(rank) for rank in range(size)]


@pytest.fixture(scope="module")
def groups(communicators):
    made, gathers = [None] * SIZE, all_gathers(SIZE)

    def make(rank):
        made[rank] = fad.create_group(
            rank, SIZE, gathers[rank], kind="nccl", device=rank, nccl_comm=communicators[rank]
        )

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(made)
    yield made
    closing = [threading.Thread(target=group.close) for group in made]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)


@pytest.mark.parametrize("layout", ["zigzag", "flat"])
@pytest.mark.parametrize("mode", MODES)
def test_both_passes(groups, mode, layout):
    case = small(causal=True, sinks=True, dtype="bfloat16", nheads=4, nheads_k=2, headdim=64)
    got = compute(case, Split(SIZE, layout, mode), CUDA, groups)
    check_results(case, got)
    again = compute(case, Split(SIZE, layout, mode), CUDA, groups, deterministic=True)
    np.testing.assert_allclose(again["out"], got["out"])


def test_a_communicator_of_other_ranks(communicators):
    said, gathers = [None] * SIZE, all_gathers(SIZE)

    def make(rank):
        other = communicators[(rank + 1) % SIZE]
        try:
            fad.create_group(rank, SIZE, gathers[rank], kind="nccl", device=rank, nccl_comm=other)
        except (BadArgument, RuntimeError) as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said[0] and f"nccl_comm is rank 1 of {SIZE}" in said[0], said
