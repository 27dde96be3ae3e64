"""Mirrors the functions around attention in the C ABI: norms, rotary embedding, activations, products, 4-bit weights,
sampling. The structs are the header's with nested fields written flat, as in _core/structs.py.
"""

from __future__ import annotations

import ctypes as ct
import functools

from .._core import library
from .._core.library import declare, declare_launch, raise_on_error
from .._core.structs import AttentionPlan, _checked, _tensor

W4_FORMATS = {"nvfp4": 1, "mxfp4": 2, "int4": 3}


def _matrix(name: str) -> list[tuple[str, type]]:
    return [(f"{name}_data", ct.c_void_p), (f"{name}_row_stride", ct.c_int64)]


def _int32(*names: str) -> list[tuple[str, type]]:
    return [(name, ct.c_int32) for name in names]


def _w4_weight(name: str) -> list[tuple[str, type]]:
    integers = [(f"{name}_{field}", ct.c_int32) for field in ("format", "out_features", "in_features", "reserved")]
    return integers + [(f"{name}_{field}", ct.c_void_p) for field in ("codes", "scales", "tensor_scale")]


@_checked
class RmsNormArgs(ct.Structure):
    """fa_rms_norm_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "weight_dtype", "residual_dtype", "out_dtype", "dim"),
        ("rows", ct.c_int64),
        *_matrix("x"),
        *_matrix("residual"),
        *_matrix("out"),
        ("weight", ct.c_void_p),
        ("eps", ct.c_float),
        *_int32("programmatic", "num_threads", "reserved"),
    ]


@_checked
class RopeArgs(ct.Structure):
    """fa_rope_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "table_dtype", "batch", "nheads", "headdim", "rotary_dim"),
        *_int32("interleaved", "inverse", "programmatic"),
        ("seqlen", ct.c_int64),
        *_tensor("x"),
        *_tensor("out"),
        ("cos", ct.c_void_p),
        ("sin", ct.c_void_p),
        ("table_row_stride", ct.c_int64),
        ("table_rows", ct.c_int64),
        ("positions", ct.c_void_p),
        *_int32("per_token", "num_threads"),
    ]


@_checked
class SwigluArgs(ct.Structure):
    """fa_swiglu_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "out_dtype", "dim"),
        ("rows", ct.c_int64),
        *_matrix("gate_up"),
        *_matrix("out"),
        *_int32("programmatic", "num_threads"),
    ]


@_checked
class SampleArgs(ct.Structure):
    """fa_sample_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "batch", "vocab"),
        *_matrix("logits"),
        ("out", ct.c_void_p),
        ("temperature", ct.c_float),
        ("top_p", ct.c_float),
        *_int32("top_k", "programmatic"),
        ("seed", ct.c_uint64),
        ("offset", ct.c_uint64),
        ("seeds", ct.c_void_p),
        ("step", ct.c_void_p),
        ("step_stride", ct.c_int64),
        *_int32("num_threads", "reserved"),
    ]


@_checked
class LinearArgs(ct.Structure):
    """fa_linear_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "weight_dtype", "bias_dtype", "norm_dtype", "residual_dtype", "out_dtype"),
        *_int32("in_features", "out_features", "swiglu"),
        ("rows", ct.c_int64),
        *_matrix("x"),
        *_matrix("weight"),
        *_matrix("residual"),
        *_matrix("out"),
        ("bias", ct.c_void_p),
        ("norm_weight", ct.c_void_p),
        ("eps", ct.c_float),
        *_int32("programmatic", "num_threads", "reserved"),
        ("kernel", ct.c_char_p),
    ]


@_checked
class W4QuantizeArgs(ct.Structure):
    """fa_w4_quantize_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "search", "num_threads"),
        *_matrix("w"),
        *_w4_weight("out"),
    ]


@_checked
class W4DequantizeArgs(ct.Structure):
    """fa_w4_dequantize_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "out_dtype", "num_threads", "reserved"),
        *_w4_weight("weight"),
        *_matrix("out"),
    ]


@_checked
class W4PackArgs(ct.Structure):
    """fa_w4_pack_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "pair", "num_threads"),
        *_w4_weight("weight"),
        ("packed", ct.c_void_p),
        ("packed_bytes", ct.c_int64),
    ]


@_checked
class W4LinearArgs(ct.Structure):
    """fa_w4_linear_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *_int32("device", "dtype", "compute_dtype", "format", "out_features", "in_features", "swiglu"),
        *_int32("bias_dtype", "norm_dtype", "residual_dtype", "out_dtype"),
        ("eps", ct.c_float),
        ("rows", ct.c_int64),
        *_matrix("x"),
        *_matrix("residual"),
        *_matrix("out"),
        ("packed", ct.c_void_p),
        ("bias", ct.c_void_p),
        ("norm_weight", ct.c_void_p),
        *_int32("programmatic", "num_threads"),
        ("kernel", ct.c_char_p),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_size_t),
    ]


@_checked
class W4LinearChainArgs(ct.Structure):
    """fa_w4_linear_chain_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("products", ct.POINTER(W4LinearArgs)),
        *_int32("count", "ahead_count"),
        ("ahead", ct.c_void_p * 4),
        ("ahead_bytes", ct.c_int64 * 4),
        ("kernel", ct.c_char_p),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_size_t),
    ]


# The functions fa_<name> that take one struct and a stream.
SMALL_OPERATIONS = {
    "rms_norm": RmsNormArgs,
    "rope": RopeArgs,
    "swiglu": SwigluArgs,
    "sample": SampleArgs,
    "linear": LinearArgs,
}
W4_OPERATIONS = {
    "w4_quantize": W4QuantizeArgs,
    "w4_dequantize": W4DequantizeArgs,
    "w4_pack": W4PackArgs,
    "w4_linear": W4LinearArgs,
    "w4_linear_chain": W4LinearChainArgs,
}


@functools.cache
def load() -> ct.CDLL:
    """The library that the core loads, with the functions of this module typed too."""
    lib = library.load()
    for name, struct in (SMALL_OPERATIONS | W4_OPERATIONS).items():
        declare_launch(lib, f"fa_{name}", struct)
    for name in ("linear", "w4_linear", "w4_linear_chain"):
        struct = (SMALL_OPERATIONS | W4_OPERATIONS)[name]
        declare(lib, f"fa_{name}_query", ct.c_int, ct.POINTER(struct), ct.POINTER(AttentionPlan))
    sizes = declare(lib, "fa_w4_packed_bytes", ct.c_int, *[ct.c_int32] * 4, ct.POINTER(ct.c_int64))
    sizes.errcheck = raise_on_error
    return lib
