"""Mirrors flash_attn_distributed.h, with nested fields written flat, as in _core/structs.py."""

from __future__ import annotations

import ctypes as ct
import functools

from .._core import library
from .._core.library import declare, raise_on_error
from .._core.structs import AttentionArgs, AttentionBackwardArgs, KVCacheArgs, struct

KINDS = {"threads": 1, "processes": 2, "nccl": 3}
LAYOUTS = {"contiguous": 1, "zigzag": 2, "flat": 3}
MODES = {"auto": 0, "gather": 1, "ulysses": 2}
MOST_RANKS = 1024

# int all_gather(void* context, const void* mine, void* all, size_t bytes)
AllGather = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_size_t)

GroupArgs = struct(
    "fa_group_args",
    "int32 kind rank size device device_index reserved",
    "int64 timeout_ms",
    ("all_gather", AllGather),
    "pointer context nccl_comm",
    "text nccl_library",
)

Segment = struct("fa_segment", "int32 sequence begin end", sized=False, checked=False)

DistributedArgs = struct(
    "fa_distributed_args",
    ("attention", ct.POINTER(AttentionArgs)),
    "pointer cu_seqlens_q cu_seqlens_k",
    "int32 batch layout mode groups",
)

DistributedPlan = struct(
    "fa_distributed_plan",
    "int32 status mode groups calls",
    "int64 rows_q rows_k",
    "size workspace_bytes shared_bytes",
    "int64 received_bytes",
    ("why_not", ct.c_char * 1472),
    checked=False,
)

DistributedBackwardArgs = struct(
    "fa_distributed_backward_args",
    ("forward", ct.POINTER(DistributedArgs)),
    ("gradients", ct.POINTER(AttentionBackwardArgs)),
)

DistributedDecodeArgs = struct("fa_distributed_decode_args", ("cache", ct.POINTER(KVCacheArgs)))

DistributedMergeArgs = struct(
    "fa_distributed_merge_args",
    "int32 device dtype nheads headdim_v",
    "int64 rows",
    "tensor out",
    "pointer lse workspace",
    "size workspace_bytes",
)

# The functions fa_distributed_<name> of a group, one struct and a stream.
CALLS = {
    "forward": DistributedArgs,
    "backward": DistributedBackwardArgs,
    "decode": DistributedDecodeArgs,
    "merge": DistributedMergeArgs,
}

# For each, fa_group_call with the type of what `args` points to.
GROUP_CALLS = {
    name: struct(
        "fa_group_call", "pointer group", ("args", ct.POINTER(args)), "int32 kind rank size reserved", checked=False
    )
    for name, args in CALLS.items()
}


@functools.cache
def load() -> ct.CDLL:
    """The library, with every function of flash_attn_distributed.h typed; all but the queries raise on a bad status."""
    lib = library.load()
    group, plan = ct.c_void_p, ct.POINTER(DistributedPlan)
    cu_seqlens, segments = ct.POINTER(ct.c_int32), ct.POINTER(Segment)
    collectives = {
        "fa_group_create": (ct.POINTER(GroupArgs), ct.POINTER(group)),
        "fa_group_reserve": (group, ct.c_size_t),
        "fa_group_refuse": (group, ct.c_int, ct.c_char_p),
        "fa_distributed_segments": (*[ct.c_int32] * 4, cu_seqlens, segments, ct.c_int64, ct.POINTER(ct.c_int64)),
        **{f"fa_distributed_{name}": (group, ct.POINTER(args), ct.c_void_p) for name, args in CALLS.items()},
    }
    for name, arguments in collectives.items():
        declare(lib, name, ct.c_int, *arguments).errcheck = raise_on_error
    declare(lib, "fa_group_destroy", None, group)
    declare(lib, "fa_group_abort", None, group, ct.c_char_p)
    for name, args in CALLS.items():
        query = "fa_distributed_query" if name == "forward" else f"fa_distributed_{name}_query"
        declare(lib, query, ct.c_int, ct.POINTER(args), *[ct.c_int32] * 3, plan)
    return lib
