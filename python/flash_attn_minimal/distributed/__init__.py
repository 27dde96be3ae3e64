"""Exact attention of sequences whose tokens are spread over several ranks: GPUs of one process or of several, CPU
threads and processes.

    groups = thread_groups(devices=[0, 1])              # or a Group of each process: from_torch, from_mpi, create_group
    out = forward(group, q, k, v, causal=True)          # on every rank, with its own tokens
"""

from .calls import DistributedPlan, backward, forward, plan
from .decoding import decode, merge
from .groups import Group, create_group, from_mpi, from_torch, run, thread_groups
from .layouts import indices, local_cu_seqlens, positions, segments, shard, unshard

__all__ = [
    "DistributedPlan",
    "Group",
    "backward",
    "create_group",
    "decode",
    "forward",
    "from_mpi",
    "from_torch",
    "indices",
    "local_cu_seqlens",
    "merge",
    "plan",
    "positions",
    "run",
    "segments",
    "shard",
    "thread_groups",
    "unshard",
]
