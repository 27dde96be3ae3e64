"""Which pages the site has, in which order, and what a link to a file that is no page shows."""

from __future__ import annotations

import html
import posixpath
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from docutils import nodes
from ladder.symbols import NotFound, line_of
from pygments.lexers import get_lexer_for_filename
from sphinx.project import Project
from sphinx.util import logging

# The sidebar: below each page its groups, (caption, patterns of page names). A page that no pattern names comes last.
CONTENTS = {
    "docs/api/index": [
        (
            "",
            [
                f"docs/api/{name}"
                for name in ("attention", "backward", "kvcache", "transformer", "distributed", "torch", "jax")
            ],
        ),
        ("", ["docs/api/[!c]*", "docs/api/c/flash_attn", "docs/api/c/*"]),
    ],
    "docs/learn/index": [("", ["docs/learn/*"])],
    "docs/benchmarks/index": [("", ["docs/benchmarks/h200/*", "docs/benchmarks/*"])],
    "docs/experiments/index": [("", ["docs/experiments/h200/*", "docs/experiments/*"])],
    "docs/quantization": [("", ["docs/quantization/*"])],
    "docs/reliability": [("", ["docs/reliability/*"])],
    "ladder/index": [("", ["ladder/*"])],
    "index": [
        (
            "Use",
            [
                f"docs/{name}"
                for name in ("install", "integrations", "masks", "generate", "quantization", "context_parallel")
            ]
            + ["examples/*"],
        ),
        ("Reference", ["QUICK_REFERENCE", "docs/contract", "docs/api/index"]),
        ("Performance", ["docs/performance", "docs/benchmarks/index", "docs/experiments/index"]),
        ("Learn", ["docs/learn/index", "ladder/index", "ARCHITECTURE", "cuda/*"]),
        ("More", ["docs/testing", "docs/reliability", "*"]),
    ],
}
HEADERS = {
    f"cuda/{name}.h": f"docs/api/c/{name}"
    for name in ("flash_attn", "flash_attn_transformer", "flash_attn_distributed")
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(#[^)\s]+)?(?=\))")
SCHEME = "repository:"  # of links to files that are no pages
log = logging.getLogger(__name__)


class Pages(Project):
    """The pages are the repository's own. A README is the page of its folder, which web servers call `index`."""

    def path2doc(self, filename):
        name = super().path2doc(filename)
        return name and re.sub(r"(^|/)README$", r"\1index", name)


def use_pages(app):
    app.project = app.env.project = Pages(app.srcdir, app.config.source_suffix)
    app.env.repository_links = {}


# ---- the sidebar ----


def placed(pages: set[str]) -> dict[str, list[tuple[str, list[str]]]]:
    """The groups, (caption, pages), below each page. A page stands below one other, or none (`index`)."""
    left = sorted(pages - {"index"})
    tree: dict[str, list[tuple[str, list[str]]]] = {}
    for parent, groups in CONTENTS.items():
        tree[parent] = []
        for caption, patterns in groups:
            names = []
            for pattern in patterns:
                names += [name for name in left if name != parent and fnmatchcase(name, pattern)]
                left = [name for name in left if name not in names]
            if names:
                tree[parent].append((caption, names))
    return tree


def read(app, page, source):
    """Before a page is parsed: its links to files get a scheme of their own, and the contents below it are appended."""
    here = posixpath.dirname(app.project.doc2path(page, absolute=False).as_posix())

    def marked(link):
        path = posixpath.normpath(posixpath.join(here, link[1]))
        if path.endswith(".md") or not (Path(app.srcdir) / path).is_file():
            return link[0]
        return f"{SCHEME}{path}{link[2] or ''}"

    text = re.sub(LINK, marked, source[0])
    text = re.sub(rf"(!\[[^\]]*\]\(){SCHEME}", lambda image: image[1] + "/", text)  # pictures are Sphinx's: /PATH
    for caption, names in placed(app.project.docnames).get(page, []):
        entries = "\n".join(f"/{name}" for name in names)
        head = f":caption: {caption}\n" if caption else ""
        text += f"\n\n```{{toctree}}\n:hidden:\n{head}\n{entries}\n```\n"
    source[0] = text


# ---- files that are no pages: what lies below docs is copied, a source file gets a page; both keep their path ----


def address_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in HEADERS:
        return HEADERS[path] + ".html"
    return path if path.startswith("docs/") and not path.endswith(".py") else path + ".html"


def link_files(app, doctree, page):
    links = app.env.repository_links
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith(SCHEME):
            path, _, symbol = node["refuri"].removeprefix(SCHEME).partition("#")
            links.setdefault(path, set()).add(symbol)
            up = posixpath.relpath(address_of(path), posixpath.dirname(page) or ".")
            node["refuri"] = up + (f"#{symbol}" if symbol else "")
            node["internal"] = True
            node["classes"] = [name for name in node["classes"] if name != "external"]


def source_pages(app):
    """(name, context, template) of a page for each source file that others link to, with the symbols as anchors."""
    for path, symbols in sorted(app.env.repository_links.items()):
        if path in HEADERS or address_of(path) == path:
            continue
        file = Path(app.srcdir) / path
        lexer = get_lexer_for_filename(path.replace(".cuh", ".cu")).aliases[0]
        code = app.builder.highlighter.highlight_block(file.read_text(), lexer)
        lines = code.split("\n")
        for symbol in sorted(symbols - {""}):
            try:
                at = line_of(file, symbol)
            except NotFound as error:
                log.warning("%s", error, location=path)
                continue
            start, tag, rest = lines[at - 1].partition("<pre>")  # of the first line alone
            before, after = (start + tag, rest) if tag else ("", start)
            lines[at - 1] = f'{before}<span class="symbol" id="{html.escape(symbol)}"></span>{after}'
        title = html.escape(path)
        breakable = re.sub(r"([/_])", r"\1<wbr>", title)
        body = "\n".join([f'<h1 class="source">{breakable}</h1>', *lines])
        yield path, {"title": title, "body": body}, "page.html"


def copy_files(app, error):
    if error or app.builder.format != "html":
        return
    for path in app.env.repository_links:
        if address_of(path) == path:
            target = Path(app.outdir) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(app.srcdir) / path, target)


def setup(app):
    app.connect("builder-inited", use_pages)
    app.connect("source-read", read)
    app.connect("doctree-resolved", link_files)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
