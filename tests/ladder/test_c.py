"""The C files alone: each compiles by itself without a warning, checks itself, and notices a mistake."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from ladder import c  # noqa: E402
from ladder.rung import Unavailable  # noqa: E402

HERE = ROOT / "ladder/c"
STEPS = sorted(path.name for path in HERE.glob("0*.c"))
CC = shutil.which(os.environ.get("CC") or "cc")
needs_compiler = pytest.mark.skipif(CC is None, reason="no C compiler")


def program(source, to, *flags):
    command = [CC, "-O2", "-march=native", "-Wall", "-Wextra", "-Werror", "-DMAIN", *flags, str(source), "-o", str(to)]
    subprocess.run([*command, "-lm", "-pthread"], check=True, timeout=120)
    return subprocess.run([str(to), "check"], capture_output=True, text=True, timeout=120)


@needs_compiler
@pytest.mark.parametrize("step", STEPS)
def test_a_step_alone(step, tmp_path):
    done = program(HERE / step, tmp_path / "a.out")
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stdout
    assert len(done.stdout.splitlines()) == 7


@needs_compiler
def test_narrow_vectors_and_the_sanitizers(tmp_path):
    """The code for AVX2 and NEON, with every memory access checked."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    if "__AVX512F__" in c._output(CC, "-march=native", "-dM", "-E", "-x", "c", os.devnull):
        flags.append("-mno-avx512f")
    try:
        done = program(HERE / "05_threads.c", tmp_path / "a.out", *flags)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no sanitizers")
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stdout + done.stderr


@needs_compiler
def test_a_mistake_is_noticed(tmp_path):
    shutil.copytree(HERE, tmp_path / "c", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    source = tmp_path / "c/03_tiles.c"
    text = source.read_text()
    assert "t->out[i][d] *= correction" in text
    source.write_text(text.replace("t->out[i][d] *= correction", "t->out[i][d] *= 1"))
    done = program(source, tmp_path / "a.out", "-Wno-unused-variable")
    assert done.returncode == 1 and done.stdout.endswith("WRONG\n")


@needs_compiler
def test_what_is_compiled_is_kept_until_a_source_changes(tmp_path, monkeypatch):
    monkeypatch.setenv(c.CACHE, str(tmp_path))
    first = c.compiled(("03_tiles.c",))
    assert first.parent == tmp_path
    made = first.stat().st_mtime_ns
    assert c.compiled(("03_tiles.c",)) == first and first.stat().st_mtime_ns == made
    files = {path.name for path in c._with_includes([HERE / "05_threads.c"])}
    assert files >= {"05_threads.c", "04_register_tiles.c", "row.h", "attention.h"}  # a change of any of them counts
    monkeypatch.setattr(c, "FLAGS", (*c.FLAGS, "-DOTHER"))
    assert c.compiled(("03_tiles.c",)) != first
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"] * 2


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unavailable, match="no-such-compiler is not on the PATH"):
        c.RUNGS[0].load()


@needs_compiler
def test_what_the_compiler_says_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv(c.CACHE, str(tmp_path))
    with pytest.raises(Unavailable, match="none.c: No such file"):
        c.compiled(("none.c",))
