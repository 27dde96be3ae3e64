"""What is wrong with a folder of HTML: links to what is not there, and anything that pages fetch from elsewhere."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {  # (tag, attribute) whose address a browser loads without being asked
    *((tag, "src") for tag in ("script", "img", "iframe", "audio", "video", "source", "track", "embed", "input")),
    *((tag, "href") for tag in ("link", "image", "use")),
    ("object", "data"),
    ("video", "poster"),
}
LINKED = {("a", "href"), ("area", "href"), ("form", "action")}
NOT_LOADED = {"canonical", "alternate", "author", "license", "next", "prev", "index", "search"}  # kinds of <link>
STYLE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


class Page(HTMLParser):
    """A page's anchors, and its addresses: (address, whether it is fetched)."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[tuple[str, bool]] = []
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.in_style = tag == "style"
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        loaded = not (tag == "link" and set((values.get("rel") or "").split()) <= NOT_LOADED)
        for name, value in attributes:
            if value is None:
                continue
            if (tag, name) in FETCHED:
                self.addresses.append((value, loaded))
            elif (tag, name) in LINKED:
                self.addresses.append((value, False))
            elif name == "srcset":
                self.addresses += [(part.split()[0], True) for part in value.split(",") if part.strip()]
            elif name == "style":
                self.addresses += styled(value)

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        if self.in_style:
            self.addresses += styled(data)

    def handle_endtag(self, tag):
        self.in_style = False


def styled(text: str) -> list[tuple[str, bool]]:
    return [(first or second, True) for first, second in STYLE.findall(text)]


def problems(folder: Path) -> list[str]:
    """A line for each dead link, dead anchor and foreign asset of the pages and style sheets below a folder."""
    folder = folder.resolve()
    page_of = cache(lambda path: Page(path.read_text()))
    found = []
    for path in sorted(folder.rglob("*.html")):
        found += [f"{path.relative_to(folder)}: {why}" for why in wrong(path, page_of(path).addresses, folder, page_of)]
    for path in sorted(folder.rglob("*.css")):
        found += [
            f"{path.relative_to(folder)}: {why}" for why in wrong(path, styled(path.read_text()), folder, page_of)
        ]
    return found


def wrong(path: Path, addresses, folder: Path, page_of):
    for address, fetched in dict.fromkeys(addresses):
        parts = urlsplit(address)
        if parts.scheme == "data" or (parts.scheme in ("http", "https", "mailto") and not fetched):
            continue
        if parts.scheme or parts.netloc:
            yield f"{address} is {'fetched from elsewhere' if fetched else 'no link of a page'}"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(folder) or parts.path.startswith("/"):
            yield f"{address} is outside the site"
        elif not target.is_file():
            yield f"{address} is not there"
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page_of(target).anchors:
            yield f"{address} has no such anchor"
