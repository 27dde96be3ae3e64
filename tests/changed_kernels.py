"""The kernels whose code has changed since a campaign ran them.

python tests/changed_kernels.py            since the last campaign of each kernel in docs/reliability
python tests/changed_kernels.py COMMIT     since this commit

A change is one of code: comments, lines of #include and the places of files do not count. It needs the history of the
repository, and a built library for the tables of kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "package"))

import reliability_table  # noqa: E402
import test_kernel_rows  # noqa: E402
import test_layers  # noqa: E402

RENAMED = {"mla_sm90": "decode_mla_sm90"}  # since the last campaign
TABLES = {"4 bits": "w4_linear", "chain": "w4_linear_chain"}  # as the page calls them -> as kernel_tables() does
Kernel = tuple[str, str]  # table, name


def code(text: str) -> str:
    """A source without what does not change its machine code."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|#\s*(?:include|pragma once)[^\n]*", "", text, flags=re.DOTALL)
    return "".join(text.split())


def git(*words: str, stdin: str = "") -> str:
    command = ["git", "-C", str(test_layers.ROOT), *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout


def code_at(commit: str) -> set[str]:
    """The code of every file of cuda/ at a commit. Where a file lay does not matter."""
    names = [name for name in git("ls-tree", "-r", "--name-only", commit, "cuda").split() if not name.endswith(".md")]
    return {code(git("show", f"{commit}:{name}")) for name in names}


def changed_files(before: set[str]) -> set[str]:
    return {file for file in test_layers.FILES if code((test_layers.CUDA / file).read_text()) not in before}


def sources() -> dict[Kernel, set[str]]:
    """Kernel -> the files that are compiled into it: its file or folder, and all that these include."""
    found: dict[Kernel, set[str]] = {}
    for file in test_kernel_rows.FILES:
        folder = test_layers.folder_of(file)
        files = {file} if not folder else {f for f in test_layers.FILES if test_layers.inside(f, folder)}
        todo = list(files)
        while todo:
            new = [f for f in test_layers.included(todo.pop()) if f in test_layers.FILES and f not in files]
            files.update(new)
            todo += new
        for kernel in test_kernel_rows.kernels_of(file):
            found.setdefault(kernel, set()).update(files)
    return found


def last_campaigns() -> dict[Kernel, str]:
    """Kernel -> the commit of the last campaign that ran it."""
    commits = reliability_table.last_commits().items()
    return {(TABLES.get(table, table), RENAMED.get(name, name)): commit for (table, name), commit in commits}


def main(arguments: list[str]) -> None:
    of_kernel = sources()
    since = dict.fromkeys(of_kernel, arguments[0]) if arguments else last_campaigns()
    for commit in sorted({since[kernel] for kernel in of_kernel if kernel in since}):
        files = changed_files(code_at(commit))
        kernels = sorted(kernel for kernel in of_kernel if since.get(kernel) == commit)
        shared = {file for file in files if sum(file in of_kernel[kernel] for kernel in kernels) > len(kernels) / 2}
        print(f"since {commit}, {len(kernels)} kernels; changed in most: {', '.join(sorted(shared)) or 'nothing'}")
        for kernel in kernels:
            own = sorted((of_kernel[kernel] & files) - shared)
            if own:
                print(f"    {' '.join(kernel):<36} {', '.join(own)}")
    for kernel in sorted(set(of_kernel) - set(since)):
        print(f"in no campaign: {' '.join(kernel)}")


if __name__ == "__main__":
    main(sys.argv[1:])
