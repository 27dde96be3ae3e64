"""docs/reliability.md agrees with the reports beside it."""

import json

import pytest
from reliability_table import PAGE, page, report, rows


def test_the_table_is_that_of_the_reports():
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", ["fuzz_cuda", "fuzz_cpu"])
def test_the_figures_are_those_of_the_reports(name):
    campaign, text = report(name), PAGE.read_text()
    count = len(campaign["findings"])
    assert f"**{campaign['cases']:,} calls, {count} finding{'s' if count != 1 else ''}**" in text
    assert campaign["commit"] in text and f"seed {campaign['about']['seed']}" in text


def test_what_the_tools_report_is_explained():
    for row in rows("sanitizers", "call", "tool"):
        if row["errors"] != 0:
            assert f"`{row['call']}`, {row['tool']}" in PAGE.read_text(), json.dumps(row)
