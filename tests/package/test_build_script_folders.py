"""The folders that build_and_run.sh uses, and the folders that it deletes: only those that it has made. Nothing is
compiled here: the script runs in a separate checkout, with tools that do nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "build_and_run.sh"
MARK = ".made_by_build_and_run"
CMAKE = """#!/bin/sh
case $1 in
--version) echo "cmake version 3.30.0" ;;
-S) echo "CMAKE_HOME_DIRECTORY:INTERNAL=$2" >"$4/CMakeCache.txt" ;;
esac
"""
WITHOUT_PIP = """#!/bin/sh
case "$1 $2" in
"-c import sys; print(sys.executable)"*) echo "$0" ;;
"-m venv") exec "{0}" "$@" --without-pip ;;
*) exec "{0}" "$@" ;;
esac
"""
if shutil.which("bash") is None:
    pytest.skip("no bash here", allow_module_level=True)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python that is an environment itself, has what the script needs, and makes environments in no time."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "py"], check=True)
    [packages] = folder.glob("py/lib/python*/site-packages")
    (packages / "numpy.py").write_text("")
    scripts = {"python": WITHOUT_PIP.format(folder / "py/bin/python"), "cmake": CMAKE, "ninja": "#!/bin/sh\n"}
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder / "python"


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "outer" / "a check out"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/config").write_text("all the work")
    (folder / "python/flash_attn_minimal").mkdir(parents=True)
    (folder / "python/flash_attn_minimal/__init__.py").write_text("")
    (folder / "cmake").mkdir()
    (folder / "cmake/compile_seconds.txt").write_text("# none\n")
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.fixture
def run(checkout, python):
    def run(*arguments, shell=("bash",), cwd=checkout, **environment):
        environment = {**os.environ, "PYTHON": str(python), "CXX": "true", **environment}
        command = [*shell, checkout / "build_and_run.sh", *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)

    return run


def build(run, *arguments, **environment):
    result = run("build", "--cpu-only", *arguments, **environment)
    assert result.returncode == 0 and "built" in result.stdout, result.stdout + result.stderr
    return result


def tree(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


VERBS = [["build", "--cpu-only"], ["build", "--cpu-only", "--clean"], ["clean"]]


@pytest.mark.parametrize("arguments", VERBS)
@pytest.mark.parametrize("setting", ["FLASH_ATTN_BUILD", "FLASH_ATTN_VENV"])
@pytest.mark.parametrize("where", [".", "..", "../..", "./", "link", "/", "not there/..", "not there/../.."])
def test_the_checkout_and_what_holds_it_are_refused(run, checkout, tmp_path, arguments, setting, where):
    """A folder that is or contains the checkout is refused, even if it has the mark and looks like a build folder."""
    for folder in (checkout, checkout.parent):
        (folder / MARK).write_text("")
        (folder / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={checkout}\n")
    (checkout / "link").symlink_to(checkout.parent)
    before = tree(tmp_path)
    result = run(*arguments, **{setting: where})
    assert result.returncode == 2 and f"{setting}=" in result.stderr
    assert "or holds it" in result.stderr or "leads nowhere" in result.stderr
    assert tree(tmp_path) == before


def test_a_checkout_by_way_of_a_link(run, checkout, tmp_path, python):
    """A folder that contains the checkout is recognised by its real path, not by the path that was given."""
    (tmp_path / "way").symlink_to(checkout.parent)
    command = ["bash", tmp_path / "way" / checkout.name / "build_and_run.sh", "clean"]
    (tmp_path / MARK).write_text("")
    result = subprocess.run(
        command, env={**os.environ, "FLASH_ATTN_BUILD": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and "or holds it" in result.stderr and (checkout / ".git/config").is_file()


@pytest.mark.parametrize("arguments", VERBS)
@pytest.mark.parametrize("setting", ["FLASH_ATTN_BUILD", "FLASH_ATTN_VENV"])
def test_a_folder_of_somebody_else_stays(run, checkout, tmp_path, arguments, setting):
    precious = tmp_path / "my thesis"
    precious.mkdir()
    (precious / "thesis.txt").write_text("thesis")
    (precious / "logs").mkdir()
    (precious / "logs/configure.log").write_text("mine")
    (precious / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/somewhere/else\n")
    before = tree(precious)
    result = run(*arguments, **{setting: str(precious)})
    if "--clean" in arguments and setting == "FLASH_ATTN_BUILD" or arguments == ["clean"]:
        assert result.returncode == 1 and f"kept {precious}: this script has not made it" in result.stderr
    else:
        assert result.returncode == 2 and f"{setting}={precious} is neither empty nor" in result.stderr
    assert tree(precious) == before


@pytest.mark.parametrize("build_folder, venv", [
    (None, None), ("out side", "the venv"), ("out side/", "the venv//"), ("build/nested", None), (".", "build/venv"),
])  # fmt: skip
def test_clean_removes_what_was_made(run, checkout, tmp_path, python, build_folder, venv):
    elsewhere, environment = tmp_path / "elsewhere", {}
    elsewhere.mkdir()
    if build_folder:
        environment["FLASH_ATTN_BUILD"] = build_folder if build_folder != "." else str(elsewhere)
    if venv:
        environment["FLASH_ATTN_VENV"] = venv
    build(run, cwd=elsewhere, **environment)
    made = Path(environment.get("FLASH_ATTN_BUILD", checkout / "build"))
    made = made if made.is_absolute() else elsewhere / made
    assert (made / MARK).is_file() and (made / "CMakeCache.txt").is_file()
    (made / "rest").write_text("of the build before")
    build(run, "--clean", cwd=elsewhere, **environment)
    assert (made / MARK).is_file() and not (made / "rest").exists()
    result = run("clean", cwd=elsewhere, **environment)
    assert result.returncode == 0 and "removed " in result.stdout and not made.exists()
    assert (checkout / ".git/config").read_text() == "all the work"
    assert run("clean", cwd=tmp_path, **environment).returncode == 0  # nothing is left to do


def test_a_build_of_cmake_s_is_used_and_kept(run, checkout):
    """A folder made by cmake -B build without the script: the script may build there, but has not made the folder."""
    (checkout / "build").mkdir()
    (checkout / "build/CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={checkout}\n")
    (checkout / "build/mine").write_text("mine")
    build(run)
    for arguments in VERBS[1:]:
        result = run(*arguments)
        assert result.returncode == 1 and "has not made it" in result.stderr
        assert (checkout / "build/mine").is_file()


def test_a_build_of_the_script_before_it_marked(run, checkout):
    (checkout / "build").mkdir()
    (checkout / "build/made_by").write_text(f"{checkout} /usr/bin/cmake\n")
    assert run("clean").returncode == 0 and not (checkout / "build").exists()


def test_a_folder_of_somebody_else_that_the_script_built_in_before_it_marked(run, checkout, tmp_path):
    """The script used to write made_by into any folder that FLASH_ATTN_BUILD named."""
    precious = tmp_path / "my thesis"
    precious.mkdir()
    (precious / "made_by").write_text(f"{checkout} /usr/bin/cmake\n")
    (precious / "thesis.txt").write_text("thesis")
    for arguments in VERBS[1:]:
        result = run(*arguments, FLASH_ATTN_BUILD=str(precious))
        assert result.returncode == 1 and "has not made it" in result.stderr
        assert (precious / "thesis.txt").read_text() == "thesis"


@pytest.mark.parametrize("folder", ["../out side", "../out/below", "./../out/", "link/../out"])
def test_a_folder_beside_the_checkout(run, checkout, tmp_path, folder):
    """The folder need not exist yet. After a link, '..' is the parent of the link's target."""
    (tmp_path / "far/deep").mkdir(parents=True)
    (checkout / "link").symlink_to(tmp_path / "far/deep")
    made = Path(os.path.realpath(checkout / folder))
    build(run, FLASH_ATTN_BUILD=folder)
    assert (made / MARK).is_file() and not (checkout / "build").exists()
    assert run("clean", FLASH_ATTN_BUILD=folder).returncode == 0 and not made.exists()


def test_what_ci_makes_in_the_build_folder_first(run, checkout):
    """A folder in build/ that is older than the first build: the script builds next to it, and does not delete it."""
    (checkout / "build/ci").mkdir(parents=True)
    (checkout / "build/ci/step.log").write_text("passed")
    build(run)
    build(run)
    for arguments in VERBS[1:]:
        result = run(*arguments)
        assert result.returncode == 1 and f"kept {checkout}/build: this script has not made it" in result.stderr
        assert "delete it yourself" in result.stderr and (checkout / "build/ci/step.log").is_file()


def test_a_link_stays_and_what_it_leads_to_goes(run, checkout, tmp_path):
    (tmp_path / "fast disk").mkdir()
    (checkout / "build").symlink_to(tmp_path / "fast disk")
    build(run)
    (tmp_path / "fast disk/rest").write_text("")
    build(run, "--clean")
    assert (checkout / "build").is_symlink() and not (tmp_path / "fast disk/rest").exists()
    assert run("clean").returncode == 0
    assert (checkout / "build").is_symlink() and list((tmp_path / "fast disk").iterdir()) == []
    build(run)


def test_an_environment_inside_the_build_folder(run, checkout, python):
    """A user's environment inside a folder of the script is not deleted either."""
    build(run)
    subprocess.run([python, "-m", "venv", "--without-pip", checkout / "build/mine"], check=True)
    for arguments in VERBS[1:]:
        result = run(*arguments, FLASH_ATTN_VENV="build/mine")
        assert result.returncode == 1 and f"it holds {checkout}/build/mine, which" in result.stderr
        assert (checkout / "build/mine/pyvenv.cfg").is_file()


@pytest.mark.parametrize("below", ["", "/below"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_build_in_the_environment_is_refused(run, tmp_path, below, exists):
    """The build would be deleted together with the environment."""
    if exists:
        (tmp_path / "one").mkdir()
    result = run("build", "--cpu-only", FLASH_ATTN_BUILD=f"{tmp_path}/one{below}", FLASH_ATTN_VENV=f"{tmp_path}/one/")
    assert result.returncode == 2 and f"FLASH_ATTN_VENV={tmp_path}/one is FLASH_ATTN_BUILD=" in result.stderr
    assert (tmp_path / "one").exists() == exists


def test_environments(run, checkout, tmp_path, python):
    """An environment whose Python does not start is made again if the script has made it, and refused if not. A working
    environment is used as it is."""
    bare, venv = tmp_path / "bare", tmp_path / "the venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    if subprocess.run([bare / "bin/python", "-c", "import numpy"], stderr=subprocess.PIPE).returncode == 0:
        pytest.skip("the Python under this one has NumPy, so no environment is made")
    for name in ("cmake", "ninja"):
        shutil.copy(python.parent / name, tmp_path / name)
    (tmp_path / "python").write_text(WITHOUT_PIP.format(bare / "bin/python"))
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "pip.py").write_text("raise SystemExit('no network')")
    asked = {"PYTHON": str(tmp_path / "python"), "FLASH_ATTN_VENV": str(venv), "PYTHONPATH": str(tmp_path)}
    asked["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    build(run, **asked)  # without NumPy, which the build does not need
    assert (venv / MARK).is_file() and (venv / "pyvenv.cfg").is_file()
    (venv / "bin/python").unlink()
    (venv / "rest").write_text("")
    build(run, **asked)
    assert (venv / "bin/python").exists() and not (venv / "rest").exists() and (venv / MARK).is_file()
    (venv / MARK).unlink()
    (venv / "bin/python").unlink()
    before = tree(venv)
    result = run("build", "--cpu-only", **asked)
    assert result.returncode == 2 and "nor an environment whose Python starts" in result.stderr
    assert tree(venv) == before


def imports(python, cwd):
    """Where a fresh shell's Python finds the package, and FLASH_ATTN_LIBRARY there."""
    code = "import flash_attn_minimal as fa, numpy, os; print(fa.__file__, os.getenv('FLASH_ATTN_LIBRARY'), sep='\\n')"
    said = subprocess.run([python, "-c", code], cwd=cwd, env={}, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


@pytest.mark.parametrize("build_folder", [None, "out side"])
@pytest.mark.parametrize("venv", [None, "the venv"])
def test_the_environment_imports_the_package(run, checkout, tmp_path, build_folder, venv):
    """In any folder, with no environment variables; with what is installed in the environment that the script began
    with. A library outside build/ is named."""
    settings = {"FLASH_ATTN_BUILD": build_folder, "FLASH_ATTN_VENV": venv}
    settings = {name: folder for name, folder in settings.items() if folder}
    for _ in range(2):
        said = build(run, **settings).stdout
    python = checkout / (venv or ".venv") / "bin/python"
    library = f"{checkout}/{build_folder}/libflash_attn_minimal.so" if build_folder else "None"
    assert imports(python, tmp_path) == [f"{checkout}/python/flash_attn_minimal/__init__.py", library]
    name = "the\\ venv" if venv else ".venv"
    assert f"\n  {name}/bin/python -m flash_attn_minimal info" in said and "\n  ./build_and_run.sh test" in said


def test_somebody_s_environment_imports_the_package_too(run, checkout, tmp_path):
    """One file is added to it, and no packages of the base Python. clean removes that file alone."""
    mine = tmp_path / "mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", mine], check=True)
    [packages] = mine.glob("lib/python*/site-packages")
    (packages / "numpy.py").write_text("mine = True")
    before = tree(mine)
    build(run, FLASH_ATTN_VENV=str(mine))
    added = {Path(name).name for name in tree(mine).keys() - before.keys() if "__pycache__" not in name}
    assert added == {"flash_attn_minimal_checkout.pth"}
    assert (packages / "flash_attn_minimal_checkout.pth").read_text().splitlines()[1:] == [f"{checkout}/python"]
    assert imports(mine / "bin/python", tmp_path)[0] == f"{checkout}/python/flash_attn_minimal/__init__.py"
    result = run("clean", FLASH_ATTN_VENV=str(mine))
    assert result.returncode == 1 and f"kept {mine}: this script has not made it" in result.stderr
    assert not (packages / "flash_attn_minimal_checkout.pth").exists() and before.keys() <= tree(mine).keys()


def test_two_checkouts_share_an_environment(run, checkout, tmp_path, python):
    """The last one has it, and says so."""
    shared, settings = tmp_path / "shared", {**os.environ, "PYTHON": str(python), "CXX": "true"}
    settings["FLASH_ATTN_VENV"] = str(shared)
    assert "another checkout" not in build(run, FLASH_ATTN_VENV=str(shared)).stdout
    other = shutil.copytree(checkout, tmp_path / "other", ignore=shutil.ignore_patterns("build"))
    command = ["bash", other / "build_and_run.sh", "build", "--cpu-only"]
    result = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)
    quoted = str(checkout / "python").replace(" ", "\\ ")
    assert f"{shared} imported another checkout's package until now: {quoted}\n" in result.stdout
    assert imports(shared / "bin/python", tmp_path)[0] == f"{other}/python/flash_attn_minimal/__init__.py"


@pytest.mark.parametrize("build_folder", [None, "bü ild"])
@pytest.mark.parametrize("name", ["Müller's $x *", "new\nline", "a space at the end "])
def test_any_name_of_a_checkout(checkout, tmp_path, python, name, build_folder):
    """In every locale: Python reads the added file in the locale's encoding. clean finds this file again."""
    moved = checkout.rename(checkout.parent / name)
    settings = {"FLASH_ATTN_BUILD": str(moved / build_folder)} if build_folder else {}
    mine = tmp_path / "mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", mine], check=True)
    [packages] = mine.glob("lib/python*/site-packages")
    (packages / "numpy.py").write_text("")
    settings |= {"PYTHON": str(python), "FLASH_ATTN_VENV": str(mine), "LC_ALL": "C", "CXX": "true"}

    def there(*arguments):
        command, environment = ["bash", moved / "build_and_run.sh", *arguments], {**os.environ, **settings}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)

    result = there("build", "--cpu-only")
    assert result.returncode == 0, result.stderr
    file = packages / "flash_attn_minimal_checkout.pth"
    assert file.read_bytes().isascii()
    code = "import flash_attn_minimal as fa, os; print(ascii([fa.__file__, os.getenv('FLASH_ATTN_LIBRARY')]))"
    library = f"{moved}/{build_folder}/libflash_attn_minimal.so" if build_folder else None
    expected = [f"{moved}/python/flash_attn_minimal/__init__.py", library]
    for locale in ("C.UTF-8", "C", "POSIX"):
        command = [mine / "bin/python", "-c", code]
        said = subprocess.run(command, cwd=tmp_path, env={"LC_ALL": locale}, capture_output=True, text=True)
        assert said.returncode == 0 and said.stdout.strip() == ascii(expected), said
    there("clean")
    assert not file.exists()


def test_a_link_to_the_script(checkout, tmp_path, python):
    """The script works in its own checkout, not in the folder of the link."""
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin/build"
    link.symlink_to(checkout / "build_and_run.sh")
    environment = {**os.environ, "PYTHON": str(python), "CXX": "true"}
    command = ["bash", link, "build", "--cpu-only"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (checkout / "build/CMakeCache.txt").is_file() and list((tmp_path / "bin").iterdir()) == [link]


PIP = """import os, pathlib, sys
cmake = pathlib.Path(sys.prefix, "bin/cmake")
if "cmake>=3.24" in sys.argv and ("--force-reinstall" in sys.argv or not cmake.exists()):
    cmake.write_text(f"#!{sys.prefix}/bin/python\\nimport os, sys; os.execv(os.environ['TOOL'], sys.argv)\\n")
    cmake.chmod(0o755)
"""


def test_an_environment_that_was_moved(checkout, tmp_path, python):
    """PyPI's cmake is a script that names the environment's Python by its path."""
    (tmp_path / "tools").mkdir()
    for name in os.listdir("/usr/bin"):
        if name not in ("cmake", "ninja"):
            (tmp_path / "tools" / name).symlink_to(f"/usr/bin/{name}")
    shutil.copy(python, tmp_path / "python")
    (tmp_path / "pip.py").write_text(PIP)
    settings = {"PYTHON": str(tmp_path / "python"), "PATH": str(tmp_path / "tools"), "PYTHONPATH": str(tmp_path)}
    settings |= {"TOOL": str(python.parent / "cmake"), "CXX": "true"}

    def build(folder):
        command = ["bash", folder / "build_and_run.sh", "build", "--cpu-only"]
        environment = {**os.environ, **settings}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    old = checkout.rename(tmp_path / "old")
    for folder in (old, tmp_path / "new"):
        if folder != old:
            old.rename(folder)
        result = build(folder)
        assert result.returncode == 0 and "built" in result.stdout, result.stdout + result.stderr
        assert (folder / ".venv/bin/cmake").read_text().startswith(f"#!{folder}/")
        assert imports(folder / ".venv/bin/python", tmp_path)[0] == f"{folder}/python/flash_attn_minimal/__init__.py"
    settings["TOOL"] = "/nothing"
    result = build(folder)
    assert result.returncode == 1 and "cannot go on without cmake" in result.stderr


def test_an_installed_package_is_named(run, checkout):
    """Where the environment's Python imports another package than that of the checkout, the script says so."""
    library = (
        "from pathlib import Path\ndef path():\n    return Path(__file__).parents[1] / 'libflash_attn_minimal.so'\n"
    )
    assert "another" not in build(run).stdout
    [packages] = checkout.glob(".venv/lib/python*/site-packages")
    core = packages / "flash_attn_minimal/_core"
    core.mkdir(parents=True)
    (packages / "flash_attn_minimal/__init__.py").write_text("")
    (core / "library.py").write_text(library)
    said = build(run).stdout
    assert f"another flash_attn_minimal, with the library {packages}/flash_attn_minimal/libflash" in said
    assert "-m pip uninstall flash-attn-minimal" in said


NVIDIA_SMI = """#!/bin/sh
case $1 in
*name*) printf 'NVIDIA A, 9.0\\nNVIDIA B, 8.0\\n' ;;
*) printf '9.0\\n8.0\\n9.0\\n' ;;
esac
"""


def test_the_kernels_of_a_gpu_stay_where_it_is_not_at_hand(run, checkout, tmp_path):
    """A folder that was built on a machine with a GPU keeps its kernels on one without."""
    tools = {"nvcc": "#!/bin/sh\n", "nvidia-smi": NVIDIA_SMI}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    cache = checkout / "build/CMakeCache.txt"
    result = run("build", CUDACXX=str(tmp_path / "nvcc"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 0 and "all kernels, GPU target 80,90" in result.stdout, result.stdout + result.stderr
    cache.write_text(cache.read_text() + "FLASH_ATTN_KERNELS:STRING=all\nFLASH_ATTN_CUDA:STRING=ON\n")
    cache.write_text(cache.read_text() + "FLASH_ATTN_ARCH:STRING=80,90\n")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    result = run("build", CUDACXX=str(tmp_path / "nvcc"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 0 and "all kernels, GPU target 80,90, no GPU" in result.stdout, result.stdout


@pytest.mark.parametrize("shell", ["sh", "dash", "bash as sh"])
def test_sh_runs_it_too(run, checkout, tmp_path, shell):
    if shell == "bash as sh":
        (tmp_path / "sh").symlink_to(shutil.which("bash"))
        shell = str(tmp_path / "sh")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    result = run("--help", shell=(shell,))
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.startswith("usage: ./build_and_run.sh")
    result = run("build", "--cpu-only", "--jobs", "two words", shell=(shell,))
    assert result.returncode == 2 and "--jobs: 'two words' is not" in result.stderr


def test_sh_says_what_it_needs_where_there_is_no_bash(run, tmp_path):
    result = run("--help", shell=(shutil.which("sh"),), PATH=str(tmp_path))
    if result.returncode == 0:
        pytest.skip("sh is bash here")
    assert "this is a bash script, and there is no bash on PATH" in result.stderr
