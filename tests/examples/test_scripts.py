"""The examples run as their first lines say, and their answers are right. (The server has tests of its own.)"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import NO_CUDA, ROOT, cupy

from flash_attn_minimal._core import library

EXAMPLES = ROOT / "examples"
needs_gpu = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)


def run(script, *arguments, returns=0, **environment):
    """Runs a script. Returns its standard output, or the standard error of a refusal."""
    command = [sys.executable, EXAMPLES / script, *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, env={**os.environ, **environment})
    assert done.returncode == returns, done.stderr
    return done.stderr if returns else done.stdout


def check_training(said, names, least, apart):
    """Checks that both runs start and end with the same loss, and that the loss falls."""
    losses = re.findall(r"(\w+) +loss ([\d.]+) -> ([\d.]+)", said)
    assert [name for name, _, _ in losses] == names
    assert all(float(last) < least < 3 < float(first) for _, first, last in losses)
    assert float(re.search(r"differ by (\S+) at most", said)[1]) < apart


def test_nanogpt():
    pytest.importorskip("torch")
    check_training(run("nanogpt.py", "--device", "cpu"), ["pytorch", "ours"], 2.6, 1e-4)


@needs_gpu
def test_nanogpt_on_a_gpu():
    pytest.importorskip("torch")
    check_training(run("nanogpt.py", "--device", "cuda", "--bf16"), ["pytorch", "ours"], 2.6, 0.05)


def test_jax_train():
    pytest.importorskip("jax")
    check_training(run("jax_train.py"), ["jax", "ours"], 0.1, 0.05 if _on_gpu("jax") else 1e-3)


def test_same_bits():
    """All rows of a rollout have a training step's bits with batch_invariant, and not without it."""
    counts = [int(line.rpartition(":")[2]) for line in run("same_bits.py").splitlines()]
    assert counts[0] > 0 == counts[1]


def test_shared_prompt():
    """A step over a prompt once and one over copies of it have one loss; the script compares the gradients."""
    for module in ("torch", "rich"):
        pytest.importorskip(module)
    said = run("shared_prompt.py", "--prompt", "150", "--answers", "3", "--length", "20")
    tokens = [int(x) for x in re.findall(r"(\d+) tokens", said)]
    losses = [float(x) for x in re.findall(r"loss (\S+)", said)]
    assert tokens[0] == tokens[1] + 2 * 150 and abs(losses[0] - losses[1]) < 1e-5
    assert "--answers 1 is below 2" in run("shared_prompt.py", "--answers", "1", returns=2)


def test_transformers_generate():
    for module in ("torch", "transformers", "flash_attn_minimal.integrations.transformers"):
        pytest.importorskip(module)
    said = run("transformers_generate.py", "--device", "cpu").splitlines()
    assert [said[0].startswith("The capital of France is"), said[-1]] == [True, "PyTorch's attention writes the same"]


@pytest.mark.skipif(bool(NO_CUDA) or cupy is None, reason=NO_CUDA or "CuPy is not installed")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cupy_alone(dtype):
    said = run("cupy_alone.py", "--dtype", dtype).splitlines()
    assert len(said) == 5 and all(f" cupy {dtype} (1, " in line for line in said)


CUPY_BY_NUMPY = """
import types
from numpy import *
import numpy
class Stream:
    def __init__(self, non_blocking): pass
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def synchronize(self): pass
runtime = types.SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=OSError)
cuda = types.SimpleNamespace(Stream=Stream, runtime=runtime)
class ndarray: pass
"""


def test_cupy_alone_with_numpy_in_its_place(tmp_path):
    """Without a GPU: the same script, and the same answers from the CPU backend."""
    (tmp_path / "cupy.py").write_text(CUPY_BY_NUMPY)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = run("cupy_alone.py", "--length", "300", PYTHONPATH=path).splitlines()
    assert len(said) == 5 and all(" numpy float32 (1, " in line for line in said)
    refused = run("cupy_alone.py", "--steps", "1000", returns=2, PYTHONPATH=path)
    assert "--steps 1000 is outside 1 .. 999" in refused


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_cupy_alone_says_what_it_needs():
    assert "CuPy is missing (pip install cupy-cuda13x)" in run("cupy_alone.py", returns=2)


def test_numba_on_the_cpu():
    pytest.importorskip("numba")
    assert run("numba_arrays.py", "--device", "cpu").startswith("NumPy arrays between jitted functions: error ")


def test_numba_in_its_simulator():
    """Numba's simulator runs the CUDA part of the script in Python, with device arrays on the host."""
    pytest.importorskip("numba")
    small = ["--batch", "1", "--rows", "6", "--heads", "2", "--dim", "8"]
    assert run("numba_arrays.py", "--device", "cuda", *small, NUMBA_ENABLE_CUDASIM="1").startswith(
        "Numba device arrays"
    )


@needs_gpu
def test_numba_on_a_gpu():
    pytest.importorskip("numba")
    if not _on_gpu("numba"):
        pytest.skip("Numba finds no GPU")
    assert run("numba_arrays.py", "--device", "cuda").startswith("Numba device arrays: error ")


def _on_gpu(framework):
    """Whether the framework finds a GPU; asked in a separate process."""
    code = {
        "jax": "import jax; print(jax.default_backend() == 'gpu')",
        "numba": "import numba.cuda.cudaimpl; print(numba.cuda.is_available())",  # not every NumPy has what this needs
    }[framework]
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True).stdout.strip() == "True"


# ---- C ----


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """A folder made by `cmake --install` with the library that is tested. Nothing is compiled for it."""
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("no CMake or no Ninja on PATH")
    build, folder = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("prefix")
    options = ["-DFLASH_ATTN_CUDA=OFF", "-DFLASH_ATTN_TESTS=OFF", "-DCMAKE_INSTALL_LIBDIR=lib"]
    execute("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options)
    shutil.copy(library.path(), build / "libflash_attn_minimal.so")
    execute("cmake", "--install", build, "--prefix", folder)
    return folder


def execute(*words, **kwargs):
    done = subprocess.run(words, text=True, capture_output=True, timeout=120, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_program(program):
    done = subprocess.run([program], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    at_once, cached, prepared, refused = done.stdout.splitlines()
    assert at_once.startswith("500 tokens at once: cpu_") and cached.startswith("the last one over a cache: cpu_")
    assert prepared.startswith("the last 10 by one prepared call: cpu_")
    assert refused == "refused: nheads=8 is not a multiple of nheads_k=3"


def test_c_by_the_command_in_its_comment(prefix, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler on PATH")
    [line] = re.findall(r"^ \*     (cc .*)$", (EXAMPLES / "c/attention.c").read_text(), re.MULTILINE)
    words = line.replace("examples/", f"{EXAMPLES}/").replace("$HOME/fa", str(prefix)).split()
    execute(*words, "-Wall", "-Wextra", "-Wpedantic", "-Werror", cwd=tmp_path)
    check_program(tmp_path / "a.out")


def test_c_by_cmake(prefix, tmp_path):
    package = f"-DCMAKE_PREFIX_PATH={prefix}"
    execute("cmake", "-S", EXAMPLES / "c", "-B", tmp_path, "-G", "Ninja", package)
    execute("cmake", "--build", tmp_path)
    check_program(tmp_path / "attention")


def test_cmake_refuses_another_minor_version(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(x LANGUAGES C)\nfind_package(flash_attn_minimal 0.2 REQUIRED)\n"
    )
    words = ["cmake", "-S", tmp_path, "-B", tmp_path / "b", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"]
    done = subprocess.run(words, text=True, capture_output=True, timeout=120)
    assert done.returncode and "version: 0.1.0" in done.stderr


def test_c_by_pkg_config_from_a_prefix_that_was_moved(prefix, tmp_path):
    """The command of docs/install.md on the program of QUICK_REFERENCE.md."""
    for tool in ("cc", "pkg-config"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH")
    shutil.copytree(prefix, tmp_path / "fa")
    environment = {**os.environ, "HOME": str(tmp_path), "PKG_CONFIG_PATH": str(tmp_path / "fa/lib/pkgconfig")}
    assert execute("pkg-config", "--modversion", "flash_attn_minimal", env=environment).strip() == "0.1.0"
    assert str(prefix) not in execute("pkg-config", "--cflags", "--libs", "flash_attn_minimal", env=environment)
    program = re.search(r"^```c\n(.*?)^```", (ROOT / "QUICK_REFERENCE.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "program.c").write_text(program)
    [line] = re.findall(r"^cc program.c .*$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    execute("sh", "-c", line, cwd=tmp_path, env=environment)
    assert "served the call" in execute(tmp_path / "a.out")


def test_cmake_lines_of_the_install_page_are_those_of_the_example():
    [block] = re.findall(r"^```cmake\n(.*?)^```", (ROOT / "docs/install.md").read_text(), re.MULTILINE | re.DOTALL)
    find, link = block.splitlines()
    example = (EXAMPLES / "c/CMakeLists.txt").read_text()
    assert find in example
    assert link.replace("program", "attention").removesuffix(")") in example


# ---- the list of them ----


def test_the_index_names_every_example():
    """The index names every example, and each example's first lines have the command of its line in the index."""
    page = (EXAMPLES / "README.md").read_text()
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".c")}
    named = set(re.findall(r"(?:examples/|\]\()([\w/]+\.(?:py|c))\b", page))
    assert named == scripts
    for command in re.findall(r"^\| `python (examples/\S+)`", page, re.MULTILINE):
        assert f"    python {command}" in (ROOT / command).read_text().split('"""')[1]


@pytest.mark.parametrize("example", sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.py")), ids=str)
def test_an_example_names_the_package_that_it_lacks(example, tmp_path):
    """In a Python that has NumPy and this package alone."""
    hidden = "torch", "jax", "numba", "transformers", "rich", "uvicorn", "fastapi", "cupy", "tvm_ffi", "vllm"
    for name in hidden:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, EXAMPLES / example]
    done = subprocess.run(command, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": paths})
    if example.name in ("story_grammar.py", "same_bits.py"):  # NumPy is enough
        assert done.returncode == 0
        return
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    [lacked] = re.findall(r"No module named '(\w+)'", done.stderr)
    [named] = re.findall(r"\(pip install ([^)]+)\)", done.stderr)
    package = {"cupy": "cupy-cuda13x", "tvm_ffi": "apache-tvm-ffi"}.get(lacked, lacked)
    assert lacked in hidden and package in named.split()
