"""docs/reliability.md agrees with the reports beside it."""

import json
import re
import subprocess

import changed_kernels
import pytest
from reliability_table import PAGE, campaigns, page, report, rows

FILES = changed_kernels.test_layers.FILES


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


def commits():
    """(name of a report, commit) of every campaign."""
    for path in sorted(PAGE.with_suffix("").glob("*.json")):
        data = json.loads(path.read_text())
        for campaign in data.get("campaigns", [data]):
            if "commit" in campaign:
                yield path.name, campaign["commit"]


def test_every_campaign_has_its_commit():
    text = PAGE.read_text()
    assert len(list(commits())) > 30
    assert not [(name, commit) for name, commit in commits() if commit[:7] not in text or f"/{name})" not in text]


def test_the_page_names_the_last_campaign():
    last = [campaign for campaign in campaigns() if campaign["about"]["kernel"] is None][-1]
    said = re.search(r"The last one that ran all kernels is of ([\d-]+),\s+commit (\w+)", PAGE.read_text())
    assert said and said.groups() == (last["date"][:10], last["commit"])


def test_only_code_is_a_change():
    before = '#include "a/old.h"\n#pragma once\nint x;  // one\n/* of\n two */ float f();\n'
    after = '// new.h: moved\n#pragma once\n#include "b/new.h"\nint  x;\nfloat f();\n'
    assert changed_kernels.code(before) == changed_kernels.code(after) == "intx;floatf();"
    assert changed_kernels.code(before.replace("x", "y")) != changed_kernels.code(after)


def test_kernels_whose_code_has_changed(monkeypatch, capsys):
    """A header of one kernel marks that kernel, a header of all marks all, and nothing else is listed."""
    everything = {changed_kernels.code((changed_kernels.test_layers.CUDA / f).read_text()) for f in FILES}
    sources = changed_kernels.sources()
    own, all_of_them = "attention/decode/ring_sm90/attend.cuh", "device/launch.h"
    assert [kernel for kernel, files in sources.items() if own in files] == [("forward", "decode_ring_sm90")]
    edited = {changed_kernels.code((changed_kernels.test_layers.CUDA / f).read_text()) for f in (own, all_of_them)}
    monkeypatch.setattr(changed_kernels, "code_at", lambda commit: everything - edited)
    changed_kernels.main(["abc"])
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == f"since abc, {len(sources)} kernels; changed in most: {all_of_them}"
    assert second.split() == ["forward", "decode_ring_sm90", own] and not rest


def test_the_history_has_the_last_campaigns():
    try:
        known = changed_kernels.git("rev-list", "HEAD").split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no repository")
    if changed_kernels.git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a repository without its history")
    for commit in set(changed_kernels.last_campaigns().values()):
        assert any(one.startswith(commit) for one in known), commit
        assert len(changed_kernels.code_at(commit)) > 100
