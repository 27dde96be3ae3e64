"""Includes go in one direction: a file of cuda/ includes only its own part and the parts below it, by their path from
cuda/."""

import re

import pytest
from conftest import ROOT

CUDA = ROOT / "cuda"
KERNELS = ["common", "device"]
# Part -> the parts below it, which it may include. The longest prefix of a file's path is its part.
BELOW = {
    "device": [],  # instructions and launches: nothing of attention
    "common": ["device"],
    "attention/common": KERNELS,
    "attention/kernels.h": ["attention/common", *KERNELS],
    "attention/forward": ["attention/common", "attention/kernels.h", *KERNELS],
    "attention/decode": ["attention/common", "attention/kernels.h", *KERNELS],
    "attention/statistics": ["attention/common", "attention/kernels.h", *KERNELS],
    "attention/split": ["attention/forward", "attention/decode", "attention/common", "attention/kernels.h", *KERNELS],
    "attention/backward": ["attention/common", "attention/kernels.h", *KERNELS],
    "flash_attn_minimal.cu": ["attention/common", "attention/kernels.h", *KERNELS],
    "transformer/common": KERNELS,
    "transformer/ops": ["transformer/common", *KERNELS],
    "transformer/linear": ["transformer/ops", "transformer/common", *KERNELS],
    "transformer/w4": ["transformer/ops", "transformer/common", *KERNELS],
    "cpu/common": ["common"],
    "cpu/attention": ["cpu/common", "attention", "common"],
    "cpu/transformer": ["cpu/common", "transformer", "common"],
    "cpu": ["cpu/attention", "cpu/transformer"],  # the tile kernels, one file for each instruction set
    "flash_attn.h": [],
    "flash_attn_transformer.h": ["flash_attn.h"],
    "api/common": ["flash_attn.h", "cpu/common", "common", "device"],
    "api/attention": ["api/common", "flash_attn.h", "attention", "cpu/attention", "cpu/common", "common"],
    "api/transformer": [
        *("api/common", "flash_attn_transformer.h", "transformer", "cpu/transformer", "cpu/common", "common")
    ],
    "api/calls.h": ["flash_attn_transformer.h"],
    "api/calls.cpp": ["api/calls.h", "api/common", "flash_attn_transformer.h", "cpu/common"],
    "api/xla_ffi.h": [],
    "api/xla_ffi.cpp": ["api/xla_ffi.h", "api/calls.h", "api/common", "flash_attn_transformer.h"],
    "flash_attn_distributed.h": ["flash_attn.h"],
    "distributed": ["api/common", "flash_attn_distributed.h", "flash_attn.h", "cpu/common", *KERNELS],
    "test_flash_attn.cu": ["flash_attn.h", "flash_attn_distributed.h"],
}
FILES = sorted(str(file.relative_to(CUDA)) for file in CUDA.rglob("*") if file.suffix in (".h", ".cuh", ".cu", ".cpp"))


def inside(file, part):
    return file == part or file.startswith(part + "/")


def part_of(file):
    return max((part for part in BELOW if inside(file, part)), key=len, default=None)


@pytest.mark.skipif(not FILES, reason="the sources are not beside the tests")
def test_every_file_includes_only_what_lies_below_it():
    wrong = []
    for file in FILES:
        part = part_of(file)
        assert part, f"cuda/{file} belongs to no part"
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', (CUDA / file).read_text(), re.MULTILINE):
            if file == "test_flash_attn.cu" and name.startswith("native/"):
                continue  # the tests' own folder
            allowed = [part, *BELOW[part]]
            if name not in FILES or not any(inside(name, room) for room in allowed):
                wrong.append(f"cuda/{file} includes {name}; it may include {', '.join(allowed)}")
    assert not wrong, "\n".join(wrong)


def test_the_parts_have_no_circle():
    """The graph of BELOW has no cycle."""

    def below(part, path=()):
        assert part not in path, " -> ".join([*path, part])
        for other in BELOW[part] if part in BELOW else [p for p in BELOW if inside(p, part)]:
            below(other, (*path, part))

    for part in BELOW:
        below(part)
