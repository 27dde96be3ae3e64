"""Processes that run many functions together, as ranks of PyTorch over gloo. They are kept, because starting one takes
seconds."""

import queue
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_attn_minimal.torch import context_parallel as across

_PATIENCE = 120  # seconds that a function may take


class Crew:
    def __init__(self, size: int, folder):
        self.size = size
        start = mp.get_context("spawn")
        self.tasks = [start.Queue() for _ in range(size)]
        self.results = start.Queue()
        self.spawned = mp.spawn(_work, (size, str(folder / "store"), self.tasks, self.results), size, join=False)

    def __call__(self, function, *args) -> list:
        """function(*args) on every rank; returns the results by rank. Errors of ranks are an AssertionError."""
        for tasks in self.tasks:
            tasks.put((function, args))
        results, errors = [None] * self.size, []
        for _ in range(self.size):
            try:
                rank, result, error = self.results.get(timeout=_PATIENCE)
            except queue.Empty:
                self.spawned.join(timeout=0.1)  # raises where a process has ended
                raise AssertionError(f"the ranks do not answer; so far: {errors}") from None
            results[rank] = result
            if error:
                errors.append(f"rank {rank}: {error}")
        assert not errors, "\n".join(errors)
        return results

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        while not self.spawned.join(timeout=60):
            pass


def _work(rank: int, size: int, store: str, tasks, results) -> None:
    torch.set_num_threads(1)
    across._TIMEOUT = 20.0  # so that one failing rank does not keep the others for minutes
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (task := tasks[rank].get()) is not None:
        function, args = task
        try:
            results.put((rank, function(*args), ""))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()
