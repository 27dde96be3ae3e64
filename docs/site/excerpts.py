"""Excerpts in the results of a search, also from disk: page_texts.js has the texts of all pages."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

SCRIPT = "page_texts.js"


def collect(app, page, template, context, doctree):
    """The text of a page as it is written; the search page gets the scripts."""
    if page == "search":
        app.add_js_file(SCRIPT)
        app.add_js_file("excerpts.js")
    elif doctree is not None:
        body = re.sub(
            r'<a class="headerlink".*?</a>|<(style|script|svg)\b.*?</\1>', "", context["body"], flags=re.DOTALL
        )
        text = re.sub(r"</?(?:span|code|strong|em|a|b|i)\b[^>]*>", "", body)  # within a word
        text = html.unescape(re.sub(r"<[^>]+>", " ", text))
        app.page_texts[page] = " ".join(text.split())


def write(app, error):
    if not error and app.builder.format == "html":
        texts = json.dumps(app.page_texts, ensure_ascii=False, separators=(",", ":"))
        (Path(app.outdir) / "_static" / SCRIPT).write_text(f"const PAGE_TEXTS = {texts};\n")


def setup(app):
    app.page_texts = {}
    app.connect("html-page-context", collect)
    app.connect("build-finished", write)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
