"""Makes the table of docs/reliability.md from the reports beside it.

python tests/reliability_table.py     writes the table again"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs/reliability.md"
TABLES = {
    "flash_attn_func": "forward",
    "flash_attn_varlen_func": "forward",
    "flash_attn_with_kvcache": "forward",
    "backward": "backward",
    "linear": "linear",
    "linear (4 bits)": "4 bits",
    "linear_chain": "chain",
}
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


def report(name: str) -> dict:
    return json.loads((PAGE.parent / f"reliability/{name}.json").read_text())


def campaigns() -> list[dict]:
    """The campaigns of single calls on the GPU, in the order of their dates."""
    files = [json.loads(path.read_text()) for path in (PAGE.parent / "reliability").glob("fuzz_cuda*.json")]
    found = [campaign for data in files for campaign in data.get("campaigns", [data])]
    return sorted(found, key=lambda campaign: campaign["date"])


def key(row: dict) -> tuple[str, str]:
    """(table, kernel or operation)"""
    table = TABLES.get(row["function"], "operation")
    return table, row["function"] if table == "operation" else row["kernel"]


def outcomes() -> dict[tuple[str, str], Counter]:
    """(table, kernel or operation) -> the number of its cases on the GPU with each outcome."""
    found: dict[tuple[str, str], Counter] = {}
    for campaign in campaigns():
        for row in campaign["counts"]:
            if key(row)[1]:
                found.setdefault(key(row), Counter())[row["outcome"]] += row["cases"]
    return found


def last_commits() -> dict[tuple[str, str], str]:
    """(table, kernel or operation) -> the commit of the last campaign with right results of it."""
    return {
        key(row): campaign["commit"][:7]
        for campaign in campaigns()
        for row in campaign["counts"]
        if key(row)[1] and row["outcome"] == "passed"
    }


def rows(name: str, *key: str) -> list[dict]:
    """The rows of a report. For kernels that have changed since, the rows of the last campaign replace them."""
    found: dict[tuple, list[dict]] = {}
    for campaign in (report(name), *report(f"{name}_changed_kernels")["campaigns"]):
        newer: dict[tuple, list[dict]] = {}
        for row in campaign["rows"]:
            newer.setdefault(tuple(row[k] for k in key), []).append(row)
        found |= newer
    return [row for of_key in found.values() for row in of_key]


def marks(rows: list[str]) -> str:
    return "-" if not rows else "ok" if set(rows) == {"ok"} else "findings"


def table() -> str:
    first, again, load = rows("first_calls", "call"), report("repeats")["rows"], rows("load", "call")
    tools = rows("sanitizers", "call", "tool")
    lines = [
        "| table | kernel | last campaign | right | refused by name | wrong calls refused | first calls | 1000 times "
        "| under load | " + " | ".join(TOOLS) + " |",
        "|" + "---|" * (9 + len(TOOLS)),
    ]
    commits = last_commits()
    for (kind, name), found in sorted(outcomes().items()):
        of = lambda rows, name=name: [row["outcome"] for row in rows if row["call"] == name]  # noqa: E731
        cells = [kind, f"`{name}`", commits.get((kind, name), "-")]
        cells += [str(found[outcome]) for outcome in ("passed", "refused", "rejected")]
        cells += [marks(of(first)), marks(of(again)), marks(of(load))]
        for tool in TOOLS:
            errors = [row["errors"] for row in tools if row["call"] == name and row["tool"] == tool]
            cells.append("-" if not errors else "clean" if errors == [0] else f"{errors[0] or 'see'} reports")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    before, rest = PAGE.read_text().split("<!-- table -->\n")
    return before + "<!-- table -->\n" + table() + "<!-- end of table -->\n" + rest.split("<!-- end of table -->\n")[1]


if __name__ == "__main__":
    PAGE.write_text(page())
