"""One name, one kernel: every __global__ function belongs to a kernel that can be forced, or to an operation with only
one kernel."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest
import sample_calls
from conftest import ROOT

import flash_attn_minimal as fa

# The kernel of a file with __global__ functions is the one that the file, or its folder, is named after, in the table
# of the folder above.
# Folder -> (table, prefix of the kernel's name before the file's name).
TABLES = {
    "attention/forward": ("forward", ""),
    "attention/split": ("forward", ""),
    "attention/decode": ("forward", "decode_"),
    "attention/backward": ("backward", ""),
    "transformer/linear": ("linear", ""),
    "transformer/w4": ("w4_linear", ""),
}
# The other files: the rows that launch them, or the C functions of an operation that has one kernel on a GPU, or all of
# whose kernels launch the file. A kernel that no call can be made to run is not allowed, because no test could reach
# it.
ROWS = {
    "flash_attn_minimal.cu": {"forward": ["minimal"]},
    "attention/forward/mma_sm80/kernel.cuh": {"forward": ["mma_sm80", "mma_tf32_sm80", "mma_float32_sm80"]},
    "attention/forward/fp8_sm90/kernel.cuh": {"forward": ["fp8_sm90", "fp8_fast_sm90"]},
    "attention/decode/lanes/kernel.cuh": {"forward": ["decode_lanes_sm80", "decode_lanes_cluster_sm90"]},
    "attention/decode/combine.cu": {
        "forward": [
            *("decode_split_sm80", "decode_wide_sm80", "decode_ring_sm90", "decode_lanes_sm80"),
            *("decode_prefix_sm80", "decode_prefix_sm90"),
        ]
    },
    "attention/decode/common/sharing.cu": {"forward": ["decode_prefix_sm80", "decode_prefix_sm90"]},
    "attention/decode/mla_sm90/merge.cuh": {"forward": ["decode_mla_sm90"]},
    "attention/backward/mma_sm80/side.cuh": {"backward": ["mma_sm80"]},
    "attention/backward/wgmma_sm90/rows.cu": {"backward": ["wgmma_sm90", "wgmma_pair_sm90"]},
    "attention/backward/wgmma_sm90/walk_parts.cu": {"backward": ["wgmma_sm90", "wgmma_pair_sm90"]},
    "attention/common/interval_bounds.cu": {
        "forward": ["mma_sm80", "mma_tf32_sm80", "wgmma_sm90"],
        "backward": ["wgmma_sm90"],
    },
    "attention/common/bias_copy.cu": {"forward": ["wgmma_sm90"], "backward": ["wgmma_sm90"]},
    "attention/common/seen_blocks.cu": {"forward": ["wgmma_sm90"], "backward": ["wgmma_sm90"]},
    "attention/backward/wgmma_sm90/interval_order.cu": {"backward": ["wgmma_sm90", "wgmma_pair_sm90"]},
    "attention/backward/wgmma_sm90/masked_tiles.cu": {"backward": ["wgmma_sm90", "wgmma_pair_sm90"]},
    "attention/backward/delta.cu": {
        "backward": ["simple", "mma_wide_sm80", "mma_float32_sm80", "wgmma_float32_sm90", "wgmma_float32_wide_sm90"]
    },
    "attention/common/large_rows.cuh": {"backward": ["mma_wide_sm80"]},  # and key_sums of fa_attention_forward
    "attention/backward/scores.cu": "fa_attention_backward",
    "attention/decode/append.cu": "fa_kvcache_attention",
    "attention/statistics/key_sums.cu": "fa_attention_forward",
    "attention/statistics/key_sums_sm80.cu": "fa_attention_forward",
    "attention/statistics/max_score.cu": "fa_attention_forward",
    "attention/forward/merge.cu": "fa_attention_merge",
    "attention/forward/quantize_fp8.cu": "fa_quantize_fp8",
    "distributed/rows.cu": ["fa_distributed_forward", "fa_distributed_backward", "fa_distributed_decode"],
    "transformer/ops/rmsnorm.cu": "fa_rms_norm",
    "transformer/ops/rope.cu": "fa_rope",
    "transformer/ops/swiglu.cu": "fa_swiglu",
    "transformer/ops/sampling.cu": "fa_sample",
    "transformer/w4/quantize_w4.cu": ["fa_w4_quantize", "fa_w4_dequantize", "fa_w4_pack"],
    "transformer/w4/wgmma_w4_sm90/few.cuh": {"w4_linear": ["wgmma_w4_few_sm90"]},
    "transformer/w4/round_x.cu": {"w4_linear": ["wgmma_w4_sm90", "wgmma_w4_few_sm90", "few_w4_sm90", "mma_w4"]},
    "transformer/w4/chain_w4_sm90.cu": {"w4_linear_chain": ["chain_w4_sm90"]},
}
OPTIONAL = {"cute_sm90"}  # built on demand: -DFLASH_ATTN_CUTE=ON
HOST = {"w4_linear_chain": {"one_by_one"}}  # launches the kernels of another table


FILES = {
    str(file.relative_to(ROOT / "cuda"))
    for file in (ROOT / "cuda").rglob("*.cu*")
    if re.search(r"^\s*(?:template.*\n)?__global__", file.read_text(), re.MULTILINE)
}


def room_and_name(file: str) -> tuple[str, str]:
    """ROOM/NAME.cu, or ROOM/NAME/kernel.cuh."""
    path = PurePosixPath(file)
    kernel = path.parent if path.stem == "kernel" else path.with_suffix("")
    return str(kernel.parent), kernel.name


def rows_of(table: str, files: set[str] = FILES) -> set[str]:
    """The kernels of one table that have a file with __global__ functions."""
    places = [ROWS[file] for file in files & set(ROWS)]
    found = {name for place in places if isinstance(place, dict) for name in place.get(table, ())}
    for file in files - set(ROWS):
        room, name = room_and_name(file)
        its_table, prefix = TABLES.get(room, ("", ""))
        if its_table == table:
            found.add(prefix + name)
    return found


def kernels_of(file: str) -> list[tuple[str, str]]:
    """(table, name) of the kernels that a file with __global__ functions belongs to."""
    return [(table, name) for table in fa.kernel_tables() for name in rows_of(table, {file})]


def gpu_kernels(table: str) -> set[str]:
    return {kernel["name"] for kernel in fa.kernel_tables()[table] if kernel["device"] == "cuda"}


def test_every_global_function_belongs_to_a_row():
    assert set(ROWS) <= FILES
    assert all(room_and_name(file)[0] in TABLES for file in FILES - set(ROWS))
    registries = "".join(file.read_text() for file in (ROOT / "cuda/api").rglob("*.cpp"))
    strangers = {name for table in fa.kernel_tables() for name in rows_of(table) if f'"{name}"' not in registries}
    assert not strangers, "these files are not named after a kernel: add them to ROWS"


@pytest.mark.parametrize("table", fa.kernel_tables())
def test_every_row_has_a_global_function(table):
    """Every row has a __global__ function. Every row that is named here exists, in a build that has the GPU kernels."""
    rows, named = gpu_kernels(table), rows_of(table)
    assert rows <= named | HOST.get(table, set())
    if {"wgmma_sm90", "mma_sm80"} <= {kernel["name"] for kernel in fa.kernels()}:
        assert named - OPTIONAL <= rows


@pytest.mark.parametrize("table", fa.kernel_tables())
def test_every_row_has_a_sample_call(table):
    """The sanitizers and the first calls run only the calls of tests/sample_calls.py."""
    assert gpu_kernels(table) <= set(sample_calls.names("cuda"))


@pytest.mark.parametrize("table", fa.kernel_tables())
def test_every_row_has_a_line_in_the_documents(table):
    pages = (ROOT / "ARCHITECTURE.md").read_text() + (ROOT / "cuda/transformer/README.md").read_text()
    lines = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", pages, re.MULTILINE))))
    assert gpu_kernels(table) - HOST.get(table, set()) <= lines


def test_no_body_is_left_out_in_silence():
    """A kernel that is launched on a GPU for which it is not compiled must trap. A body that only returns would look
    like a result, as once in a build for sm_86 that ran on sm_87."""
    silent = []
    for file in FILES:
        for block in re.findall(
            r"#if defined\(__CUDA_ARCH__\)\n(.*?)#endif", (ROOT / "cuda" / file).read_text(), re.DOTALL
        ):
            silent += [file for _ in re.findall(r"return;", block)][block.count("__trap();") :]
    assert not silent


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
    headers = (ROOT / "cuda").glob("*.h")
    assert any(re.search(rf"\b{function}\(", header.read_text()) for header in headers)
