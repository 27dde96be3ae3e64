"""Finds symbols in source files. Documents quote and link to symbols, so that no document contains a line number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CPP = {".cu", ".cuh", ".h", ".c", ".cpp"}
NO_CODE = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE
)
NO_TYPE = {"return", "else", "new", "throw", "case", "goto", "do"}


class NotFound(Exception):
    """A file lacks a symbol or marker, or has several of that name. The text says which."""


def source_of(path: Path, symbol: str) -> str:
    """The definition of a symbol with the comment above it: `name`, or `Class.method`, in C++ `Class::method`."""
    text = path.read_text()
    spans = _spans(path, text, symbol)
    if len(spans) != 1:
        raise NotFound(f"{path.name} has {len(spans) or 'no'} definitions of {symbol}")
    return _lines(text, *spans[0])


def has_symbol(path: Path, symbol: str) -> bool:
    return bool(_spans(path, path.read_text(), symbol))


def line_of(path: Path, symbol: str) -> int:
    """The line, counted from 1, where the definition of a symbol or the comment above it begins. If there are several
    definitions: the first."""
    text = path.read_text()
    spans = _spans(path, text, symbol)
    if not spans:
        raise NotFound(f"{path.name} has no definition of {symbol}")
    return text.count("\n", 0, spans[0][0]) + 1


def between(path: Path, first: str, last: str) -> str:
    """The lines from the only one that contains `first` to the first from there on that contains `last`."""
    lines = path.read_text().splitlines()
    found = [i for i, line in enumerate(lines) if first in line]
    if len(found) != 1:
        raise NotFound(f"{path.name} has {len(found) or 'no'} lines with {first!r}")
    end = next((i for i in range(found[0], len(lines)) if last in lines[i]), None)
    if end is None:
        raise NotFound(f"{path.name} has no line with {last!r} after {first!r}")
    return _dedent("\n".join(lines[found[0] : end + 1]))


def _lines(text: str, begin: int, end: int) -> str:
    """Whole lines around text[begin:end], without indentation."""
    begin = text.rfind("\n", 0, begin) + 1
    end = text.find("\n", end)
    return _dedent(text[begin : end if end >= 0 else len(text)])


def _dedent(text: str) -> str:
    """Moves all lines to the left by the indentation of the first. Lines of the preprocessor may have less
    indentation."""
    lines = text.rstrip().splitlines()
    width = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[min(width, len(line) - len(line.lstrip())) :] for line in lines)


def _spans(path: Path, text: str, symbol: str) -> list[tuple[int, int]]:
    if path.suffix == ".py":
        return _python(text, symbol.split("."))
    if path.suffix in CPP:
        return _cpp(text, re.split(r"::|\.", symbol))
    raise NotFound(f"{path.name} is neither Python nor C++: {symbol} cannot be looked up")


# ---- Python ----


def _python(text: str, names: list[str]) -> list[tuple[int, int]]:
    places: list[ast.AST] = [ast.parse(text)]
    for name in names:
        places = [node for place in places for node in getattr(place, "body", []) if name in _names_of(node)]
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = []
    for node in places:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        spans.append((starts[first - 1], starts[node.end_lineno] - 1))
    return spans


def _names_of(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


# ---- C and C++: no parser; braces match once comments, strings and preprocessor lines are blanked ----


def _blank(found: re.Match) -> str:
    edge = ";" if found[0].lstrip().startswith("#") else " "  # a statement ends before a line of the preprocessor
    return edge + re.sub(r"[^\n]", " ", found[0][1:])


def _cpp(text: str, names: list[str]) -> list[tuple[int, int]]:
    bare = NO_CODE.sub(_blank, text)
    inside = [(0, len(bare))]
    for name in names[:-1]:
        inside = [span for begin, end in inside for span in _definitions(bare, name, begin, end)]
    spans = {span for begin, end in inside for span in _definitions(bare, names[-1], begin, end)}
    if not spans:
        macros = re.finditer(rf"^[ \t]*#[ \t]*define[ \t]+{re.escape(names[-1])}\b(?:\\\n|[^\n])*", text, re.MULTILINE)
        spans = {found.span() for found in macros}
    return sorted((_with_comment(text, begin), end) for begin, end in spans)


def _definitions(bare: str, name: str, begin: int, end: int):
    """Spans of the definitions of a name, or of its declarations if it has no definition."""
    word = re.escape(name)
    found = []
    for match in re.finditer(
        rf"\b(?:struct|class|enum|union)\s(?:\s*alignas\([^()]*\))?[^;{{}}()=]*?\b{word}\b[^;{{}}()=]*\{{", bare[:end]
    ):
        found.append((match.start(), _after(bare, match.end() - 1)))
    for match in re.finditer(rf"\b{word}\s*=\s*\[", bare[:end]):  # a lambda
        found.append((match.start(), _after(bare, bare.index("{", match.end()))))
    for match in re.finditer(rf"\b{word}\s*\(", bare[:end]):
        if _follows_a_type(bare, match.start()):
            close = _after(bare, match.end() - 1)
            body = re.compile(r"(?:\s|const\b|noexcept\b|override\b|->\s*[\w:<>*& ]+)*\{").match(bare, close)
            if body:
                found.append((match.start(), _after(bare, body.end() - 1)))
    constants = rf"\b(?:constexpr|const|static)\s[^;{{}}()]*\b{word}\b\s*(?:\[[^\]]*\]\s*)*(?:=(?!\s*\[)|\{{)"
    for match in re.finditer(constants, bare[:end]):
        found.append((match.start(), bare.index(";", match.end())))
    if not found:
        for match in re.finditer(rf"\b{word}\s*[(;\[]", bare[:end]):
            if _follows_a_type(bare, match.start()):
                found.append((match.start(), bare.index(";", match.start())))
    return {(_statement(bare, first), last) for first, last in found if begin <= first}


def _follows_a_type(bare: str, at: int) -> bool:
    before = re.search(r"([\w)>*&}]+)\s+[*&]*$|([\w>][*&]+)$", bare[max(0, at - 200) : at])
    return bool(before) and (before[1] or before[2]) not in NO_TYPE


def _statement(bare: str, at: int) -> int:
    """The start of the statement that contains `at`: the first word after the previous ; { or }."""
    begin = max(bare.rfind(edge, 0, at) for edge in ";{}") + 1
    return begin + len(bare[begin:at]) - len(bare[begin:at].lstrip())


def _after(bare: str, opening: int) -> int:
    """The position after the bracket that closes the one at `opening`, and after a semicolon that follows it."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    depth, close = 0, pairs[bare[opening]]
    for at in range(opening, len(bare)):
        depth += (bare[at] == bare[opening]) - (bare[at] == close)
        if not depth:
            return at + 2 if bare[at + 1 : at + 2] == ";" else at + 1
    raise NotFound("a bracket is not closed")


def _with_comment(text: str, begin: int) -> int:
    """The start of the comment lines directly above `begin`."""
    begin = text.rfind("\n", 0, begin) + 1
    while begin and text[text.rfind("\n", 0, begin - 1) + 1 : begin].lstrip().startswith("//"):
        begin = text.rfind("\n", 0, begin - 1) + 1
    return begin
