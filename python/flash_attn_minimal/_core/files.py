"""Helpers of all readers of files. Whatever a file contains, a reader returns a value, raises BadArgument that names
the file and the field, or raises an OSError."""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ..errors import BadArgument

MAX_TEXT_BYTES = 1 << 28  # limit for a tokenizer or JSON file, which is read whole: real ones have a few MB
SMALLEST, LARGEST = 1e-30, 1e30  # bounds of a constant: it fits float32, and float64 results of it stay finite

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 10
_short.maxlevel = 4


def quoted(value: Any) -> str:
    """repr(value), shortened: a value from a file can be of any length and depth."""
    return _short.repr(value)


def read_file_size(what: str, path: str | os.PathLike[str]) -> int:
    """The size of a regular file, or BadArgument that names it."""
    path = Path(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadArgument(f"{what} {str(path)!r}: {error.strerror}") from None
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise BadArgument(f"{what} {str(path)!r}: no file can have this name: {error}") from None
    if not path.is_file():
        raise BadArgument(f"{what} {str(path)!r} is not a file")
    return size


def read_bytes(what: str, path: str | os.PathLike[str]) -> bytes:
    """A whole file of at most MAX_TEXT_BYTES."""
    size = read_file_size(what, path)
    if size > MAX_TEXT_BYTES:
        raise BadArgument(f"{what} {str(path)!r} has {size} bytes: more than {MAX_TEXT_BYTES} are not read")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadArgument(f"{what} {str(path)!r}: {error.strerror}") from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is complete; until then an older file stays."""
    part = Path(f"{os.fspath(path)}.part")
    try:
        with open(part, "wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_inside(folder: Path, name: str) -> bool:
    """Whether a name from a file refers to a place inside the folder. A bare name may be a symbolic link to anywhere,
    as in the download caches of models. A path of several parts must stay inside after its links are resolved."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        return False
    try:
        return len(parts) == 1 or (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle, a lone surrogate
        return False


def parse_json(text: bytes | str) -> Any:
    """The parsed text. Raises ValueError for invalid JSON, for a name that occurs twice in one object, and for nesting
    that is too deep."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_of(where: str, text: bytes | str) -> Any:
    """parse_json whose error is a BadArgument that begins with `where`."""
    try:
        return parse_json(text)
    except BadArgument:
        raise
    except ValueError as error:
        raise BadArgument(f"{where}: {error}") from None


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{quoted(name)} stands twice in an object")
        found[name] = value
    return found


def is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_constant(value: Any) -> bool:
    """Whether a value is a number from SMALLEST to LARGEST; NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


class Fields:
    """The fields of a JSON object, each read with its type. Errors begin with `where` and quote the field and value."""

    def __init__(self, where: str, fields: Any, prefix: str = ""):
        if not isinstance(fields, Mapping):
            raise BadArgument(f"{where}: {prefix.rstrip('.')}{'=' * bool(prefix)}{quoted(fields)} is not an object")
        self.where, self.fields, self.prefix = where, fields, prefix

    def refuse(self, name: str, why: str) -> BadArgument:
        return BadArgument(f"{self.where}: {self.prefix}{name}={quoted(self.fields.get(name))} {why}")

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            wanted = kind.__name__ if isinstance(kind, type) else "number"
            raise self.refuse(name, f"is not {'an' if wanted == 'int' else 'a'} {wanted}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, (int, float), default)
        if not is_constant(value):
            raise self.refuse(name, f"is not a positive number from {SMALLEST:g} to {LARGEST:g}")
        return float(value)

    def ints(self, name: str, low: int, high: int) -> list[int]:
        values = self.get(name, list)
        if not all(is_int(value, low, high) for value in values):
            raise self.refuse(name, f"is not a list of integers from {low} to {high}")
        return values

    def must_be(self, name: str, *values: Any) -> None:
        """Raises unless the field has one of these values; the first is the default."""
        if self.fields.get(name, values[0]) not in values:
            raise self.refuse(name, f"is not understood (only {', '.join(map(repr, values))})")
