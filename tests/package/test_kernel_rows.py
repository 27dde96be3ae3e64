"""One name, one kernel: every __global__ function belongs to a kernel that can be forced, or to a lone operation."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

import flash_attn_minimal as fa

# Which rows of which table launch the __global__ functions of a file; the files of an operation that has one kernel on
# a GPU name its C function. A kernel that no call can be made to take has no place here, as no test could aim at it.
ROWS = {
    "flash_attn_minimal.cu": {"forward": ["minimal"]},
    "attention/forward/naive.cu": {"forward": ["naive"]},
    "attention/forward/mma_sm80.cuh": {"forward": ["mma_sm80", "mma_tf32_sm80"]},
    "attention/forward/wgmma_sm90.cuh": {"forward": ["wgmma_sm90"]},
    "attention/forward/fp8_sm90.cuh": {"forward": ["fp8_sm90", "fp8_fast_sm90"]},
    "attention/decode/split_sm80.cuh": {"forward": ["decode_split_sm80"]},
    "attention/decode/ring_sm90.cuh": {"forward": ["decode_ring_sm90"]},
    "attention/decode/cluster_sm90.cuh": {"forward": ["decode_cluster_sm90"]},
    "attention/decode/lanes.cuh": {"forward": ["decode_lanes_sm80", "decode_lanes_cluster_sm90"]},
    "attention/decode/combine.cu": {"forward": ["decode_split_sm80", "decode_ring_sm90", "decode_lanes_sm80"]},
    "attention/decode/mla_sm90.cu": {"forward": ["mla_sm90"]},
    "attention/backward/simple.cu": {"backward": ["simple"]},
    "attention/backward/mma_sm80.cuh": {"backward": ["mma_sm80"]},
    "attention/backward/mma_sm80_side.cuh": {"backward": ["mma_sm80"]},
    "attention/backward/mma_sm80_dq.cu": {"backward": ["mma_sm80"]},
    "attention/backward/wgmma_sm90.cuh": {"backward": ["wgmma_sm90"]},
    "attention/backward/wgmma_pair_sm90.cuh": {"backward": ["wgmma_pair_sm90"]},
    "attention/backward/wgmma_sm90_rows.cu": {"backward": ["wgmma_sm90", "wgmma_pair_sm90"]},
    "attention/backward/delta.cu": {"backward": ["simple"]},
    "attention/backward/scores.cu": {"backward": ["simple", "mma_sm80", "wgmma_sm90", "wgmma_pair_sm90"]},
    "attention/decode/append.cu": "fa_kvcache_attention",
    "attention/forward/merge.cu": "fa_attention_merge",
    "attention/forward/quantize_fp8.cu": "fa_quantize_fp8",
    "transformer/ops/rmsnorm.cu": "fa_rms_norm",
    "transformer/ops/rope.cu": "fa_rope",
    "transformer/ops/swiglu.cu": "fa_swiglu",
    "transformer/ops/sampling.cu": "fa_sample",
    "transformer/linear/linear_small_sm80.cu": {"linear": ["linear_small_sm80"]},
    "transformer/linear/linear_mma_sm80.cu": {"linear": ["linear_mma_sm80"]},
    "transformer/linear/linear_gemv_sm80.cu": {"linear": ["linear_gemv_sm80"]},
    "transformer/w4/quantize_w4.cu": ["fa_w4_quantize", "fa_w4_dequantize", "fa_w4_pack"],
    "transformer/w4/small_w4.cu": {"w4_linear": ["small_w4"]},
    "transformer/w4/few_w4_sm90.cuh": {"w4_linear": ["few_w4_sm90"]},
    "transformer/w4/mma_w4.cuh": {"w4_linear": ["mma_w4"]},
    "transformer/w4/wgmma_w4_sm90.cuh": {"w4_linear": ["wgmma_w4_sm90"]},
    "transformer/w4/wgmma_w4_few_sm90.cuh": {"w4_linear": ["wgmma_w4_few_sm90"]},
    "transformer/w4/round_x.cu": {"w4_linear": ["wgmma_w4_sm90", "wgmma_w4_few_sm90", "few_w4_sm90", "mma_w4"]},
    "transformer/w4/chain_w4_sm90.cu": {"w4_linear_chain": ["chain_w4_sm90"]},
}
HOST = {"w4_linear_chain": {"one_by_one"}}  # launches the kernels of another table


def test_every_global_function_belongs_to_a_row():
    files = {
        str(file.relative_to(ROOT / "cuda"))
        for file in (ROOT / "cuda").rglob("*.cu*")
        if re.search(r"^\s*(?:template.*\n)?__global__", file.read_text(), re.MULTILINE)
    }
    assert files == set(ROWS)


@pytest.mark.parametrize("table", fa.kernel_tables())
def test_every_row_has_a_global_function(table):
    """And every row that is named here exists, in a build that has the GPU kernels."""
    rows = {kernel["name"] for kernel in fa.kernel_tables()[table] if kernel["device"] == "cuda"}
    named = {name for place in ROWS.values() if isinstance(place, dict) for name in place.get(table, ())}
    assert rows <= named | HOST.get(table, set())
    if {"wgmma_sm90", "mma_sm80"} <= {kernel["name"] for kernel in fa.kernels()}:
        assert named <= rows


def test_names_are_not_shared():
    for table, kernels in fa.kernel_tables().items():
        names = [kernel["name"] for kernel in kernels]
        assert len(names) == len(set(names)), table


@pytest.mark.parametrize(
    "function",
    [
        x
        for place in ROWS.values()
        if not isinstance(place, dict)
        for x in (place if isinstance(place, list) else [place])
    ],
)
def test_operations_with_one_kernel_are_exported(function):
    headers = (ROOT / "cuda/flash_attn.h", ROOT / "cuda/flash_attn_transformer.h")
    assert any(re.search(rf"\b{function}\(", header.read_text()) for header in headers)
