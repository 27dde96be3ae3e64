"""Shared by the laboratory's reports: the commit, tables, a style of plots."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

STYLE = {  # for matplotlib's rcParams
    "figure.dpi": 150,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "flash-attn-minimal",
}


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join(" --- " for _ in head) + "|",
        *("| " + " | ".join(line) + " |" for line in body),
    ]


def show_table(title: str, head: list[str], body: list[list[str]], left: int = 1) -> None:
    """Prints a table, with rich if it is installed. The first `left` columns are text."""
    if importlib.util.find_spec("rich") is None:
        print("", title, "", *table(head, body), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"\n{title}", highlight=False)
    grid = Table()
    for number, name in enumerate(head):
        grid.add_column(name, justify="left" if number < left else "right", no_wrap=number < left)
    for cells in body:
        grid.add_row(*cells)
    console.print(grid)


def commit() -> str | None:
    """$FLASH_ATTN_COMMIT, else the commit of the repository that contains this package, with " with changes" if its
    sources differ from that commit; None without a repository."""
    if named := os.environ.get("FLASH_ATTN_COMMIT"):
        return named
    here = Path(__file__).resolve().parent
    for folder in here.parents:
        if (folder / "cuda" / "flash_attn.h").is_file() and (folder / ".git").exists():
            git = ["git", "-C", str(folder)]
            try:
                head = subprocess.run(
                    [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True, timeout=60
                )
                clean = subprocess.run(
                    [*git, "diff", "--quiet", "HEAD", "--", "cuda", "python", "CMakeLists.txt"], timeout=60
                )
            except (OSError, subprocess.SubprocessError):
                return None
            return head.stdout.strip() + ("" if clean.returncode == 0 else " with changes")
    return None
