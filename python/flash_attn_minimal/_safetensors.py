"""safetensors files: uint64 little endian n, n bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}},
then the data, to which the offsets count. "__metadata__" among the names is a table of strings. Read here because the
arrays are to stay views of the mapped file; written here tensor by tensor, with a CRC-32 of each in the metadata.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._library import BadArgument

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ALL = {**FLOATS, "U8": "uint8", "F8_E4M3": "uint8"}  # 8-bit floats as their bits
CHECKSUMS = "crc32"  # of the metadata: {name: CRC-32 of the bytes, 8 hexadecimal digits}


def numpy_dtype(name: str) -> np.dtype:
    """bfloat16 is NumPy's by way of the ml_dtypes package."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise BadArgument(f"dtype='bfloat16' needs the ml_dtypes package (pip install ml_dtypes): {error}") from None
    return np.dtype(ml_dtypes.bfloat16)


def read_file_size(what: str, path: str | os.PathLike[str]) -> int:
    """The size of a regular file, or BadArgument that names it."""
    path = Path(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadArgument(f"{what} {str(path)!r}: {error.strerror}") from None
    if not path.is_file():
        raise BadArgument(f"{what} {str(path)!r} is not a file")
    return size


def _header(path: str | os.PathLike[str]) -> tuple[np.ndarray, dict[str, tuple], dict[str, str]]:
    """The file's data, {name: (dtype, shape, begin, end)}, metadata."""
    size = read_file_size("safetensors file", path)
    if size < 8:
        raise _bad(path, f"truncated: {size} bytes")
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    start = 8 + int(data[:8].view("<u8")[0])
    if start > size:
        raise _bad(path, f"its header would end at byte {start}, but the file has {size}")
    try:
        header = json.loads(data[8:start].tobytes())
        metadata = header.pop("__metadata__", None) or {}
        entries = {name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()}
        if any(not isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that are no strings")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(path, f"its header is damaged: {error!r}") from None
    return data[start:], entries, metadata


def _bad(path: str | os.PathLike[str], why: str) -> BadArgument:
    return BadArgument(f"safetensors file {str(path)!r}: {why}")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    return _header(path)[2]


def read_safetensors(path: str | os.PathLike[str], dtypes: Mapping[str, str] = FLOATS) -> dict[str, np.ndarray]:
    """The file's tensors by name: read-only views of the mapped file. `dtypes`: which of the format's types are read,
    and as what. Where the metadata hold checksums, they are compared."""
    data, entries, metadata = _header(path)
    try:
        checksums = json.loads(metadata[CHECKSUMS]) if CHECKSUMS in metadata else {}
        checksums = dict.fromkeys(entries) | dict(checksums)
    except (ValueError, TypeError) as error:
        raise _bad(path, f"its header is damaged: {error!r}") from None
    tensors = {}
    for name, (dtype, shape, begin, end) in entries.items():
        if dtype not in dtypes:
            raise _bad(path, f"tensor {name!r} has dtype {dtype!r}: only {', '.join(dtypes)} are read")
        native = numpy_dtype(dtypes[dtype])
        wanted = math.prod(shape) * native.itemsize
        if not 0 <= begin <= end <= len(data) or end - begin != wanted:
            raise _bad(
                path,
                f"tensor {name!r} of {dtype} {shape} needs {wanted} bytes, but lies at {begin} .. {end} "
                f"of {len(data)}: truncated or damaged",
            )
        raw = data[begin:end]
        if checksums[name] is not None and checksums[name] != _checksum(raw):
            raise _bad(path, f"tensor {name!r} is damaged: its CRC-32 is {_checksum(raw)}, not {checksums[name]}")
        native = native if dtype == "BF16" else native.newbyteorder("<")
        if raw.ctypes.data % native.itemsize:  # never written so by the format's own library
            raw = raw.copy()
        tensors[name] = raw.view(native).reshape(shape)
    return tensors


def _checksum(raw: np.ndarray) -> str:
    return f"{zlib.crc32(raw):08x}"


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, np.ndarray]],
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the tensors one after another, in the order of `shapes` (name -> (the format's dtype, shape)), so that a
    large model need not be in memory at once. With metadata, checksums join them."""
    header: dict[str, Any] = {}
    checksums = dict.fromkeys(shapes, "0" * 8)
    at = 0
    for name, (code, shape) in shapes.items():
        end = at + math.prod(shape) * numpy_dtype(ALL[code]).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end

    def head() -> bytes:
        more = {"__metadata__": {**metadata, CHECKSUMS: json.dumps(checksums)}} if metadata is not None else {}
        text = json.dumps({**more, **header}).encode()
        text += b" " * (-len(text) % 8)  # the data start aligned
        return len(text).to_bytes(8, "little") + text

    part = Path(f"{os.fspath(path)}.part")  # an older file stays until the new one is whole
    try:
        with open(part, "wb") as file:
            file.write(head())
            for (name, array), (wanted, (code, shape)) in zip(tensors, shapes.items(), strict=True):
                if (name, array.dtype, array.shape) != (wanted, numpy_dtype(ALL[code]), shape):
                    raise BadArgument(f"{name} is {array.dtype} {array.shape}: expected {wanted}, {code} {shape}")
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                checksums[name] = _checksum(raw)
                file.write(raw)
            file.seek(0)
            file.write(head())  # of the same length
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
