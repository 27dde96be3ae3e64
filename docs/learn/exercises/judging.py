"""Runs the judge of an exercise on the reader's function, or with --solution on ours, and says what came of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np


class Wrong(AssertionError):
    """What the judge found. The text says which call, and what was expected."""


def require(condition: bool, text: str):
    if not condition:
        raise Wrong(text)


def close(what: str, got, want, tolerance: float = 1e-10):
    """`got` has the shape of `want`, infinities in the same places, and is elsewhere no further away than tolerance."""
    got, want = np.asarray(got), np.asarray(want)
    require(got.shape == want.shape, f"{what}: the shape is {got.shape}, expected {want.shape}")
    require(not np.isnan(got).any(), f"{what}: {int(np.isnan(got).sum())} of {got.size} numbers are NaN")
    infinite = np.isinf(want)
    places = infinite != np.isinf(got)
    places |= infinite & (got != want)
    places |= ~infinite & (np.abs(np.where(infinite, 0, got) - np.where(infinite, 0, want)) > tolerance)
    if places.any():
        at = tuple(int(i) for i in np.argwhere(places)[0]) if want.ndim else ()
        count = f"{int(places.sum())} of {want.size} are wrong"
        raise Wrong(f"{what}: {count}, the first at {at}: got {got[at]:.6g}, expected {want[at]:.6g}")


def load(path: Path):
    """The module of a file, whatever the file is called."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(judge: Callable, functions: dict[str, Callable]) -> str:
    """What the judge says of the functions that an exercise asks for; "passed" if nothing is wrong."""
    try:
        judge(**functions)
    except NotImplementedError as error:
        return f"not written yet: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    return "passed"


def main(names: dict):
    """The end of every exercise file: main(globals())."""
    path = Path(names["__file__"]).resolve()
    if sys.argv[1:] == ["--solution"]:
        names = {**names, **vars(load(path.parent.parent / "solutions" / path.name))}
    elif sys.argv[1:]:
        sys.exit(f"usage: python {path.name} [--solution]")
    said = verdict(names["judge"], {name: names[name] for name in names["TO_WRITE"]})
    print(f"{path.stem}: {said}")
    sys.exit(said != "passed")
