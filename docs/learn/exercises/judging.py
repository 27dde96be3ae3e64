"""Runs the judge of an exercise on the reader's function, or with --solution on ours, and says what came of it."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import sys
import traceback
import types
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
    returned: dict[str, object] = {}  # by the last call of each

    def watched(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments, **options):
            returned[name] = function(*arguments, **options)
            return returned[name]

        return call

    try:
        judge(**{name: watched(name, function) for name, function in functions.items()})
    except NotImplementedError as error:
        return f"not written yet: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        written = [getattr(function, "__code__", None) for function in functions.values()]
        first = next((at for at, (code, _) in enumerate(frames) if code in written), None)
        if first is not None:  # it was raised by a function of the reader's, or by what that called
            file = frames[first][0].co_filename
            code, line = [frame for frame in frames[first:] if frame[0].co_filename == file][-1]
            return f"wrong: {code.co_name} raised {what}\n    line {line}: {linecache.getline(file, line).strip()}"
        if not returned:
            raise
        said = "; ".join(f"{name} returned {_short(value)}" for name, value in returned.items())
        return f"wrong: {said}, from which the judge cannot go on ({what})"
    return "passed"


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, tuple) and value:
        return f"({', '.join(map(_short, value))})"
    return "a generator" if isinstance(value, types.GeneratorType) else repr(value)[:60]


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
