"""The shipped files: the library's dynamic section and exports, the wheel, versions, the behaviour of the build
script."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flash_attn_minimal._core import library as _library

ROOT = Path(__file__).resolve().parents[2]
C_RUNTIME = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*\.so\.\d+")


def run(*command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def need(tool):
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")


def test_links_the_c_runtime_and_nothing_else():
    need("readelf")
    section = run("readelf", "-d", _library.path(), check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", section)
    assert "libc.so.6" in needed
    assert [name for name in needed if not C_RUNTIME.fullmatch(name)] == []  # no libcuda, cudart, torch, python
    assert re.findall(r"\((RPATH|RUNPATH)\)", section) == []


# The newest that glibc 2.27 and the GCC 7 of its time have: what auditwheel lets pass as manylinux_2_27.
NEWEST = {"GLIBC": (2, 27), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
CUDA_RUNTIME = re.compile(r"(pthread|sem|shm)_\w+|dl\w+")  # wheels link a copy that asks for the first versions


def test_asks_for_no_newer_runtime_than_a_wheel_may():
    """One call of exp(double) is enough to ask for glibc 2.29: see cuda/common/older_glibc.h."""
    need("readelf")
    if tuple(map(int, re.findall(r"\d+", platform.libc_ver()[1])[:2])) > (2, 36):
        pytest.skip("wheels are built with glibc 2.36 or older: newer headers ask for more")
    symbols = run("readelf", "-W", "--dyn-syms", _library.path(), check=True).stdout
    asked = re.findall(r"UND (\w+)@+([A-Z]+)_([\w.]+)", symbols)
    assert "GLIBC" in {family for _, family, _ in asked}
    _library.load().fa_build_info.restype = ctypes.c_char_p
    with_cuda = b"CUDA" in _library.load().fa_build_info()
    newer = [
        f"{name}@{family}_{version}"
        for name, family, version in asked
        if tuple(int(x) if x.isdigit() else 99 for x in version.split(".")) > NEWEST[family]
        and not (with_cuda and family == "GLIBC" and CUDA_RUNTIME.fullmatch(name))
    ]
    assert newer == []


def test_exports_the_headers_and_nothing_else():
    need("nm")
    table = run("nm", "-D", "--defined-only", _library.path(), check=True).stdout
    headers = "".join(header.read_text() for header in sorted((ROOT / "cuda").glob("*.h")))
    declared = re.findall(r"^FA_API .*?(fa_\w+)\(", headers, re.MULTILINE)
    assert len(declared) >= 12
    assert sorted(line.split()[-1] for line in table.splitlines()) == sorted(declared)


def test_loads_and_answers_where_no_gpu_is_visible():
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).fa_cuda_device_count())"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    answer = run(sys.executable, "-c", code, str(_library.path()), env=environment)
    assert (answer.returncode, answer.stdout.strip()) == (0, "0"), answer.stderr


def project_version():
    return re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def test_one_version_everywhere():
    library = ctypes.CDLL(str(_library.path()))
    library.fa_version.restype = ctypes.c_char_p
    header = (ROOT / "cuda/flash_attn.h").read_text()
    macros = ".".join(re.search(rf"#define FA_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    cmake = re.search(r"project\(flash_attn_minimal VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert {library.fa_version().decode(), macros, cmake, citation} == {project_version()}


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="a source distribution leaves it out")
def test_contributors_check_with_the_releases_of_ci():
    pin = r"(?:clang-format|ruff|import-linter|mypy|basedpyright)==[\d.]+"
    pins = set(re.findall(pin, (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(pins) == 5 and pins == set(re.findall(pin, (ROOT / ".ci/run").read_text()))


def test_every_extra_is_written_down():
    project = (ROOT / "pyproject.toml").read_text()
    table = re.search(r"^\[project.optional-dependencies\]\n(.*?)\n\n", project, re.MULTILINE | re.DOTALL)[1]
    extras = set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))
    page = (ROOT / "docs/install.md").read_text().split("## Extras")[1].split("\n## ")[0]
    assert extras == set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) and extras


def test_script_and_wheel_take_the_same_compiler_release():
    pin = r"nvidia-[a-z-]+==[\d.]+"
    script = re.findall(pin, (ROOT / "build_and_run.sh").read_text())
    assert len(script) == 5
    assert script == re.findall(pin, (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--fast"], "unknown argument '--fast'"),
        (["build", "--all"], "--all belongs to test"),
        (["tset"], "unknown argument 'tset'"),
        (["--jobs", "two"], "--jobs: 'two' is not a positive number"),
        (["--arch"], "--arch needs a value"),
        (["build", "test"], "two verbs: 'build' and 'test'"),
        (["--cpu-only", "--arch", "90"], "--arch and --cpu-only exclude each other"),
        (["--all-kernels", "--cpu-only"], "--all-kernels and --cpu-only exclude each other"),
    ],
)
def test_build_script_refuses_what_it_does_not_know(arguments, complaint, tmp_path):
    need("bash")
    environment = {**os.environ, "FLASH_ATTN_BUILD": str(tmp_path / "build"), "FLASH_ATTN_VENV": str(tmp_path / "venv")}
    result = run("bash", ROOT / "build_and_run.sh", *arguments, env=environment)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert list(tmp_path.iterdir()) == []  # refused before anything was made


@pytest.mark.parametrize("arguments, kernels, target", [
    ([], "general", "90"), (["--with-cuda"], "general", "90"),
    (["--all-kernels"], "all", "90"), (["--arch", "all"], "all", "all"),
])  # fmt: skip
def test_build_script_compiles_one_target_where_there_is_no_gpu(arguments, kernels, target, tmp_path):
    """Only the configuration is tested: this nvcc compiles nothing."""
    tools = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    for tool in ("bash", "cmake", "ninja"):
        if shutil.which(tool, path=tools) is None:
            pytest.skip(f"no {tool} here")
    for name, script in {"nvcc": "echo nothing", "nvidia-smi": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    build = tmp_path / "build"
    environment = {
        **os.environ,
        "PATH": tools,
        "PYTHON": sys.executable,
        "CUDACXX": str(tmp_path / "nvcc"),
        "FLASH_ATTN_BUILD": str(build),
        "FLASH_ATTN_VENV": str(tmp_path / "venv"),
    }
    result = run("bash", ROOT / "build_and_run.sh", "build", *arguments, env=environment)
    assert result.returncode == 1 and "FAILED: configure" in result.stdout, result.stdout + result.stderr
    assert f"{kernels} kernels, GPU target {target}," in result.stdout
    assert ("one target, sm_90 (Hopper). --a" in result.stdout) == (target == "90")
    cache = (build / "CMakeCache.txt").read_text()
    assert f"FLASH_ATTN_ARCH:STRING={target}\n" in cache and f"FLASH_ATTN_KERNELS:STRING={kernels}\n" in cache
    if arguments:  # a build without options keeps what a folder has
        result = run("bash", ROOT / "build_and_run.sh", "build", env=environment)
        assert f"{kernels} kernels, GPU target {target}," in result.stdout
        assert (f"has all GPU kernels for target {target}: they stay" in result.stdout) == (kernels == "all")


def compile_seconds():
    """{source: seconds}, in the order of the file."""
    lines = (ROOT / "cmake/compile_seconds.txt").read_text().splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {source: int(seconds) for seconds, source in pairs}


def test_slow_sources_are_there_and_the_slowest_is_first():
    seconds = compile_seconds()
    assert seconds and all((ROOT / source).is_file() for source in seconds)
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


@pytest.mark.parametrize("jobs", [1, 2, 16])
@pytest.mark.parametrize("kernels", ["general", "all"])
def test_the_time_that_a_build_takes_yet_is_estimated(jobs, kernels, tmp_path):
    """A build by the clock of compile_seconds.txt, on a machine three times slower: the estimates stay within a factor
    of three of the time that it takes, as long as that is more than 10 seconds."""
    need("bash")
    seconds, slower = compile_seconds(), 3
    sources = [source for source in seconds if kernels == "all" or "_sm" not in source and "w4" not in source]
    sources += [f"small{i}.cpp" for i in range(45)]
    free, ends = [0.0] * jobs, []
    for source in sources:  # the job that is free first takes it
        worker = min(range(jobs), key=free.__getitem__)
        free[worker] += slower * seconds.get(source, 0.5)
        ends.append((free[worker], source))
    ends.sort()
    lines = [f"echo '[1/9] CXX x.dir/{source}.o'\n" for source in sources]
    (tmp_path / "ninja").write_text("#!/bin/sh\n" + "".join(lines))
    (tmp_path / "ninja").chmod(0o755)
    script = (ROOT / "build_and_run.sh").read_text()
    functions = script[script.index("\nminutes() {") : script.index("\ntimes=''")]
    code = [
        "set -euo pipefail\nsay() { printf '%s\\n' \"$*\"; }",
        f"root='{ROOT}' build=. ninja='{tmp_path}/ninja' arch=90 jobs={jobs}",
        functions,
        'minutes() { say "$1 seconds"; }\ncount_files; step_began=0',
        *(f'SECONDS={int(end)}; finish {source}; say "$left"' for end, source in ends),
    ]
    said = run("bash", "-c", "\n".join(code), check=True).stdout.splitlines()
    assert len(said) == len(ends)
    judged = 0
    for (end, source), line in zip(ends, said, strict=True):
        assert line.startswith(f"{source} ({int(end)} seconds")
        if end >= 3 and ends[-1][0] - end > 10:
            estimate = int(re.search(r"about (\d+) seconds left", line)[1])
            assert 1 / 3 < estimate / (ends[-1][0] - end) < 3, (line, ends[-1][0])
            judged += 1
    assert judged >= 10


def test_build_script_explains_itself():
    need("bash")
    result = run("bash", ROOT / "build_and_run.sh", "--help")
    assert result.returncode == 0
    for word in "run build test bench clean --cpu-only --with-cuda --all-kernels --arch --clean --jobs --help".split():
        assert re.search(rf"(^|\s){re.escape(word)}\s", result.stdout), word


def test_the_product_is_light():
    """All that a wheel installs: what measures and tries it is in python/flash_attn_lab."""
    files = sorted((ROOT / "python/flash_attn_minimal").rglob("*.py"))
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    assert 10_000 < lines <= 19_000, f"{lines} lines of Python"


@pytest.fixture
def wheel():
    named = os.environ.get("FLASH_ATTN_WHEEL")
    if not named:
        pytest.skip("FLASH_ATTN_WHEEL names no wheel to look at")
    return Path(named)


def test_wheel_serves_every_python_on_its_platform(wheel):
    name = rf"flash_attn_minimal-{re.escape(project_version())}-py3-none-manylinux_2_27_(x86_64|aarch64)\.whl"
    assert re.fullmatch(name, wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        # Compressed machine code of sm_90 9 MB, of sm_80 4, PTX for newer GPUs 6, what runs on the CPU 5.
        assert archive.getinfo(f"flash_attn_minimal/{_library.LIBRARY_NAME}").file_size < 26e6
        tags = next(archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
    assert re.findall(rb"^Tag: (.+)$", tags, re.MULTILINE) == ["-".join(wheel.stem.split("-")[2:]).encode()]


def test_wheel_holds_the_package_and_needs_numpy_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"flash_attn_minimal", f"flash_attn_minimal-{project_version()}.dist-info"}
    assert [name for name in names if ".so" in name] == [f"flash_attn_minimal/{_library.LIBRARY_NAME}"]
    packaged = {name.split("/", 1)[1] for name in names if name.endswith(".py")}
    package = ROOT / "python/flash_attn_minimal"
    assert packaged == {str(file.relative_to(package)) for file in package.rglob("*.py")}
    required = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    assert [text for text in required if "extra ==" not in text] == ["numpy>=1.23"]
    assert "Requires-Python: >=3.10\n" in metadata
    assert "License-Expression: MIT\n" in metadata
