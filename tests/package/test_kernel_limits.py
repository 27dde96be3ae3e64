"""The tables of what each kernel takes are those of the library."""

import ctypes

import kernel_limits
import pytest

import flash_attn_minimal as fa
from flash_attn_minimal._core import library

LINES = kernel_limits.lines(library.load())


@pytest.mark.skipif(not kernel_limits.PAGE.is_file(), reason="the pages are not beside the tests")
def test_the_page_is_up_to_date():
    assert kernel_limits.PAGE.read_text() == kernel_limits.page_with(kernel_limits.tables(library.load())), (
        "python tests/kernel_limits.py writes the tables again"
    )


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
