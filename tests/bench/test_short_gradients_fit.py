"""The numbers of short_gradients.h choose well among the times that they come from, and name what the header names."""

import re

import pytest
import short_gradients


@pytest.fixture(scope="module")
def rows():
    return short_gradients.load(short_gradients.DATA)


def test_regret(rows):
    assert len(rows) > 800 and short_gradients.regret(short_gradients.table_of_header(), rows) < 1.01


def test_no_single_kernel_is_as_good(rows):
    table = short_gradients.table_of_header()
    for kind in short_gradients.FEATURES:
        always = {key: [1.0 if key[0] == kind else 1e9] + [0.0] * 10 for key in table}
        assert short_gradients.regret(always, rows) > 1.02


def test_names():
    text = short_gradients.HEADER.read_text()
    struct = text.split("struct GradientTimes {")[1].split("};")[0]
    names = [name.strip() for line in re.findall(r"float ([^;]+);", struct) for name in line.split(",")]
    assert tuple(names) == short_gradients.NUMBERS
    assert all(len(row) == len(names) for row in short_gradients.table_of_header().values())
