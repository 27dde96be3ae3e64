"""The structs and numbers of cuda/flash_attn.h.

The structs are the header's with nested fields written flat: `q.row_stride` is `q_row_stride` here, at the same offset
(tests/package/test_library.py compares every offset with what a C compiler says). transformer/_library.py mirrors the
functions around attention in the same way.
"""

from __future__ import annotations

import ctypes as ct
from typing import Any, TypeVar

from .._arrays.door import CPU, CUDA, DEVICES  # noqa: F401  (fa_device)
from ..errors import BadArgument

DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4}
CACHE_DTYPES = {"float8_e4m3fn": 4, "int8": 5}  # dtypes that a KV cache may have, besides q's


class _Integer(property):
    """An integer field that refuses values out of range; plain ctypes would cut them to their low bits."""

    def __init__(self, name: str, field: Any, kind: type):
        put, bits = field.__set__, 8 * ct.sizeof(kind)
        signed = kind(-1).value < 0
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

        def fill(struct: ct.Structure, value: int) -> None:
            if not low <= value <= high:
                raise BadArgument(f"{name}={value} is outside {low} .. {high}")
            put(struct, value)

        super().__init__(field.__get__, fill)
        self.offset, self.size = field.offset, field.size


_TYPES = {
    "int32": ct.c_int32, "int64": ct.c_int64, "uint64": ct.c_uint64, "size": ct.c_size_t, "float": ct.c_float,
    "pointer": ct.c_void_p, "text": ct.c_char_p,
}  # fmt: skip
# Kinds of arrays: the axes whose strides, in this order, follow the address.
_STRIDES = {
    "tensor": ("batch", "row", "head"),
    "scores": ("batch", "head", "row"),
    "indices": ("batch", "head", "key"),
    "factors": ("batch", "head"),
    "matrix": ("row",),
}


def struct(name: str, *declared: str | tuple[str, Any], sized: bool = True, checked: bool = True) -> Any:
    """The mirror of a struct of the C ABI, from declarations "type name name ..."; a pair (name, type) is one field.
    sized: it begins with its size; checked: its integers are checked as they are set."""
    fields: list[tuple[str, Any]] = [("struct_size", ct.c_size_t)] if sized else []
    for each in declared:
        kind, *names = each.split() if isinstance(each, str) else ("",)
        if not kind:
            fields.append(each)
        for field in names:
            if kind in _TYPES:
                fields.append((field, _TYPES[kind]))
            else:
                strides = [(f"{field}_{axis}_stride", ct.c_int64) for axis in _STRIDES[kind]]
                fields += [(f"{field}_data", ct.c_void_p), *strides]
    mirror = type(name, (ct.Structure,), {"_fields_": fields})
    for field, kind in fields:
        if checked and kind in (ct.c_int32, ct.c_int64, ct.c_uint64):  # c_size_t is one of them
            setattr(mirror, field, _Integer(field, getattr(mirror, field), kind))
    return mirror


# fa_part, as a NumPy dtype: an array of these describes sequences of a varlen call that are parts of longer ones.
PART_FIELDS = ("key_begin", "seqlen_k", "shift", "first_row", "first_key", "sequence", "seqlen_q", "reserved")
PART_DTYPE = [(name, "<i4") for name in PART_FIELDS]

# A fresh one is all zero, and zero always means the default.
AttentionArgs = struct(
    "fa_attention_args",
    *"""
    int32 device dtype out_dtype batch nheads nheads_k headdim headdim_v
    int64 seqlen_q seqlen_k total_q total_k
    tensor q k v
    factors q_descale k_descale v_descale
    pointer cu_seqlens_q cu_seqlens_k parts
    float softmax_scale
    int32 has_softmax_scale
    float softcap
    int32 bias_dtype
    pointer alibi_slopes
    int64 alibi_batch_stride
    scores bias
    pointer sinks
    scores mask
    indices startend_row_indices
    int32 startend_row_indices_heads startend_row_indices_numbers
    scores block_mask
    int32 block_mask_heads block_mask_row_block block_mask_key_block block_mask_reserved
    int32 causal top_left attention_chunk has_window
    int64 window_left window_right
    float dropout_p
    int32 first_head
    uint64 dropout_seed dropout_offset
    tensor out
    pointer lse max_score key_sums
    int32 allow_tf32 fast_accum deterministic num_threads
    text kernel
    pointer workspace
    size workspace_bytes
    """.strip().splitlines(),
)

AttentionBackwardArgs = struct(
    "fa_attention_backward_args",
    ("forward", ct.POINTER(AttentionArgs)),
    "tensor dout",
    "pointer dlse",
    "tensor dq dk dv",
    "scores dbias",
    "pointer dsinks",
    "int32 accumulate reserved",
)

KVCacheArgs = struct(
    "fa_kvcache_args",
    ("attention", ct.POINTER(AttentionArgs)),
    "int32 cache_dtype cache_batch",
    "pointer cache_seqlens cache_batch_idx cache_leftpad block_table",
    "int64 block_table_stride",
    "tensor k_scale v_scale",
    *("int32 page_size seqlen_new", "tensor k_new v_new"),
    "pointer rotary_cos rotary_sin",
    "int32 rotary_dtype rotary_rows rotary_dim rotary_interleaved",
    *("pointer tree_mask", "int64 tree_batch_stride tree_row_stride"),
    "int32 tree_keys batch_invariant num_splits programmatic shared_prefix reserved",
)

AttentionPlan = struct(
    "fa_attention_plan",
    "int32 status reserved",
    "size workspace_bytes",
    ("kernel", ct.c_char * 32),
    ("variant", ct.c_char * 32),
    ("why_not", ct.c_char * 1472),
    checked=False,
)

MergeArgs = struct(
    "fa_merge_args",
    "int32 device dtype batch nheads headdim_v reserved",
    "int64 seqlen",
    "tensor out_a out_b out",
    "pointer lse_a lse_b lse",
)

QuantizeArgs = struct(
    "fa_quantize_args",
    "int32 device dtype batch nheads headdim hadamard",
    "int64 seqlen",
    "uint64 seed",
    "tensor x out",
    "pointer descale",
)

Hole = struct("fa_hole", "int32 byte bytes value", sized=False, checked=False)

Call = struct(
    "fa_call",
    "int32 operation reserved",
    "pointer image",
    "size image_bytes",
    "pointer holes",
    "int32 hole_count value_count",
    sized=False,
    checked=False,
)

_Struct = TypeVar("_Struct", bound=ct.Structure)


def new(kind: type[_Struct]) -> _Struct:
    """A new struct with its size set and all else zero, which always means the default."""
    made = kind()
    made.struct_size = ct.sizeof(kind)  # type: ignore[attr-defined]
    return made


# fa_operation, from 1 on: the functions fa_<name> that take one struct and a stream.
OPERATIONS = (
    *("attention_forward", "attention_backward", "kvcache_attention", "attention_merge", "quantize_fp8"),
    *("rms_norm", "rope", "swiglu", "sample", "linear"),
    *("w4_quantize", "w4_dequantize", "w4_pack", "w4_linear", "w4_linear_chain"),
    *("distributed_forward", "distributed_backward", "distributed_decode", "distributed_merge"),
)
# The structs of the first of these, those of attention.
_ARGS = AttentionArgs, AttentionBackwardArgs, KVCacheArgs, MergeArgs, QuantizeArgs
LAUNCHES = dict(zip(OPERATIONS, _ARGS, strict=False))
