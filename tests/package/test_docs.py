"""The code shown in the documents runs: every python block, and the C program of QUICK_REFERENCE.md."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "QUICK_REFERENCE.md",
    "CONTRIBUTING.md",
    "docs/context_parallel.md",
    "docs/contract.md",
    "docs/generate.md",
    "docs/install.md",
    "docs/integrations.md",
    "docs/masks.md",
    "docs/performance.md",
    "docs/quantization.md",
    "docs/remembered.md",
    "docs/reliability.md",
    "docs/testing.md",
)


COMMAND = r"^python (-m flash_attn_(?:minimal|lab) .*)$"


def blocks(language):
    """(document, number, code) of every fenced block in that language."""
    for name in DOCUMENTS:
        found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
        for number, code in enumerate(found, 1):
            yield pytest.param(code, id=f"{name}#{number}")


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_block_runs(code, tmp_path):
    for framework in re.findall(r"^(?:import|from) (torch|jax|transformers|diffusers)\b", code, re.MULTILINE):
        pytest.importorskip(framework)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_readme_example_prints_what_the_readme_says(tmp_path):
    readme = (ROOT / "README.md").read_text()
    code, output = re.search(r"^```python\n(.*?)^```\n+```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == output


def test_commands_of_the_generate_page_run(tmp_path):
    """Runs every command that needs no file of the reader, in order, in one folder."""
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    page = (ROOT / "docs/generate.md").read_text()
    commands = re.findall(COMMAND, page, re.MULTILINE)
    foreign = ("stories15M.bin --prompt", "Llama-3.2-1B/")
    ran = [command for command in commands if not any(name in command for name in foreign)]
    assert len(ran) == 8 and len(commands) == 10
    for command in ran:
        done = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        if "generate" in command:
            said = [line.partition(" ")[0] for line in done.stderr.splitlines()]
            assert said[:5] == ["model", "run", "prefill", "decode", "memory"]


def test_commands_of_the_quantization_page_run(tmp_path):
    pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    page = (ROOT / "docs/quantization.md").read_text()
    commands = re.findall(COMMAND, page, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        done = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        if "generate" in command:
            assert done.stdout.startswith("One day")


def test_numbers_of_the_quantization_page_are_the_files():
    page = (ROOT / "docs/quantization.md").read_text()
    rows = {}
    for name in ("stories", "stories260K"):
        data = json.loads((ROOT / f"docs/quantization/{name}.json").read_text())
        rows[name] = {row["weights"]: row for row in data["rows"]}
    for weights, row in rows["stories260K"].items():
        if "kept" in row:
            cells = [weights]
            for one in (rows["stories"][weights], row):
                cells += [f"{one['bits']:.2f}", f"{one['rise']:+.2f} ± {one['rise_error']:.2f}"]
                cells.append(f"{one['divergence']:.4f}")
            assert f"| {' | '.join(cells)} |" in page


@pytest.mark.parametrize("code", list(blocks("c")))
def test_c_block_compiles_and_runs(code, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    from flash_attn_minimal._core import library as _library

    library = Path(_library.path())
    (tmp_path / "example.c").write_text(code)
    flags = ["-std=c11", "-Wall", "-Werror", "-Wno-unused-value", f"-I{ROOT / 'cuda'}"]
    subprocess.run(
        [compiler, *flags, "example.c", str(library), "-o", "example"], cwd=tmp_path, check=True, timeout=120
    )
    done = subprocess.run(
        [tmp_path / "example"],
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "served the call" in done.stdout


def test_every_function_that_the_quick_reference_recommends_is_there():
    page = (ROOT / "QUICK_REFERENCE.md").read_text()
    table = page.split("## Which function do I need")[1].split("\n## ")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    names = {
        name for cell in cells for name in re.findall(r"`([a-z_]\w*(?:\.\w+)*)(?:\(.*?\))?`", cell) if name.islower()
    }
    package = ROOT / "python/flash_attn_minimal"
    assert len(names) > 20
    arguments = {"out", "lse", "q_descale", "k_descale", "v_descale", "startend_row_indices", "block_mask"}
    arguments |= {"score_mod", "mask_mod", "x.transpose"}
    for name in sorted(names - arguments):
        module, _, member = name.removeprefix("flash_attn_minimal.").rpartition(".")
        folder = package / module.replace(".", "/")
        files = [folder / "__init__.py"] if folder.is_dir() else [folder.with_suffix(".py")]
        found = any(re.search(rf"^(def|class) {member}\b|\b{member}\b", file.read_text(), re.M) for file in files)
        assert found or (folder / member).with_suffix(".py").is_file(), name
