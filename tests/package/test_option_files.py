"""An option of the scores stands in few files besides the arithmetic of kernels: those of ARCHITECTURE.md's table."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("cuda", "python/flash_attn_minimal")
# Folders with the arithmetic of kernels, and adapters to packages that have such an option themselves.
APART = ("cuda/attention", "cuda/cpu", "python/flash_attn_minimal/integrations")
PARAMS = "cuda/attention/common/params.h"  # names an option in its own words: chunk, intervals, blocks
# Rows of kernels that quote an option when they refuse it, and an interface of PyTorch with an argument of this name.
QUOTING = ("cuda/api/attention/registry_", "python/flash_attn_minimal/torch/flex/")

pytestmark = pytest.mark.skipif(not (ROOT / "cuda").is_dir(), reason="the sources are not beside the tests")


def files_of_the_table():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.partition("## How to add an option of the scores")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d \| `([\w/.]+)` \|", section, re.MULTILINE)


def files_that_name(option):
    found = []
    for folder in PRODUCT:
        for file in sorted((ROOT / folder).rglob("*")):
            name = file.relative_to(ROOT).as_posix()
            if file.suffix not in (".h", ".cpp", ".cu", ".cuh", ".py") or name.startswith(APART):
                continue
            if re.search(rf"\b{option}\b", file.read_text()):
                found.append(name)
    return found


def test_a_number_touches_the_files_of_the_table():
    table = files_of_the_table()
    assert len(table) <= 8, table
    assert sorted([*files_that_name("attention_chunk"), PARAMS]) == sorted(table)


def test_an_array_touches_no_others():
    """The array is block_mask: calls over ranks do not take it, and it has no gradient."""
    beside = [name for name in files_that_name("block_mask") if name not in files_of_the_table()]
    assert [name for name in beside if not name.startswith(QUOTING)] == []
