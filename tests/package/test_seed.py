"""The README's test command runs tests in several processes, without a seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_processes_share_a_seed():
    """Names of tests have it, and pytest-xdist refuses processes that collect different tests."""
    pytest.importorskip("xdist")
    environment = {k: v for k, v in os.environ.items() if k != "FLASH_ATTN_TEST_SEED" and not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/attention/test_shared_prefix.py", "-k", "random_batches and decode_prefix_sm80"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
