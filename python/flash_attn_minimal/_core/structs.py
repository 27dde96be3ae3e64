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


def _checked(struct: type) -> type:
    """Makes a mirror of a C struct check its integers as they are set."""
    for name, kind in struct._fields_:
        if kind in (ct.c_int32, ct.c_int64, ct.c_uint64):  # c_size_t is one of them
            setattr(struct, name, _Integer(name, getattr(struct, name), kind))
    return struct


def _tensor(name: str) -> list[tuple[str, type]]:
    return [(f"{name}_data", ct.c_void_p)] + [
        (f"{name}_{axis}_stride", ct.c_int64) for axis in ("batch", "row", "head")
    ]


def _score_tensor(name: str) -> list[tuple[str, type]]:
    return [(f"{name}_data", ct.c_void_p)] + [
        (f"{name}_{axis}_stride", ct.c_int64) for axis in ("batch", "head", "row")
    ]


def _descale(name: str) -> list[tuple[str, type]]:
    return [
        (f"{name}_data", ct.c_void_p),
        (f"{name}_batch_stride", ct.c_int64),
        (f"{name}_head_stride", ct.c_int64),
    ]


def _row_indices(name: str) -> list[tuple[str, type]]:
    return [
        (f"{name}_data", ct.c_void_p),
        *((f"{name}_{axis}_stride", ct.c_int64) for axis in ("batch", "head", "key")),
        (f"{name}_heads", ct.c_int32),
        (f"{name}_numbers", ct.c_int32),
    ]


def _block_mask(name: str) -> list[tuple[str, type]]:
    return _score_tensor(name) + [
        (f"{name}_{field}", ct.c_int32) for field in ("heads", "row_block", "key_block", "reserved")
    ]


# fa_part, as a NumPy dtype: an array of these describes sequences of a varlen call that are parts of longer ones.
PART_FIELDS = ("key_begin", "seqlen_k", "shift", "first_row", "first_key", "sequence", "seqlen_q", "reserved")
PART_DTYPE = [(name, "<i4") for name in PART_FIELDS]


@_checked
class AttentionArgs(ct.Structure):
    """fa_attention_args. A fresh one is all zero, and zero always means the default."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device", ct.c_int32),
        ("dtype", ct.c_int32),
        ("out_dtype", ct.c_int32),
        ("batch", ct.c_int32),
        ("nheads", ct.c_int32),
        ("nheads_k", ct.c_int32),
        ("headdim", ct.c_int32),
        ("headdim_v", ct.c_int32),
        ("seqlen_q", ct.c_int64),
        ("seqlen_k", ct.c_int64),
        ("total_q", ct.c_int64),
        ("total_k", ct.c_int64),
        *_tensor("q"),
        *_tensor("k"),
        *_tensor("v"),
        *_descale("q_descale"),
        *_descale("k_descale"),
        *_descale("v_descale"),
        ("cu_seqlens_q", ct.c_void_p),
        ("cu_seqlens_k", ct.c_void_p),
        ("parts", ct.c_void_p),
        ("softmax_scale", ct.c_float),
        ("has_softmax_scale", ct.c_int32),
        ("softcap", ct.c_float),
        ("bias_dtype", ct.c_int32),
        ("alibi_slopes", ct.c_void_p),
        ("alibi_batch_stride", ct.c_int64),
        *_score_tensor("bias"),
        ("sinks", ct.c_void_p),
        *_score_tensor("mask"),
        *_row_indices("startend_row_indices"),
        *_block_mask("block_mask"),
        ("causal", ct.c_int32),
        ("top_left", ct.c_int32),
        ("attention_chunk", ct.c_int32),
        ("has_window", ct.c_int32),
        ("window_left", ct.c_int64),
        ("window_right", ct.c_int64),
        ("dropout_p", ct.c_float),
        ("first_head", ct.c_int32),
        ("dropout_seed", ct.c_uint64),
        ("dropout_offset", ct.c_uint64),
        *_tensor("out"),
        ("lse", ct.c_void_p),
        ("max_score", ct.c_void_p),
        ("key_sums", ct.c_void_p),
        ("allow_tf32", ct.c_int32),
        ("fast_accum", ct.c_int32),
        ("deterministic", ct.c_int32),
        ("num_threads", ct.c_int32),
        ("kernel", ct.c_char_p),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_size_t),
    ]


@_checked
class AttentionBackwardArgs(ct.Structure):
    """fa_attention_backward_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("forward", ct.POINTER(AttentionArgs)),
        *_tensor("dout"),
        ("dlse", ct.c_void_p),
        *_tensor("dq"),
        *_tensor("dk"),
        *_tensor("dv"),
        *_score_tensor("dbias"),
        ("dsinks", ct.c_void_p),
        ("accumulate", ct.c_int32),
        ("reserved", ct.c_int32),
    ]


@_checked
class KVCacheArgs(ct.Structure):
    """fa_kvcache_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("attention", ct.POINTER(AttentionArgs)),
        ("cache_dtype", ct.c_int32),
        ("cache_batch", ct.c_int32),
        ("cache_seqlens", ct.c_void_p),
        ("cache_batch_idx", ct.c_void_p),
        ("cache_leftpad", ct.c_void_p),
        ("block_table", ct.c_void_p),
        ("block_table_stride", ct.c_int64),
        *_tensor("k_scale"),
        *_tensor("v_scale"),
        ("page_size", ct.c_int32),
        ("seqlen_new", ct.c_int32),
        *_tensor("k_new"),
        *_tensor("v_new"),
        ("rotary_cos", ct.c_void_p),
        ("rotary_sin", ct.c_void_p),
        ("rotary_dtype", ct.c_int32),
        ("rotary_rows", ct.c_int32),
        ("rotary_dim", ct.c_int32),
        ("rotary_interleaved", ct.c_int32),
        ("tree_mask", ct.c_void_p),
        ("tree_batch_stride", ct.c_int64),
        ("tree_row_stride", ct.c_int64),
        ("tree_keys", ct.c_int32),
        ("batch_invariant", ct.c_int32),
        ("num_splits", ct.c_int32),
        ("programmatic", ct.c_int32),
        ("shared_prefix", ct.c_int32),
        ("reserved", ct.c_int32),
    ]


class AttentionPlan(ct.Structure):
    """fa_attention_plan."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("status", ct.c_int32),
        ("reserved", ct.c_int32),
        ("workspace_bytes", ct.c_size_t),
        ("kernel", ct.c_char * 32),
        ("variant", ct.c_char * 32),
        ("why_not", ct.c_char * 1472),
    ]


@_checked
class MergeArgs(ct.Structure):
    """fa_merge_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device", ct.c_int32),
        ("dtype", ct.c_int32),
        ("batch", ct.c_int32),
        ("nheads", ct.c_int32),
        ("headdim_v", ct.c_int32),
        ("reserved", ct.c_int32),
        ("seqlen", ct.c_int64),
        *_tensor("out_a"),
        *_tensor("out_b"),
        *_tensor("out"),
        ("lse_a", ct.c_void_p),
        ("lse_b", ct.c_void_p),
        ("lse", ct.c_void_p),
    ]


@_checked
class QuantizeArgs(ct.Structure):
    """fa_quantize_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device", ct.c_int32),
        ("dtype", ct.c_int32),
        ("batch", ct.c_int32),
        ("nheads", ct.c_int32),
        ("headdim", ct.c_int32),
        ("hadamard", ct.c_int32),
        ("seqlen", ct.c_int64),
        ("seed", ct.c_uint64),
        *_tensor("x"),
        *_tensor("out"),
        ("descale", ct.c_void_p),
    ]


_Struct = TypeVar("_Struct", bound=ct.Structure)


def new(kind: type[_Struct]) -> _Struct:
    """A new struct with its size set and all else zero, which always means the default."""
    struct = kind()
    struct.struct_size = ct.sizeof(kind)  # type: ignore[attr-defined]
    return struct


class Hole(ct.Structure):
    """fa_hole."""

    _fields_ = [("byte", ct.c_int32), ("bytes", ct.c_int32), ("value", ct.c_int32)]


class Call(ct.Structure):
    """fa_call."""

    _fields_ = [
        ("operation", ct.c_int32),
        ("reserved", ct.c_int32),
        ("image", ct.c_void_p),
        ("image_bytes", ct.c_size_t),
        ("holes", ct.c_void_p),
        ("hole_count", ct.c_int32),
        ("value_count", ct.c_int32),
    ]


# fa_operation, from 1 on: the functions fa_<name> that take one struct and a stream.
OPERATIONS = (
    *("attention_forward", "attention_backward", "kvcache_attention", "attention_merge", "quantize_fp8"),
    *("rms_norm", "rope", "swiglu", "sample", "linear"),
    *("w4_quantize", "w4_dequantize", "w4_pack", "w4_linear", "w4_linear_chain"),
    *("distributed_forward", "distributed_backward", "distributed_decode", "distributed_merge"),
)
