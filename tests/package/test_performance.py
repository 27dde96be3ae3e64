"""README.md and docs/performance.md quote docs/benchmarks: speed relative to the best peer, computed from its rows."""

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs/benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("the documents are not beside the tests", allow_module_level=True)

SHAPE = ("pass", "headdim", "headdim_v", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_k", "mix")
PEERS = {"cudnn", "fa2", "fa3", "fa4", "efficient", "standard_tf32", "torch"}  # not standard attention, except in tf32


def ratios(table, peers=PEERS, **ours):
    """The best peer's time over ours, of each shape that both have; `ours` are the values that our row has."""
    rows = json.loads((BENCHMARKS / f"{table}.json").read_text())["rows"]
    best = {}
    for row in rows:
        if row["system"] in peers:
            shape = tuple(row.get(name) for name in SHAPE)
            best[shape] = min(best.get(shape, math.inf), row["us"])
    mine = [row for row in rows if row["system"] == "ours" and all(row.get(name) == ours[name] for name in ours)]
    shapes = [(tuple(row.get(name) for name in SHAPE), row["us"]) for row in mine]
    found = [best[shape] / us for shape, us in shapes if shape in best]
    assert found, table
    return found


def spread(values, digits=2):
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return f"{mean:.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def ends(values):
    return f"{min(values):.2f} .. {max(values):.2f}"


def table_rows(page):
    """The lines of the page's tables, by the measurements that they link to."""
    return re.findall(r"^\|.*benchmarks/[^\n]*$", (ROOT / page).read_text(), re.MULTILINE)


BF16 = {"cache_dtype": "bfloat16", "page_size": 0}
CLAIMS = [  # page, table, what the row begins with, shapes, peers, which rows are ours, digits
    ("README.md", "h200/forward", "", 48, PEERS, {}, 2),
    ("README.md", "h200/backward", "", 36, PEERS, {"deterministic": None}, 2),
    ("README.md", "h200/short", "", 80, PEERS, {}, 2),
    ("README.md", "h200/decode", "", 17, PEERS, BF16, 2),
    ("README.md", "amd-epyc/cpu", "", 12, PEERS, {}, 2),
    ("docs/performance.md", "h200/forward", "", 48, PEERS, {}, 2),
    ("docs/performance.md", "h200/forward", "", 48, {"fa3"}, {}, 2),
    ("docs/performance.md", "h200/forward", "", 48, {"fa4"}, {}, 2),
    ("docs/performance.md", "h200/backward", "", 36, PEERS, {"deterministic": None}, 2),
    ("docs/performance.md", "h200/backward", "", 36, {"fa3"}, {"deterministic": None}, 2),
    ("docs/performance.md", "h200/backward", "", 36, {"fa4"}, {"deterministic": None}, 2),
    ("docs/performance.md", "h200/mma", "", 36, PEERS, {}, 2),
    ("docs/performance.md", "h200/backward_mma", "", 36, PEERS, {"deterministic": None}, 2),
    ("docs/performance.md", "h200/fp8", "`fp8_sm90`, ", 36, PEERS, {"kernel": "fp8_sm90"}, 2),
    ("docs/performance.md", "h200/fp8", "`fp8_sm90` with", 36, PEERS, {"kernel": "fp8_fast_sm90"}, 2),
    ("docs/performance.md", "h200/shapes", "`wgmma_wide_sm90`", 7, PEERS, {"kernel": "wgmma_wide_sm90"}, 1),
    ("docs/performance.md", "h200/shapes", "`mma_wide_sm80`", 6, PEERS, {"kernel": "mma_wide_sm80"}, 1),
    ("docs/performance.md", "h200/shapes", "`wgmma_split_sm90`", 8, PEERS, {"kernel": "wgmma_split_sm90"}, 1),
    ("docs/performance.md", "h200/shapes", "head dim 192", 6, PEERS, {"headdim": 192, "pass": "fwd"}, 2),
    ("docs/performance.md", "h200/float32", "float32, ", 24, PEERS, {"kernel": "wgmma_float32_sm90"}, 2),
    ("docs/performance.md", "h200/float32_backward", "float32, ", 24, PEERS, {"deterministic": None}, 2),
    ("README.md", "h200/float32", "", 24, PEERS, {"kernel": "wgmma_float32_sm90"}, 2),
    ("README.md", "h200/float32_backward", "", 24, PEERS, {"deterministic": None}, 2),
    ("docs/performance.md", "h200/tf32", "", 18, PEERS, {"kernel": "mma_tf32_sm80"}, 2),
    ("docs/performance.md", "h200/varlen", "", 8, PEERS, {}, 2),
    ("docs/performance.md", "h200/short", "", 80, PEERS, {}, 2),
    ("docs/performance.md", "h200/decode", "", 17, PEERS, BF16, 2),
]


@pytest.mark.parametrize(
    "page, table, start, shapes, peers, ours, digits",
    [pytest.param(*claim, id=f"{claim[0]}-{claim[1]}-{number}") for number, claim in enumerate(CLAIMS)],
)
def test_speeds_are_those_of_the_rows(page, table, start, shapes, peers, ours, digits):
    found = [row for row in table_rows(page) if f"benchmarks/{table}.md" in row and row.startswith(f"| {start}")]
    assert len(found) == 1, found
    values = ratios(table, peers, **ours)
    assert len(values) == shapes
    assert f"{shapes} shapes" in found[0] or f"{shapes} mixes" in found[0]
    assert spread(values, digits) in found[0]


@pytest.mark.parametrize("folder", ["intel-xeon", "amd-epyc", "amd-epyc-bf16", "amd-epyc-avx2", "amd-epyc-avx2-bf16"])
def test_speeds_on_the_cpu_are_those_of_the_rows(folder):
    [row] = [row for row in table_rows("docs/performance.md") if f"benchmarks/{folder}/cpu.md" in row]
    cells = [ends(ratios(f"{folder}/cpu", causal=causal)) for causal in (False, True)]
    if (BENCHMARKS / folder / "backward.json").is_file():
        cells += [ends(ratios(f"{folder}/backward", causal=causal, deterministic=None)) for causal in (False, True)]
    else:
        cells += ["", ""]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == cells


def test_rows_of_the_readme_have_their_date():
    rows = [row for row in table_rows("README.md") if ".json" in row]
    assert len(rows) == 7
    for row in rows:
        [table] = re.findall(r"\(docs/benchmarks/(\S+)\.json\)", row)
        date = json.loads((BENCHMARKS / f"{table}.json").read_text())["date"]
        assert f", {date}: [table](docs/benchmarks/{table}.md)" in row


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170
