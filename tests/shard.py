"""A pytest plugin: one shard of the tests, for tests/on_gpus.py.

Tests that have begun are on file, so a process that is started again goes on behind them. Failures are on file as they
happen. A process whose GPU refuses all work, as after an error in a kernel, ends with the status 77."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

SHARD, SHARDS = int(os.environ["TEST_SHARD"]), int(os.environ["TEST_SHARDS"])
FOLDER = Path(os.environ["TEST_SHARD_FOLDER"])
BEGUN, FAILED = FOLDER / f"shard_{SHARD}_begun.txt", FOLDER / f"shard_{SHARD}_failed.txt"
GPU_DEAD = 77


def _add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def _order(item) -> tuple[bool, int]:
    """Tests that need a GPU by their name come first; otherwise in an order that mixes files."""
    gpu = any(word in item.nodeid for word in ("gpu", "cuda", "_sm80", "_sm90"))
    return not gpu, zlib.crc32(item.nodeid.encode())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    begun = set(BEGUN.read_text().splitlines()) if BEGUN.exists() else set()
    items[:] = sorted((x for x in items if _order(x)[1] % SHARDS == SHARD and x.nodeid not in begun), key=_order)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid, location):
    _add(BEGUN, nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        _add(FAILED, f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext[-2500:]}\n{'-' * 20}")
    if report.when == "teardown" and not _gpu_works():
        _add(FAILED, f"DEAD after {report.nodeid}")
        os._exit(GPU_DEAD)


def _gpu_works() -> bool:
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return True
    except Exception:  # whatever the GPU's last kernel has left
        return False


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 0
