"""Makes docs/learn/flash_attention.html, a page in one file: index.html with the style, modules and data inside.

python ladder/page/build.py             writes the page
python ladder/page/build.py --check     fails when the committed page is not what the sources make
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import recording

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/learn/flash_attention.html"
# Each imports only from those before it.
MODULES = ("algorithm.js", "gradients.js", "draw.js", "timeline.js", "below.js", "controls.js")

IMPORT = re.compile(r"^import \{[^}]*\} from \"\./(\w+\.js)\";\n", re.MULTILINE)
DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (?:(\w+)|\{([^}]*)\})", re.MULTILINE)


def script() -> str:
    """The modules as one script, without their imports. Raises SystemExit if two modules declare the same name."""
    parts, owner = [], {}
    for module in MODULES:
        text = (HERE / module).read_text()
        for name in IMPORT.findall(text):
            if name not in MODULES[: MODULES.index(module)]:
                raise SystemExit(f"{module} imports {name}, which does not come before it")
        for found in DECLARED.finditer(text):
            for name in re.findall(r"\w+", found[1] or found[2]):
                if name in owner:
                    raise SystemExit(f"{module} and {owner[name]} both declare {name}")
                owner[name] = module
        text = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)
        if re.search(r"^\s*import\b", text, re.MULTILINE) or "</script" in text:
            raise SystemExit(f"{module} has an import or a text that cannot be taken into the page")
        parts.append(text.strip())
    return "\n\n".join(parts)


def data(name: str) -> str:
    value = json.loads((HERE / name).read_text())
    if name == recording.FILE.name:
        recording.check(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")


def build() -> str:
    page = (HERE / "index.html").read_text()
    for place, text in {
        "/* style.css */": (HERE / "style.css").read_text().strip(),
        "/* script */": script(),
        "/* examples.json */": data("examples.json"),
        "/* trace.json */": data("trace.json"),
    }.items():
        if page.count(place) != 1:
            raise SystemExit(f"index.html has {page.count(place)} places for {place}")
        page = page.replace(place, text)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    arguments = parser.parse_args()
    page = build()
    if not arguments.check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit(f"{PAGE.name} is not what its sources make: run python ladder/page/build.py")


if __name__ == "__main__":
    main()
