"""safetensors files: uint64 little endian n, n bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}},
then the data, from whose start the offsets count. The name "__metadata__" holds a table of strings. This module reads
the format itself so that arrays stay views of the mapped file. It writes tensor by tensor, with a CRC-32 of each in the
metadata.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .._core.files import Fields, json_of, parse_json, quoted, read_file_size, replacing
from ..errors import BadArgument

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ALL = {**FLOATS, "U8": "uint8", "F8_E4M3": "uint8"}  # 8-bit floats are read as their bits
CHECKSUMS = "crc32"  # a key of the metadata: {name: CRC-32 of the bytes, 8 hexadecimal digits}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_RANK = 32  # the limit of older NumPy releases


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of this name; bfloat16 needs the ml_dtypes package."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise BadArgument(f"bfloat16 needs the ml_dtypes package (pip install ml_dtypes): {error}") from None
    return np.dtype(ml_dtypes.bfloat16)


Entry = tuple[str, tuple[int, ...], int, int]  # dtype, shape, begin, end


def _header(path: str | os.PathLike[str]) -> tuple[np.ndarray, dict[str, Entry], dict[str, str]]:
    """The file's data, its tensors by name, and its metadata."""
    size = read_file_size("safetensors file", path)
    if size < 8:
        raise bad_file(path, f"truncated: {size} bytes")
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    start = 8 + int(data[:8].view("<u8")[0])
    if start > size:
        raise bad_file(path, f"its header would end at byte {start}, but the file has {size}")
    if start > MAX_HEADER_BYTES:
        raise bad_file(path, f"its header would have {start - 8} bytes, more than {MAX_HEADER_BYTES}")
    where = f"safetensors file {str(path)!r}: its header is damaged"
    header = json_of(where, data[8:start].tobytes())
    metadata = dict(Fields(where, header).get("__metadata__", dict, {}))
    for name, text in metadata.items():
        if not isinstance(text, str):
            raise BadArgument(f"{where}: __metadata__ {quoted(name)}={quoted(text)} is no string")
    header.pop("__metadata__", None)
    entries = {name: _entry(where, name, entry) for name, entry in header.items()}
    return data[start:], entries, metadata


def _entry(where: str, name: str, entry: Any) -> Entry:
    fields = Fields(where, entry, f"{quoted(name)}.")
    shape, offsets = fields.ints("shape", 0, (1 << 63) - 1), fields.ints("data_offsets", 0, (1 << 63) - 1)
    if len(shape) > MAX_RANK or math.prod(filter(None, shape)) >= 1 << 60:  # an array of that size has no valid strides
        raise fields.refuse("shape", f"has more than {MAX_RANK} axes, or more elements than there are addresses")
    if len(offsets) != 2:
        raise fields.refuse("data_offsets", "is not [begin, end]")
    return fields.get("dtype", str), tuple(shape), *offsets


def _check_tiling(path: str | os.PathLike[str], entries: Mapping[str, Entry], size: int) -> None:
    """The format's own rule: every byte of the data belongs to one tensor."""
    at, before = 0, "the header"
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != at:
            what = "overlaps it" if begin < at else "leaves a gap"
            raise bad_file(path, f"tensor {quoted(name)} begins at {begin}, but {before} ends at {at}: that {what}")
        at, before = end, f"tensor {quoted(name)}"
    if at != size:
        raise bad_file(path, f"its last tensor ends at {at}, but its data have {size} bytes")


def bad_file(path: str | os.PathLike[str], why: str) -> BadArgument:
    return BadArgument(f"safetensors file {str(path)!r}: {why}")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    return _header(path)[2]


def read_safetensors(path: str | os.PathLike[str], dtypes: Mapping[str, str] = FLOATS) -> dict[str, np.ndarray]:
    """The file's tensors by name, as read-only views of the mapped file. dtypes: for each of the format's types that
    may be read, the NumPy dtype to read it as. Checksums in the metadata are compared."""
    data, entries, metadata = _header(path)
    checksums = _checksums(path, metadata)
    tensors = {}
    for name, (dtype, shape, begin, end) in entries.items():
        if dtype not in dtypes:
            raise bad_file(path, f"tensor {quoted(name)} has dtype {quoted(dtype)}: only {', '.join(dtypes)} are read")
        native = numpy_dtype(dtypes[dtype])
        wanted = math.prod(shape) * native.itemsize
        if not 0 <= begin <= end <= len(data) or end - begin != wanted:
            lies = f"but lies at {begin} .. {end} of {len(data)}: truncated or damaged"
            raise bad_file(path, f"tensor {quoted(name)} of {dtype} {shape} needs {wanted} bytes, {lies}")
        raw = data[begin:end]
        wanted_sum = checksums.get(name)
        if wanted_sum is not None and wanted_sum != _checksum(raw):
            why = f"is damaged: its CRC-32 is {_checksum(raw)}, not {quoted(wanted_sum)}"
            raise bad_file(path, f"tensor {quoted(name)} {why}")
        native = native if dtype == "BF16" else native.newbyteorder("<")
        if raw.ctypes.data % native.itemsize:  # the format's own library never writes such a file
            raw = raw.copy()
        tensors[name] = raw.view(native).reshape(shape)
    _check_tiling(path, entries, len(data))
    return tensors


def _checksums(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = parse_json(metadata.get(CHECKSUMS, "{}"))
        if not isinstance(found, dict):
            raise ValueError(f"{quoted(found)} is not an object")
    except ValueError as error:
        raise bad_file(path, f"its header is damaged: __metadata__.{CHECKSUMS}: {error}") from None
    return found


def _checksum(raw: np.ndarray) -> str:
    return f"{zlib.crc32(raw):08x}"


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, np.ndarray]],
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the tensors one after another, in the order of `shapes` (name -> (the format's dtype, shape)), so that a
    large model need not be in memory at once. If metadata is given, checksums are added to it."""
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
        text += b" " * (-len(text) % 8)  # aligns the start of the data
        return len(text).to_bytes(8, "little") + text

    with replacing(path) as file:
        file.write(head())
        for (name, array), (wanted, (code, shape)) in zip(tensors, shapes.items(), strict=True):
            if (name, array.dtype, array.shape) != (wanted, numpy_dtype(ALL[code]), shape):
                raise BadArgument(f"{name} is {array.dtype} {array.shape}: expected {wanted}, {code} {shape}")
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            checksums[name] = _checksum(raw)
            file.write(raw)
        file.seek(0)
        file.write(head())  # as long as before, now with the checksums
