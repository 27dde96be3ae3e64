"""python docs/site/build.py [FOLDER]: makes the documentation site (in build/site) and checks its links.

Needs Sphinx, furo, myst-parser (`pip install '.[docs]'`) and NumPy; no network. Warnings are errors.
"""

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from check import problems  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build/site")
    folder = parser.parse_args().folder.resolve()
    notes = folder.with_name(folder.name + ".doctrees")  # everything is read again: a page may have gone
    for old in (folder, notes):
        shutil.rmtree(old, ignore_errors=True)
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", str(HERE), "--doctree-dir", str(notes)]
    status = build_main([*options, "--builder", "html", str(ROOT), str(folder)])
    shutil.rmtree(notes, ignore_errors=True)
    if status:
        return status
    found = problems(folder)
    print("\n".join(found), file=sys.stderr)
    print(f"{folder / 'index.html'}: {len(list(folder.rglob('*.html')))} pages, {len(found)} dead or foreign links")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
