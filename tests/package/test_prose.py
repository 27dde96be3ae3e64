"""Comments, docstrings and pages avoid phrases over which a native reader stumbles, as far as a program can tell."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "README.md", "ARCHITECTURE.md", "QUICK_REFERENCE.md", "CONTRIBUTING.md", "docs/*.md", "docs/learn/*.md",
    "cuda/**/*", "python/**/*.py", "ladder/**/*.py", "tests/**/*.py", "tests/native/*", "examples/**/*.py",
)  # fmt: skip

OPENINGS = re.compile(r"(?:What|Of|Which|Those|That|Likewise)\b")
OPENING = re.compile(r'"""\s*' + OPENINGS.pattern)
MARKS = re.compile(r"[#*/\\]+")
PHRASES = {
    re.compile(r"\bbut for\b"): "except",
    re.compile(r"(?<!there )\b(?:is|are) none\b"): "is not a ..., has no ...",
    re.compile(r"\bfor good(?=[.,;:)]|$)"): "permanently, or nothing",
}


def in_one_line(text):
    """The text without code in backquotes, so that a phrase is found across line breaks."""
    return " ".join(re.sub(r"`[^`]*`", "``", text).split())


def docstrings(source):
    """(line, text) of every docstring."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(source):
    """(line, text) of every run of whole-line comments, and of every comment after code."""
    line, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        whole = not token.line[: token.start[1]].strip()
        if text and whole and token.start[0] == last + 1:
            text, last = f"{text} {token.string[1:]}", last + 1
            continue
        if text:
            yield line, text
        line, text, last = token.start[0], token.string[1:], token.start[0] if whole else -1
    if text:
        yield line, text


def c_comments(source):
    """(line, text) of every comment in C, C++ or CUDA; // comments on consecutive lines are one."""
    found = re.finditer(r'"(?:\\.|[^"\\\n])*"|(//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)', source, re.DOTALL)
    for match in found:
        if match[1]:
            yield source.count("\n", 0, match.start()) + 1, re.sub(r"\n[ \t]*(?://|\*)|//|/\*|\*/", " ", match[1])


def page(source):
    """(line, text) of every paragraph of a Markdown page outside of fenced code."""
    plain = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)
    for match in re.finditer(r"(?:^.*\S.*\n?)+", plain, re.MULTILINE):
        yield plain.count("\n", 0, match.start()) + 1, match[0]


def prose(name, source):
    """(line, text, whether it is a docstring) of all prose in a file; nothing for a file that has none."""
    suffix = Path(name).suffix
    if suffix == ".py":
        yield from ((*entry, True) for entry in docstrings(source))
        yield from ((*entry, False) for entry in comments(source))
    elif suffix in (".c", ".h", ".cpp", ".cu", ".cuh"):
        yield from ((*entry, False) for entry in c_comments(source))
    elif suffix == ".md":
        yield from ((*entry, False) for entry in page(source))


def problems(name, source):
    if not OPENING.search(source) and not any(x.search(" ".join(MARKS.sub(" ", source).split())) for x in PHRASES):
        return  # most files: to take one apart costs a hundred times this
    for line, text, is_docstring in prose(name, source):
        if is_docstring and (opening := OPENINGS.match(text)):
            yield f"{name}:{line}: the docstring opens with {opening[0]!r}: open with a verb or a noun"
        for phrase, instead in PHRASES.items():
            for found in phrase.finditer(in_one_line(text)):
                yield f"{name}:{line}: {found[0]!r}: write {instead!r}"


@pytest.mark.parametrize("place", PLACES)
def test_prose_is_plain(place):
    files = sorted(path for path in ROOT.glob(place) if path.is_file())
    assert files, "no file: the place has moved"
    found = [x for path in files for x in problems(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [
        ("x.py", '"""What a module is."""\n\n\ndef f():\n    """Those\n    of it."""\n', [1, 5]),
        ("x.py", "# all but\n# for one\nx = 1  # it is none\ny = 2  # None is None, and there is none\n", [1, 3]),
        ("x.py", 'x = "# but for"\n"""What is no docstring."""\nx = 3  # closed for good\n# for good reasons\n', [3]),
        ("x.cu", 'const char* s = "// but for";  // which are none\n/* gone for good; */\nint x;\n', [1, 2]),
        ("x.cu", "int x;\n// all but\n// for one\n", [2]),
        ("x.md", "A `is none`.\n\n```text\nbut for\n```\n\nAll but\nfor one.\n", [7]),
    ],
)
def test_finds_what_it_looks_for(name, source, lines):
    assert [int(x.split(":")[1]) for x in problems(name, source)] == lines
