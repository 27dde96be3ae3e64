"""Imports go in one direction: import-linter checks the contracts in pyproject.toml, including imports inside
functions."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="the sources are not beside the tests")
linted = pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed")


def test_the_product_imports_nothing_of_a_checkout():
    """Neither the laboratory nor the ladder: a wheel has the product alone."""
    package, found = ROOT / "python" / "flash_attn_minimal", []
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found += [
                f"{file}: {name}" for name in names if name.split(".")[0] in ("flash_attn_lab", "ladder", "tests")
            ]
    assert not found and len(list(package.rglob("*.py"))) > 80


def lint(sources):
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(sources)}, capture_output=True, text=True,
    )  # fmt: skip


@linted
def test_contracts_are_kept():
    done = lint(ROOT / "python")
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


@linted
def test_a_circle_inside_a_function_breaks_both(tmp_path):
    shutil.copytree(ROOT / "python", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "default"))
    package = tmp_path / "flash_attn_minimal"
    with (package / "_core" / "fields.py").open("a") as module:
        module.write("\n\ndef _late():\n    from .. import attention\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and "2 kept, 2 broken" in done.stdout
    assert "flash_attn_minimal._core.fields -> flash_attn_minimal.attention" in done.stdout
