"""Imports go in one direction: import-linter checks the contracts in pyproject.toml, including imports inside
functions."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"),
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="the sources are not beside the tests"),
]


def lint(sources):
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(sources)}, capture_output=True, text=True,
    )  # fmt: skip


def test_contracts_are_kept():
    done = lint(ROOT / "python")
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


def test_a_circle_inside_a_function_breaks_both(tmp_path):
    shutil.copytree(ROOT / "python", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "default"))
    package = tmp_path / "flash_attn_minimal"
    with (package / "_core" / "fields.py").open("a") as module:
        module.write("\n\ndef _late():\n    from .. import attention\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and "2 kept, 2 broken" in done.stdout
    assert "flash_attn_minimal._core.fields -> flash_attn_minimal.attention" in done.stdout
