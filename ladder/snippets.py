"""Keeps docs/learn fresh: python -m ladder.snippets fills the pages from the sources and the measurements, --check says
what is stale.

A page holds places of three kinds. Each begins with a comment that readers of the page do not see:

    <!-- code: FILE#symbol -->                     the fenced block below it is the definition of the symbol
    <!-- code: FILE "first" .. "last" -->          ... the lines from the only one with `first` to the next with `last`
    text <!-- value: FILE QUERY -->1.27<!-- / -->  a number; not at the start of a line, which Markdown would take for
                                                   HTML
    <!-- table: FILE                               a table with one row or column for each of these lines; it ends with
    row: NAME | CONDITIONS                         <!-- end -->
    column: NAME | QUERY
    -->

A QUERY is arithmetic over {CONDITIONS FIELD}: the field of the only row of FILE's "rows" that meets all conditions.
A condition is KEY=VALUE, KEY="TWO WORDS", or KEY=None for a row without the key. {.KEY.KEY} is a path from the root of
the file. `:FORMAT` at the end formats the number; the default is three significant digits. In a table the conditions of
the row are added to those of the column, but not in {@OTHER_FILE CONDITIONS FIELD}. The QUERY `about` is the line about
the rung of the row's system=NAME."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import operator
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rung import ROOT
from .symbols import NotFound, between, has_symbol, source_of

FOLDER = ROOT / "docs/learn"
FENCES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".h": "cpp", ".cpp": "cpp", ".c": "c"}
CODE = re.compile(r"^<!-- code: (?P<what>[^\n]+?) -->(?:\n```[^\n]*\n.*?^```)?$", re.MULTILINE | re.DOTALL)
VALUE = re.compile(r"(?P<open><!-- value: (?P<what>[^\n]+?) -->)[^<\n]*<!-- / -->")
TABLE = re.compile(r"^(?P<open><!-- table: (?P<what>[^>]+?)-->\n).*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Stale(Exception):
    """A place of a page cannot be filled. The text says why."""


# ---- numbers ----


@functools.cache
def _measurements(file: str) -> dict[str, Any]:
    return json.loads((ROOT / file).read_text())


def _field(file: str, query: str, more: str = "") -> float:
    """The number that {query} names in a file, under more conditions."""
    words = shlex.split(query)
    if words[0].startswith("@"):
        file, more = words.pop(0)[1:], ""
    data = _measurements(file)
    if words[-1].startswith("."):
        for key in words[-1][1:].split("."):
            data = data[int(key)] if isinstance(data, list) else data[key]
        return data
    conditions = [word.split("=", 1) for word in [*shlex.split(more), *words[:-1]]]
    found = [row for row in data["rows"] if all(str(row.get(key)) == value for key, value in conditions)]
    if len(found) != 1:
        raise Stale(f"{file}: {len(found) or 'no'} rows have {dict(conditions)}")
    return found[0][words[-1]]


def number(file: str, query: str, more: str = "") -> str:
    """The text of a query's result.

    >>> number("docs/benchmarks/h200/ladder.json", "2 * 3 :.2f")
    '6.00'
    """
    query, _, form = query.partition(" :")
    atoms: list[float] = []

    def atom(found: re.Match) -> str:
        atoms.append(_field(file, found[1], more))
        return f"x{len(atoms) - 1}"

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp):
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        return node.value if isinstance(node, ast.Constant) else atoms[int(node.id[1:])]

    result = value(ast.parse(re.sub(r"\{([^}]+)\}", atom, query).strip(), mode="eval").body)
    return format(result, form.strip()) if form else three_digits(result)


def three_digits(x: float) -> str:
    """
    >>> [three_digits(x) for x in (432180.0, 714.8, 16.428, 1.272, 0.0042)]
    ['432180', '715', '16.4', '1.27', '0.0042']
    """
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"


def _table(what: str) -> str:
    file, *lines = [line.strip() for line in what.strip().splitlines()]
    parts = [re.split(r": | \| ", line, maxsplit=2) for line in lines]
    rows, columns = ([part[1:] for part in parts if part[0] == kind] for kind in ("row", "column"))
    if len(rows) + len(columns) != len(lines) or not all(len(part) == 3 for part in parts):
        raise Stale(f"a line of a table of {file} is not `row: NAME | CONDITIONS` or `column: NAME | QUERY`")
    text = [["", *(name for name, _ in columns)], ["---", *("---" if q == "about" else "---:" for _, q in columns)]]
    text += [[name, *(_cell(file, query, conditions) for _, query in columns)] for name, conditions in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in text)


def _cell(file: str, query: str, conditions: str) -> str:
    if query != "about":
        return number(file, query, conditions)
    from .rungs import rung

    return rung(dict(word.split("=", 1) for word in shlex.split(conditions))["system"]).about


# ---- pages ----


def _code(what: str) -> str:
    marked = re.fullmatch(r'(\S+) "(.+?)" \.\. "(.+)"', what)
    file, symbol = (marked[1], "") if marked else what.split("#", 1)
    path = ROOT / file
    source = between(path, marked[2], marked[3]) if marked else source_of(path, symbol)
    return f"```{FENCES[path.suffix]}\n{source}\n```"


def filled(text: str) -> str:
    """A page with every place filled."""
    for pattern, kind in ((CODE, "code"), (VALUE, "value"), (TABLE, "table")):
        if len(pattern.findall(text)) != text.count(f"<!-- {kind}:"):
            raise Stale(f"a `{kind}` comment has no end, or stands where it cannot be filled")
    if re.search(r"^\s*<!-- value:", text, re.MULTILINE):
        raise Stale("a line begins with a `value` comment: Markdown would take the line for HTML")
    text = CODE.sub(lambda found: f"<!-- code: {found['what']} -->\n{_code(found['what'])}", text)
    text = TABLE.sub(lambda found: f"{found['open']}\n{_table(found['what'])}\n<!-- end -->", text)
    return VALUE.sub(lambda found: f"{found['open']}{number(*found['what'].split(maxsplit=1))}<!-- / -->", text)


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Relative links of a page whose file does not exist, or whose fragment is not a symbol or heading of the file."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            dead.append(link)
        elif fragment and path.suffix == ".md":
            dead += [link] if fragment not in anchors(path.read_text()) else []
        elif fragment and not has_symbol(path, fragment):
            dead.append(link)
    return dead


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def problems(page: Path) -> list[str]:
    """A line for everything stale in a page, and for each dead link."""
    text, name = page.read_text(), page.relative_to(ROOT)
    try:
        stale = [f"{name} is stale: run python -m ladder.snippets"] if filled(text) != text else []
    except (Stale, NotFound, KeyError, OSError) as error:
        stale = [f"{name}: {error}"]
    return stale + [f"{name}: dead link {link}" for link in dead_links(page)]


def main(arguments: list[str] | None = None, say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m ladder.snippets", description="Fills the pages of docs/learn.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale or a link dead")
    check = parser.parse_args(arguments).check
    found = []
    for page in pages():
        if not check:
            try:
                text = filled(page.read_text())
            except (Stale, NotFound, KeyError, OSError) as error:
                say(f"{page.relative_to(ROOT)}: {error}")
                return 1
            if text != page.read_text():
                page.write_text(text)
                say(f"filled {page.relative_to(ROOT)}")
        found += problems(page)
    for line in found:
        say(line)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
