"""The work of ranks in the tests with processes. It is in a separate file, so that a new process does not load all
frameworks."""

import os
import signal
import time

import numpy as np

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

Q, K, V, DOUT = np.random.default_rng(0).standard_normal((4, 1, 40, 2, 16), dtype=np.float32)


def several_calls(rank: int, size: int, all_gather, on_gpu: bool) -> list[dict]:
    """Runs every case in every mode through one group, and returns this rank's rows."""
    import ranks
    from conftest import CPU, CUDA, CUDA_DEVICES
    from test_processes import CASES

    device = ranks.on(CUDA, rank) if on_gpu else CPU
    found = []
    with fad.create_group(rank, size, all_gather, device=rank % CUDA_DEVICES if on_gpu else "cpu") as group:
        for case, layout in CASES:
            for mode in ranks.MODES:
                found.append(ranks.rank_of(group, case, ranks.Split(size, layout, mode), device))
    return found


X = np.random.default_rng(0).standard_normal((1, 12, 2, 16), dtype=np.float32)


def attend(group: fad.Group, **options) -> np.ndarray:
    part = fad.shard(X, "zigzag", group.rank, group.size)
    return fad.forward(group, part, part, part, seqlen_q=12, num_threads=1, **options)


KEPT = []


def dies(rank: int, size: int, all_gather, how: str) -> tuple[str, float]:
    """Rank 1 ends between two calls. The other ranks return the error that they got, and after how long."""
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


def comes_late(rank: int, size: int, all_gather, pause: float, timeout: float) -> str:
    """Rank 1 comes after a pause; without a pause, it comes after rank 0 has given up."""
    group = fad.create_group(rank, size, all_gather, timeout=timeout)
    if rank == 1:
        time.sleep(pause) if pause else all_gather(b"")
    try:
        said = str(attend(group).shape)
    except fa.RankLost as error:
        said = str(error)
    if rank == 0 and not pause:
        all_gather(b"")
    group.close()
    return said


def stopped(rank: int, size: int, all_gather) -> str:
    """Rank 1 is stopped between calls, and goes on after rank 0 has given up."""
    group = fad.create_group(rank, size, all_gather, timeout=1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(3):
            attend(group)
    except fa.RankLost as error:
        return str(error)
    return "no error"


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


def asks_for_threads(rank: int, size: int, all_gather) -> list[str]:
    """Calls while FLASH_ATTN_NUM_THREADS is right on rank 0 and wrong on rank 1, and then right on both."""
    said = []
    with fad.create_group(rank, size, all_gather, timeout=20) as group:
        part = fad.shard(X, "zigzag", rank, size)
        for value in ("many" if rank else "2", str(rank + 1)):
            os.environ["FLASH_ATTN_NUM_THREADS"] = value
            for call in (
                lambda: fad.forward(group, part, part, part, seqlen_q=12),
                lambda: fad.decode(group, X[:, :1], part, part),
            ):
                try:
                    call()
                    said.append("right")
                except fa.FlashAttnError as error:
                    said.append(str(error))
    return said


def decodes(rank: int, size: int, all_gather) -> np.ndarray:
    """Each rank has a third of the keys. decode merges the results; a call on each rank and merge give the same."""
    with fad.create_group(rank, size, all_gather, timeout=20) as group:
        mine = np.ascontiguousarray(X[:, 4 * rank : 4 * rank + 4])
        out = fad.decode(group, X[:, :1], mine, mine, num_threads=1)
        merged, lse = (x[0] for x in fa.flash_attn_func(X[:, :1], mine, mine, return_lse=True, num_threads=1))
        np.testing.assert_allclose(fad.merge(group, merged, lse)[0], out[0], atol=1e-6)
        return out


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


def both_passes(group: fad.Group, make, **options) -> list:
    q, k, v, dout = (make(fad.shard(x, "zigzag", group.rank, group.size)) for x in (Q, K, V, DOUT))
    options = {"causal": True, "num_threads": 1, **options}
    out, lse = fad.forward(group, q, k, v, return_lse=True, **options)
    return [out, *fad.backward(group, dout, q, k, v, out, lse, **options)]


def torch_rank(rank: int, size: int, all_gather, port: int, on_gpu: bool, subset: bool) -> list | None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    try:
        fad.from_torch()
    except fa.BadArgument as error:
        assert "call init_process_group before" in str(error)
    dist.init_process_group("gloo")
    some = dist.new_group([0, 2]) if subset else None
    if subset and rank == 1:
        return None
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    with fad.from_torch(some, device=device, timeout=30) as group:
        found = [
            both_passes(group, lambda x: torch.tensor(x, device=device), mode=mode) for mode in ("gather", "ulysses")
        ]
        assert all(isinstance(x, torch.Tensor) and x.device == device for results in found for x in results)
        assert group.device == (f"cuda:{device.index}" if on_gpu else "cpu")
    dist.destroy_process_group()
    return [[x.cpu().numpy() for x in results] for results in found]


class Communicator:
    def __init__(self, rank, size, all_gather):
        self.Get_rank, self.Get_size, self.allgather = (lambda: rank), (lambda: size), all_gather


def mpi_rank(rank: int, size: int, all_gather) -> list:
    with fad.from_mpi(Communicator(rank, size, all_gather), timeout=20) as group:
        return both_passes(group, np.asarray)
