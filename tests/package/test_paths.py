"""Every path and module that prose names is there: in comments, docstrings and pages, of all folders."""

import re
import subprocess
from fnmatch import fnmatchcase
from importlib.util import find_spec

import pytest
from test_prose import ROOT, prose

import flash_attn_lab
import flash_attn_minimal

TOPS = ("cuda", "python", "tests", "docs", "ladder", "examples", "cmake", ".ci")
THEN = ("CHANGELOG.md", "docs/history.md")  # they name what was there once
SOURCES = r"(?:py|c|h|cpp|cu|cuh|md|rst|sh)"
# A folder or a file below one of TOPS, or a source by the end of its path. Not the same letters in an address, nor
# beside a placeholder in <> or {}.
PATH = re.compile(
    rf"(?<![\w/.*{{}}<>$~:@-])(?:\.\.?/)*((?:{'|'.join(map(re.escape, TOPS))})/(?:[\w.*-]+/)*(?:[\w*-][\w.*-]*\.\w+)?"
    rf"|(?:[\w.*-]+/)*[\w*-]+\.{SOURCES})(?![\w*(/{{<-]|\.\w)"
)
PLACEHOLDER = re.compile(r"\b(?:NAME\w*|ROOM|FILE|FOLDER)\b")
ELSEWHERE = {  # of other projects, or made by the commands and programs that name them
    *("a.out", "cp.md", "cuda_runtime_api.h", "dlpack.h", "example.c", "ledger_notes.md", "llama2.c", "nccl.h"),
    "program.c",
}
PACKAGES = {"flash_attn_minimal": flash_attn_minimal, "flash_attn_lab": flash_attn_lab}
MODULE = re.compile(r"(?<![\w./])(flash_attn_minimal|flash_attn_lab)\.(?!(?:cu|h|pc)\b)([a-z_]\w*)")


def texts():
    """(name, text) of every file that has prose."""
    top = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".sh", ".txt")]
    for path in sorted([*top, *(path for folder in TOPS for path in (ROOT / folder).rglob("*"))]):
        name = path.relative_to(ROOT).as_posix()
        written = path.suffix[1:] in ("py", "c", "h", "cpp", "cu", "cuh", "md", "rst", "sh", "toml", "txt")
        if written and name not in THEN and "__pycache__" not in name:
            yield name, path.read_text("utf-8")


def ends():
    """The ends of all paths: for docs/api/README.md also api/README.md and README.md."""
    found = set()
    for path in [*ROOT.iterdir(), *(path for folder in TOPS for path in (ROOT / folder).rglob("*"))]:
        parts = path.relative_to(ROOT).parts
        tail = "/" if path.is_dir() else ""
        found |= {"/".join(parts[i:]) + tail for i in range(len(parts))}
    return found


ENDS = ends()


def is_there(path):
    if "*" in path:
        return any(fnmatchcase(end, path) for end in ENDS)
    return path in ENDS or path in ELSEWHERE or bool(PLACEHOLDER.search(path))


def missing(text):
    """The paths and modules in a text that are not there."""
    yield from (path for path in PATH.findall(text) if not is_there(path))
    for package, name in MODULE.findall(text):
        if not hasattr(PACKAGES[package], name) and find_spec(f"{package}.{name}") is None:
            yield f"{package}.{name}"


def prose_of(name, source):
    """(line, text): of a page everything, of a source its comments and docstrings."""
    if name.endswith((".md", ".rst")):
        return list(enumerate(source.splitlines(), 1))
    if name.endswith((".sh", ".toml", ".txt")):
        return [(i, line.partition("#")[2]) for i, line in enumerate(source.splitlines(), 1)]
    return [(line, text) for line, text, _ in prose(name, source)]


def problems(name, source):
    if not any(missing(source)):
        return []  # most files: to take one apart costs a hundred times this
    return [f"{name}:{line}: {path}" for line, text in prose_of(name, source) for path in missing(text)]


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="a source distribution leaves out folders that pages name")
def test_paths_in_prose_are_there():
    files = list(texts())
    assert len(files) > 500
    found = [problem for name, source in files for problem in problems(name, source)]
    assert not found, "prose names what is not there:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "name, source, found",
    [
        ("x.py", '"""As cuda/flash_attn.h and tests/gone.py."""\ny = "cuda/gone.cu"  # mask.h, gone.h\n',
         ["tests/gone.py", "gone.h"]),
        ("x.cuh", "// forward/gone.cuh, forward/mma_sm80/kernel.cuh, forward/gone_*.cu, forward/wgmma_*.cu\nint x;\n",
         ["forward/gone.cuh", "forward/gone_*.cu"]),
        ("x.md", "[a](../../cuda/gone/), `cuda/api/`, https://x.org/gone.md, docs/<gpu>/gone.md, cuda/NAME.h, a.b.\n",
         ["cuda/gone/"]),
        ("x.sh", "gone.py # runs gone.sh\n", ["gone.sh"]),
        ("x.md", "`flash_attn_minimal.gone.there`, flash_attn_minimal.flash_attn_func, flash_attn_lab.bench\n",
         ["flash_attn_minimal.gone"]),
    ],
)  # fmt: skip
def test_finds_what_it_looks_for(name, source, found):
    assert [x.split(": ", 1)[1] for x in problems(name, source)] == found


def test_the_top_holds_what_belongs_there():
    """A file that a tool has left at the top is not committed."""
    listed = subprocess.run(["git", "ls-files", ":(glob)*"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a checkout")
    hidden = {".clang-format", ".gitattributes", ".gitignore"}
    named = {"CMakeLists.txt", "CITATION.cff", "LICENSE", "Makefile", "build_and_run.sh", "pyproject.toml"}
    assert {name for name in listed.stdout.split() if not name.endswith(".md")} == hidden | named
