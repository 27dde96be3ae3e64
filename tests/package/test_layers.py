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
    "common": [],
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
    "api/kernel_limits.cpp": ["api/attention", "api/transformer", "flash_attn_transformer.h"],
    "api/calls.cpp": [
        *("api/common", "flash_attn.h", "flash_attn_transformer.h", "flash_attn_distributed.h", "cpu/common")
    ],
    "api/xla_ffi.h": [],
    "api/xla_ffi.cpp": ["api/xla_ffi.h", "api/common", "flash_attn_transformer.h"],
    "tvm_ffi": ["flash_attn.h"],
    "flash_attn_distributed.h": ["flash_attn.h"],
    "distributed": ["api/common", "flash_attn_distributed.h", "flash_attn.h", "cpu/common", *KERNELS],
    "test_flash_attn.cu": ["flash_attn.h", "flash_attn_distributed.h"],
}
# A kernel's folder is its own. A kernel that is built on another one includes from that one's folder, too.
BUILT_ON = {
    "attention/forward/wgmma_wide_sm90.cu": "attention/forward/wgmma_sm90",
    "attention/split/wgmma_split_sm90": "attention/forward/wgmma_sm90",
    "attention/decode/cluster_sm90": "attention/decode/lanes",
    "attention/decode/prefix_sm80": "attention/decode/split_sm80",
    "attention/split/decode_prefix_sm90": "attention/split/wgmma_split_sm90",
    "attention/backward/wgmma_pair_sm90": "attention/backward/wgmma_sm90",
}
ROOMS = ("attention/forward", "attention/decode", "attention/split", "attention/backward", "transformer/w4")
FILES = sorted(str(file.relative_to(CUDA)) for file in CUDA.rglob("*") if file.suffix in (".h", ".cuh", ".cu", ".cpp"))


def inside(file, part):
    return file == part or file.startswith(part + "/")


def part_of(file):
    return max((part for part in BELOW if inside(file, part)), key=len, default=None)


def included(file):
    return re.findall(r'^\s*#\s*include "([^"]+)"', (CUDA / file).read_text(), re.MULTILINE)


def folder_of(file):
    """The folder of a kernel of several files: ROOM/KERNEL."""
    path = file.split("/")
    return "/".join(path[:3]) if "/".join(path[:2]) in ROOMS and len(path) > 3 and path[2] != "common" else None


@pytest.mark.skipif(not FILES, reason="the sources are not beside the tests")
def test_every_file_includes_only_what_lies_below_it():
    wrong = []
    for file in FILES:
        part = part_of(file)
        assert part, f"cuda/{file} belongs to no part"
        for name in included(file):
            if file == "test_flash_attn.cu" and name.startswith("native/"):
                continue  # the tests' own folder
            allowed = [part, *BELOW[part]]
            if name not in FILES or not any(inside(name, room) for room in allowed):
                wrong.append(f"cuda/{file} includes {name}; it may include {', '.join(allowed)}")
    assert not wrong, "\n".join(wrong)


def test_what_others_include_is_there():
    """The variants of the ladder and the native tests are not part of every build."""
    missing = []
    for file in [
        *(ROOT / "ladder").rglob("*.[ch]*"),
        *(ROOT / "tests/native").iterdir(),
        *(ROOT / "examples").rglob("*.c"),
    ]:
        if file.suffix == ".pyc":
            continue
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', file.read_text(), re.MULTILINE):
            if not any(
                (place / name).is_file() for place in (file.parent, CUDA, ROOT, ROOT / "tests", ROOT / "tests/native")
            ):
                missing.append(f"{file.relative_to(ROOT)} includes {name}")
    assert not missing, "\n".join(missing)


def test_the_parts_have_no_circle():
    """The graph of BELOW has no cycle."""

    def below(part, path=()):
        assert part not in path, " -> ".join([*path, part])
        for other in BELOW[part] if part in BELOW else [p for p in BELOW if inside(p, part)]:
            below(other, (*path, part))

    for part in BELOW:
        below(part)


def test_a_kernel_includes_its_own_files():
    """No kernel includes from another kernel's folder, unless it is built on that kernel. cuda/api reads plans, which
    are headers for the host."""
    wrong = []
    for file in FILES:
        for name in included(file):
            owner = folder_of(name)
            at_home = owner is None or inside(file, owner) or BUILT_ON.get(folder_of(file) or file) == owner
            if not at_home and not (file.startswith("api/") and name.endswith(".h")):
                wrong.append(f"cuda/{file} includes {name}, a part of the kernel in cuda/{owner}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_a_room_is_a_kernel():
    folders = {folder for folder in map(folder_of, FILES) if folder}
    assert len(folders) > 10
    for folder in folders:
        assert {f"{folder}/kernel.cu", f"{folder}/kernel.cuh"} & set(FILES), (
            f"cuda/{folder} has no kernel.cu or kernel.cuh"
        )
    assert set(BUILT_ON.values()) <= folders


def test_the_map_says_what_the_checks_allow():
    """The table of ARCHITECTURE.md has the rooms of cuda/, and for each the rooms that BELOW allows."""
    room = lambda path: path.split("/")[0]  # noqa: E731
    allowed = {room(part): set() for part in BELOW}
    for part, below in BELOW.items():
        allowed[room(part)] |= {room(other) for other in below}
    rows = re.findall(r"^\| (`cuda/[^|]+) \| ([^|]+) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    seen = []
    for names, may_include in rows:
        rooms = re.findall(r"`cuda/([^`]+)`", names)
        seen += rooms
        wanted = set().union(*(allowed[name] for name in rooms)) - set(rooms)
        assert set(re.findall(r"`([^`]+)`", may_include)) == wanted, names
    assert sorted(seen) == sorted(allowed)
