"""Mirrors the functions around attention in the C ABI: norms, rotary embedding, activations, products, 4-bit weights,
sampling. The structs are the header's with nested fields written flat, as in _core/structs.py.
"""

from __future__ import annotations

import ctypes as ct
import functools

from .._core import library
from .._core.library import declare, declare_launch, raise_on_error
from .._core.structs import AttentionPlan, struct

W4_FORMATS = {"nvfp4": 1, "mxfp4": 2, "int4": 3}


def _weight(name: str) -> tuple[str, str]:
    """The fields of a 4-bit weight."""
    integers = [f"{name}_{field}" for field in ("format", "out_features", "in_features", "reserved")]
    return " ".join(["int32", *integers]), f"pointer {name}_codes {name}_scales {name}_tensor_scale"


RmsNormArgs = struct(
    "fa_rms_norm_args",
    "int32 device dtype weight_dtype residual_dtype out_dtype dim",
    "int64 rows",
    "matrix x residual out",
    "pointer weight",
    "float eps",
    "int32 programmatic num_threads reserved",
)

RopeArgs = struct(
    "fa_rope_args",
    "int32 device dtype table_dtype batch nheads headdim rotary_dim interleaved inverse programmatic",
    "int64 seqlen",
    "tensor x out",
    "pointer cos sin",
    "int64 table_row_stride table_rows",
    "pointer positions",
    "int32 per_token num_threads",
)

SwigluArgs = struct(
    "fa_swiglu_args",
    "int32 device dtype out_dtype dim",
    "int64 rows",
    "matrix gate_up out",
    "int32 programmatic num_threads",
)

SampleArgs = struct(
    "fa_sample_args",
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

LinearArgs = struct(
    "fa_linear_args",
    "int32 device dtype weight_dtype bias_dtype norm_dtype residual_dtype out_dtype",
    "int32 in_features out_features swiglu",
    "int64 rows",
    "matrix x weight residual out",
    "pointer bias norm_weight",
    "float eps",
    "int32 programmatic num_threads reserved",
    "text kernel",
)

W4QuantizeArgs = struct("fa_w4_quantize_args", "int32 device dtype search num_threads", "matrix w", *_weight("out"))

W4DequantizeArgs = struct(
    "fa_w4_dequantize_args", "int32 device out_dtype num_threads reserved", *_weight("weight"), "matrix out"
)

W4PackArgs = struct(
    "fa_w4_pack_args", "int32 device dtype pair num_threads", *_weight("weight"), "pointer packed", "int64 packed_bytes"
)

W4LinearArgs = struct(
    "fa_w4_linear_args",
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

W4LinearChainArgs = struct(
    "fa_w4_linear_chain_args",
    ("products", ct.POINTER(W4LinearArgs)),
    "int32 count ahead_count",
    ("ahead", ct.c_void_p * 4),
    ("ahead_bytes", ct.c_int64 * 4),
    "text kernel",
    "pointer workspace",
    "size workspace_bytes",
)

# The functions fa_<name> that take one struct, fa_<name>_args, and a stream.
_STRUCTS = RmsNormArgs, RopeArgs, SwigluArgs, SampleArgs, LinearArgs, W4QuantizeArgs, W4DequantizeArgs, W4PackArgs
OPERATIONS = {args.__name__[3:-5]: args for args in (*_STRUCTS, W4LinearArgs, W4LinearChainArgs)}


@functools.cache
def load() -> ct.CDLL:
    """The library that the core loads, with the functions of this module typed too."""
    lib = library.load()
    for name, args in OPERATIONS.items():
        declare_launch(lib, f"fa_{name}", args)
    for name in ("linear", "w4_linear", "w4_linear_chain"):
        declare(lib, f"fa_{name}_query", ct.c_int, ct.POINTER(OPERATIONS[name]), ct.POINTER(AttentionPlan))
    sizes = declare(lib, "fa_w4_packed_bytes", ct.c_int, *[ct.c_int32] * 4, ct.POINTER(ct.c_int64))
    sizes.errcheck = raise_on_error
    return lib
