"""The numbers of few_queries.h choose well among the times that they come from, and name what the header names."""

import re

import few_queries
import pytest


@pytest.fixture(scope="module")
def rows():
    return few_queries.load(few_queries.DATA)


def test_the_choice_costs_little(rows):
    assert len(rows) > 2000 and few_queries.regret(few_queries.table_of_header(), rows) < 1.05
    for kernel in ("decode_split_sm80", "mma_sm80"):  # one kernel for all calls is no choice
        alone = [times[kernel] / min(times.values()) for _, times in rows if kernel in times]
        assert sum(x > 1.2 for x in alone) > 0.2 * len(alone)


def test_the_header_has_the_kernels_and_numbers_of_the_fit():
    text = few_queries.HEADER.read_text()
    comments = re.findall(r"\{  // (\w+_sm\d+)", text)
    assert tuple(comments) == few_queries.KERNELS
    fields = text.split("struct FewTimes {")[1].split("};")[0]
    names = re.findall(r"\b([a-z_]+)\b(?=[,;])", re.sub(r"//.*", "", fields))
    assert tuple(names) == few_queries.NUMBERS
    source = (few_queries.ROOT / "cuda/api/attention/few_queries.cpp").read_text()
    assert tuple(re.findall(r'"(\w+_sm\d+)"', source)) == few_queries.KERNELS
