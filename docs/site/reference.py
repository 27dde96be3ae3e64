"""The reference: docstrings as they are written here, the C headers, and the modules of integrations."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"(Arguments|Returns|Raises)\b([^:]*):\s*(.*)")
ENTRY = re.compile(r"    ([\w*][\w*, ]*): (.*)")
CHOICE = re.compile(r'"[\w-]+": ')
ERROR = re.compile(r"[A-Z]\w+(, [A-Z]\w+)*( \([^)]*\))?[:,]")

# ---- docstrings: plain text in sections, `Arguments:` with an indented entry for each ----


def plain(text: str) -> str:
    """Text in which reStructuredText finds nothing but literals, in single or double backquotes."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    parts[::2] = [re.sub(r"([\\*|`]|_\b(?!\w)|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part.strip('`')}``" for part in parts[1::2]]
    return "".join(parts)


def annotations_of(obj) -> dict[str, str]:
    """The annotation of each argument, also of those that **options stands for."""
    try:
        parameters = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return {}
    known = {}
    module = inspect.getmodule(inspect.unwrap(obj))
    for name, parameter in parameters.items():
        if parameter.annotation is not parameter.empty:
            known[name] = _array(inspect.formatannotation(parameter.annotation).strip("'"), parameter.default is None)
    for dictionary in re.findall(r"Unpack\[(\w+)\]", " ".join(known.values())):
        for base in reversed(getattr(vars(module).get(dictionary), "__mro__", ())):
            known |= {
                name: _array(_text(hint), optional=True)
                for name, hint in vars(base).get("__annotations__", {}).items()
                if name not in known
            }
    return known


def _text(hint) -> str:
    return getattr(hint, "__forward_arg__", None) or inspect.formatannotation(hint).strip("'")


def _array(annotation: str, optional: bool) -> str:
    """`Any` and `AnyArray`, which the code says of arrays of any framework, are arrays to a reader."""
    if annotation in ("Any", "Any | None"):
        return "array | None" if optional or "None" in annotation else "array"
    return re.sub(r"\bAnyArray\b", "array", annotation)


def entries(lines: list[str], known: dict[str, str]) -> list[str]:
    """The lines of a section `Arguments`, as a definition list."""
    out: list[str] = []
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if entry:
            names = re.split(r",\s*", entry[1])
            types = dict.fromkeys(known[name] for name in names if name in known)
            of_type = f" : {', '.join(types)}" if types else ""
            out += ["", ", ".join(f"``{name}``" for name in names) + plain(of_type), f"    {plain(entry[2])}"]
        elif CHOICE.match(line.strip()):
            if not out[-1].startswith("    * ") and not out[-1].startswith("      "):
                out.append("")
            out.append(f"    * {plain(line.strip())}")
        elif out and out[-1].startswith(("    * ", "      ")) and line.startswith(" " * 12):
            out.append(f"      {plain(line.strip())}")
        elif line.startswith(" " * 8):
            out.append(f"    {plain(line.strip())}")
        else:
            out += ["", plain(line.strip())]
    return out


def sentences(lines: list[str]) -> list[str]:
    """The lines of another section: a paragraph, and an item for each group of errors."""
    out: list[str] = []
    for line in lines:
        if ERROR.match(line.strip()):
            out += ["", f"* {plain(line.strip())}"]
        else:
            out.append(("  " if out and out[-1].startswith(("* ", "  ")) else "") + plain(line.strip()))
    return out


def formatted(lines: list[str], known: dict[str, str]) -> list[str]:
    """A docstring, whose markup is indentation alone, in reStructuredText."""
    out: list[str] = []
    at = 0

    def block(more, empty: bool = True) -> list[str]:
        """The lines from `at` on for which `more` holds, and the empty ones between them."""
        nonlocal at
        begin = at
        while at < len(lines) and (empty and not lines[at].strip() or more(lines[at])):
            at += 1
        return [line.rstrip() for line in lines[begin:at]]

    def indented(line):
        return line.startswith("    ")

    while at < len(lines):
        line = lines[at]
        section = SECTION.fullmatch(line)
        if not line.strip():
            out.append("")
            at += 1
        elif section:
            at += 1
            out += ["", f".. rubric:: {section[1]}{section[2]}", ""]
            text = ["    " + section[3]] if section[3] else []
            body = [text for text in text + block(indented) if text.strip()]
            out += entries(body, known) if section[1] == "Arguments" else sentences(body)
            out.append("")
        elif indented(line):
            out += ["", ".. code-block:: none", "", *block(indented), ""]
        elif line.startswith(">>>"):
            while at < len(lines) and lines[at].strip():
                out.append(lines[at])
                at += 1
            out.append("")
        else:
            text = block(lambda line: line.strip() and not indented(line) and not SECTION.fullmatch(line), empty=False)
            aligned = any(re.search(r"\S {3,}\S", line) for line in text)
            out += (
                ["", ".. code-block:: none", "", *("    " + line for line in text), ""] if aligned else map(plain, text)
            )
    return out


def docstring(app, what, name, obj, options, lines):
    lines[:] = formatted(lines, annotations_of(obj) if callable(obj) else {})


def one_signature(app):
    """A function is shown as it is written, not once for each of its overloads."""
    for path in sorted((ROOT / "python/flash_attn_minimal").rglob("*.py")):
        if "@overload" in path.read_text():
            parts = path.relative_to(ROOT / "python").with_suffix("").parts
            analyzer = ModuleAnalyzer.for_module(".".join(part for part in parts if part != "__init__"))
            analyzer.analyze()
            analyzer.overloads.clear()


# ---- modules whose framework need not be there: read, not imported ----


class SourceModule(SphinxDirective):
    """``.. sourcemodule:: MODULE``: its docstring and its public functions and classes, as autodoc would show them."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        path = ROOT / "python" / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.env.note_dependency(str(path))
        module = ast.parse(path.read_text())
        lines = [f".. py:module:: {name}", "", *formatted((ast.get_docstring(module) or "").splitlines(), {}), ""]
        for node in public(path, module):
            lines += described(node)
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def public(path: Path, module: ast.Module):
    """The definitions that __all__ names, or else all; also those that a package takes from a file without a page."""
    exported = None
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
    found = list(module.body)
    for node in module.body if path.name == "__init__.py" else ():
        if isinstance(node, ast.ImportFrom) and node.level == 1 and (node.module or "").startswith("_"):
            names = {alias.name for alias in node.names}
            there = ast.parse((path.parent / f"{node.module}.py").read_text()).body
            found += [one for one in there if getattr(one, "name", None) in names]
    return [one for one in found if exported is None or getattr(one, "name", None) in exported]


def described(node: ast.stmt, kind: str = "function") -> list[str]:
    """The directive of a public function or class, with its docstring; nothing for another statement."""
    name = getattr(node, "name", "_")
    if name.startswith("_") or any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
        return []
    text = (ast.get_docstring(node) or "").splitlines()
    if isinstance(node, ast.ClassDef):
        inner = formatted(text, {}) + [line for one in node.body for line in described(one, "method")]
        head = f".. py:class:: {name}"
    else:
        arguments = node.args
        if kind == "method" and not any(ast.unparse(one) == "staticmethod" for one in node.decorator_list):
            arguments.args = arguments.args[1:]
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        inner = formatted(text, {one.arg: ast.unparse(one.annotation) for one in every if one.annotation})
        gives = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        head = f".. py:{kind}:: {name}({ast.unparse(arguments)}){gives}"
    return ["", head, "", *(f"   {line}" for line in inner), ""]


def integrations(app, page, source):
    """docs/api/integrations gets a section for each module, without a list of them."""
    if page != "docs/api/integrations":
        return
    folder = ROOT / "python/flash_attn_minimal/integrations"
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        names = [part for part in parts if part != "__init__"]
        if names and not any(part.startswith("_") for part in names):
            title, module = ".".join(names), ".".join(["flash_attn_minimal.integrations", *names])
            source[0] += f"\n\n{title}\n{'-' * len(title)}\n\n.. sourcemodule:: {module}\n"


# ---- at the top of a page of Python's reference: its functions and classes, a sentence each ----

ENTRY_OF_PAGE = re.compile(
    r"^\.\. (module|currentmodule|automodule|sourcemodule|auto(\w+)):: (\S+)\n((?:   .*\n)*)", re.MULTILINE
)


def overview(app, page, source):
    """The list of what docs/api/*.rst documents, below the page's title."""
    if not re.fullmatch(r"docs/api/\w+", page) or page.endswith(("index", "integrations")):
        return
    module, rows = "", []
    for kind, what, name, options in ENTRY_OF_PAGE.findall(source[0]):
        if what and kind not in ("automodule",):
            rows.append((what, f"{module}.{name}"))
            continue
        module = name
        if kind == "sourcemodule" or ":members:" in options:
            rows += [(what, f"{module}.{member}") for what, member in _members(module)]
    text = ["", ".. list-table::", "   :class: overview", "   :widths: auto", ""]
    for what, name in rows:
        role = {"function": "func", "class": "class", "exception": "exc"}[what]
        text += [f"   * - :py:{role}:`~{name}`", f"     - {plain(_first_sentence(name))}"]
    title, rest = re.match(r"(.+\n=+\n)((?:.|\n)*)", source[0]).groups()
    source[0] = title + "\n".join(text) + "\n" + rest


def _members(module: str):
    """(kind, name) of what a module makes public, read from its source."""
    path = ROOT / "python" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in public(path, ast.parse(path.read_text())):
        name = getattr(node, "name", "_")
        overloaded = any("overload" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))
        if not name.startswith("_") and not overloaded:
            yield "class" if isinstance(node, ast.ClassDef) else "function", name


def _first_sentence(name: str) -> str:
    module, _, member = name.rpartition(".")
    try:
        text = inspect.getdoc(getattr(importlib.import_module(module), member)) or ""
    except ImportError:  # a framework that is not here
        path = ROOT / "python" / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found = [node for node in public(path, ast.parse(path.read_text())) if getattr(node, "name", "") == member]
        text = next((ast.get_docstring(node) or "" for node in reversed(found)), "")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.match(r"(.*?(?<!e\.g)[.:])(\s|$)|(.*)", paragraph)[0].strip().rstrip(":.")


# ---- docs/api/c: a header, a section for each of its declarations ----

DECLARED = re.compile(
    r"^FA_API[^(]*?\b(fa_\w+)\(|^\} (fa_\w+);|^typedef [^{;]*\{[^}]*\} (fa_\w+);|^typedef [^{}]*?\b(fa_\w+);",
    re.MULTILINE,
)
HEADING = re.compile(r"/\* ---- (.+?) ----")
NOT_C = re.compile(
    r"^#(?:ifdef __cplusplus|if defined\(__GNUC__\))\n(?:.*\n)*?#endif$|^#(?!define FA_\w+ \S).*$", re.MULTILINE
)


def paragraphs(text: str) -> list[str]:
    """The parts of a header between empty lines, but for those inside braces and comments."""
    parts, begin = [], 0
    for empty in re.finditer(r"\n\n+|\Z", text):
        part = text[begin : empty.start()]
        if part.count("{") == part.count("}") and part.count("/*") == part.count("*/"):
            parts.append(part)
            begin = empty.end()
    return [part for part in parts if part.strip()]


class Header(SphinxDirective):
    """``.. header:: cuda/NAME.h``: its declarations with the comments above them, as they stand there."""

    required_arguments = 1

    def run(self):
        path = ROOT / self.arguments[0]
        self.env.note_dependency(str(path))
        found: list[nodes.Node] = []
        section = None
        for part in paragraphs(NOT_C.sub("", path.read_text())):
            heading = HEADING.match(part)
            if heading:
                section = self.section(heading[1][:1].upper() + heading[1][1:])
                found.append(section)
            names = list(dict.fromkeys(next(filter(None, match)) for match in DECLARED.findall(part)))
            code = nodes.literal_block(part, part, language="c")
            place = section if section is not None else found
            if names:
                declared = self.section(", ".join(names), names)
                declared += code
                place.append(declared)
            elif not heading or part.count("\n") > 0:
                place.append(code)
        return found

    def section(self, title, names=()):
        ids = list(names) or [nodes.make_id(title)]
        return nodes.section("", nodes.title(title, "", *self.titled(names or [title], bool(names))), ids=ids)

    @staticmethod
    def titled(names, literal):
        for number, name in enumerate(names):
            if number:
                yield nodes.Text(", ")
            yield nodes.literal(name, name) if literal else nodes.Text(name)


def setup(app):
    app.connect("builder-inited", one_signature)
    app.connect("source-read", integrations)
    app.connect("source-read", overview)
    app.connect("autodoc-process-docstring", docstring)
    app.add_directive("header", Header)
    app.add_directive("sourcemodule", SourceModule)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
