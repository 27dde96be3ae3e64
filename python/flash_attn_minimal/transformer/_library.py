"""Mirrors the functions around attention in the C ABI: norms, rotary embedding, activations, products, 4-bit weights,
sampling. The structs are the header's with nested fields written flat, as in _core/structs.py.
"""

from __future__ import annotations

import ctypes as ct
import functools

from .._core import library
from .._core.library import declare, declare_launch, raise_on_error
from .._core.structs import AttentionPlan, _checked, sized

W4_FORMATS = {"nvfp4": 1, "mxfp4": 2, "int4": 3}


def _weight(name: str) -> tuple[str, str]:
    """The fields of a 4-bit weight."""
    integers = [f"{name}_{field}" for field in ("format", "out_features", "in_features", "reserved")]
    return " ".join(["int32", *integers]), f"pointer {name}_codes {name}_scales {name}_tensor_scale"


@_checked
class RmsNormArgs(ct.Structure):
    """fa_rms_norm_args."""

    _fields_ = sized(
        "int32 device dtype weight_dtype residual_dtype out_dtype dim",
        "int64 rows",
        "matrix x residual out",
        "pointer weight",
        "float eps",
        "int32 programmatic num_threads reserved",
    )


@_checked
class RopeArgs(ct.Structure):
    """fa_rope_args."""

    _fields_ = sized(
        "int32 device dtype table_dtype batch nheads headdim rotary_dim interleaved inverse programmatic",
        "int64 seqlen",
        "tensor x out",
        "pointer cos sin",
        "int64 table_row_stride table_rows",
        "pointer positions",
        "int32 per_token num_threads",
    )


@_checked
class SwigluArgs(ct.Structure):
    """fa_swiglu_args."""

    _fields_ = sized(
        "int32 device dtype out_dtype dim",
        "int64 rows",
        "matrix gate_up out",
        "int32 programmatic num_threads",
    )


@_checked
class SampleArgs(ct.Structure):
    """fa_sample_args."""

    _fields_ = sized(
        "int32 device dtype batch vocab",
        "matrix logits",
        "pointer out",
        "float temperature top_p",
        "int32 top_k programmatic",
        "uint64 seed offset",
        "pointer seeds step",
        "int64 step_stride",
        "int32 num_threads reserved",
    )


@_checked
class LinearArgs(ct.Structure):
    """fa_linear_args."""

    _fields_ = sized(
        "int32 device dtype weight_dtype bias_dtype norm_dtype residual_dtype out_dtype",
        "int32 in_features out_features swiglu",
        "int64 rows",
        "matrix x weight residual out",
        "pointer bias norm_weight",
        "float eps",
        "int32 programmatic num_threads reserved",
        "text kernel",
    )


@_checked
class W4QuantizeArgs(ct.Structure):
    """fa_w4_quantize_args."""

    _fields_ = sized(
        "int32 device dtype search num_threads",
        "matrix w",
        *_weight("out"),
    )


@_checked
class W4DequantizeArgs(ct.Structure):
    """fa_w4_dequantize_args."""

    _fields_ = sized(
        "int32 device out_dtype num_threads reserved",
        *_weight("weight"),
        "matrix out",
    )


@_checked
class W4PackArgs(ct.Structure):
    """fa_w4_pack_args."""

    _fields_ = sized(
        "int32 device dtype pair num_threads",
        *_weight("weight"),
        "pointer packed",
        "int64 packed_bytes",
    )


@_checked
class W4LinearArgs(ct.Structure):
    """fa_w4_linear_args."""

    _fields_ = sized(
        "int32 device dtype compute_dtype format out_features in_features swiglu",
        "int32 bias_dtype norm_dtype residual_dtype out_dtype",
        "float eps",
        "int64 rows",
        "matrix x residual out",
        "pointer packed bias norm_weight",
        "int32 programmatic num_threads",
        "text kernel",
        "pointer workspace",
        "size workspace_bytes",
    )


@_checked
class W4LinearChainArgs(ct.Structure):
    """fa_w4_linear_chain_args."""

    _fields_ = sized(
        ("products", ct.POINTER(W4LinearArgs)),
        "int32 count ahead_count",
        ("ahead", ct.c_void_p * 4),
        ("ahead_bytes", ct.c_int64 * 4),
        "text kernel",
        "pointer workspace",
        "size workspace_bytes",
    )


# The functions fa_<name> that take one struct and a stream.
OPERATIONS = {
    "rms_norm": RmsNormArgs,
    "rope": RopeArgs,
    "swiglu": SwigluArgs,
    "sample": SampleArgs,
    "linear": LinearArgs,
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
    for name, struct in OPERATIONS.items():
        declare_launch(lib, f"fa_{name}", struct)
    for name in ("linear", "w4_linear", "w4_linear_chain"):
        declare(lib, f"fa_{name}_query", ct.c_int, ct.POINTER(OPERATIONS[name]), ct.POINTER(AttentionPlan))
    sizes = declare(lib, "fa_w4_packed_bytes", ct.c_int, *[ct.c_int32] * 4, ct.POINTER(ct.c_int64))
    sizes.errcheck = raise_on_error
    return lib
