"""The fast kernels spill no registers, and ptxas serialised no wgmma: read from the reports left beside the library."""

import re
from pathlib import Path

import pytest

from flash_attn_minimal import _library

FOLDER = Path(_library.path()).parent / "ptxas"
PATTERNS = "*ward_*_sm*.log", "linear_*.log", "decode_*.log", "*_w4*.log"
REPORTS = sorted(report for pattern in PATTERNS for report in FOLDER.glob(pattern))

pytestmark = pytest.mark.skipif(
    not REPORTS, reason="no ptxas reports beside the library: installed, or built without CUDA"
)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name.split(".")[0])
def test_no_spills(report):
    entries = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores",
        report.read_text(),
        re.DOTALL,
    )
    spilling = [f"{name} for {target}: {spilled} bytes" for name, target, _, spilled in entries if int(spilled)]
    assert not spilling, "\n".join(spilling)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name.split(".")[0])
def test_wgmma_is_not_serialised(report):
    """C7508 (setmaxnreg ignored) to C7519 (an injected wait) are only infos to ptxas, and halve the speed."""
    assert re.findall(r".*\(C75\d\d\).*", report.read_text()) == []
