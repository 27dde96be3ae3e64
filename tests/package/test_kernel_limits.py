"""The tables of what each kernel takes are those of the library."""

import ctypes
import json
import re

import kernel_limits
import pytest
from conftest import ROOT

import flash_attn_minimal as fa
from flash_attn_minimal._core import library

LINES = kernel_limits.lines(library.load())


@pytest.mark.skipif(not kernel_limits.PAGE.is_file(), reason="the pages are not beside the tests")
def test_the_page_is_up_to_date():
    assert kernel_limits.PAGE.read_text() == kernel_limits.page_with(kernel_limits.tables(library.load())), (
        "python tests/kernel_limits.py writes the tables again"
    )


@pytest.mark.skipif(not kernel_limits.PAGE.is_file(), reason="the pages are not beside the tests")
def test_the_page_of_masks_names_the_kernels_that_take_them():
    masks = {"startend_row_indices", "block_mask"}
    takes = {"forward": set(), "backward": set()}
    for table, name, _, device, *rest in LINES:
        if table in takes and device != "CPU" and not masks & set(rest[2].split(", ")):
            takes[table].add(name)
    row = re.search(r"^\| GPU \|(.*)\|(.*)\|$", (ROOT / "docs/masks.md").read_text(), flags=re.MULTILINE)
    named = [set(re.findall(r"`(\w+)`", cell)) for cell in row.groups()]
    assert named == [takes["forward"], takes["backward"]]


def test_every_kernel_of_the_build_has_a_line():
    built = {(table, name, device == "CPU") for table, name, is_built, device, *_ in LINES if is_built == "1"}
    tables = fa.kernel_tables().items()
    assert built == {(table, row["name"], row["device"] == "cpu") for table, rows in tables for row in rows}


def test_kernels_that_the_build_lacks_have_a_line_too():
    assert {"wgmma_sm90", "mma_sm80", "minimal", "decode_ring_sm90"} <= {name for _, name, *_ in LINES}


def test_a_short_buffer_gets_the_beginning():
    whole = library.load().fa_kernel_limits(None, 0)
    text = ctypes.create_string_buffer(b"x" * 20, 20)
    assert library.load().fa_kernel_limits(text, 10) == whole
    assert text.raw == b"forward\td\0" + b"x" * 10


BENCHMARKS = ROOT / "docs/benchmarks"
# Rows of these suites name their kernel; the others are what a call gets by default.
NAMED = ("ladder", "backward_ladder", "mma", "backward_mma", "languages")
RUNGS = (
    "naive",
    "minimal",
    "simple",
    "cute_sm90",
)  # these are there to be read, and to serve what no other kernel takes
OLD_NAMES = {"mla_sm90": "decode_mla_sm90"}
TABLES = {
    "fwd": "forward", "decode": "forward", "bwd": "backward", "w4": "w4_linear", "matvec": "linear",
    "block": "w4_linear_chain",  # a row names the kernels of all chains of the block
}  # fmt: skip
UNPUBLISHED = {  # a published row takes its kernel off this list
    ("forward", "float32_sm80"),  # what GPUs with slow tensor cores get, none of which was there to measure
}


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the tables are not beside the tests")
def test_kernels_of_a_gpu_have_published_rows_by_default():
    published = set()
    for path in BENCHMARKS.rglob("*.json"):
        run = json.loads(path.read_text())
        if path.stem not in NAMED and not any(x in run.get("command", "") for x in ("--kernel", "FLASH_ATTN_")):
            rows = [row for row in run.get("rows", []) if row.get("system") == "ours" and "kernel" in row]
            for row in rows:
                names = (row["kernel"] or "").split(", ")
                published |= {(TABLES.get(row["pass"]), OLD_NAMES.get(name, name)) for name in names}
    kernels = {(table, name) for table, name, _, device, *_ in LINES if device != "CPU" and name not in RUNGS}
    assert len(kernels) > 20 and kernels - published == UNPUBLISHED
