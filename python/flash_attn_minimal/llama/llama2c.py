"""llama2.c checkpoints, memory-mapped.

The three formats are little endian: a header, then tensors without padding, row-major. A tensor that each layer has is
stored for all layers together.

v0      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len. A negative vocab_size means that
        the classifier is not tied to the embedding and is at the end of the file. The body is float32 and includes two
        RoPE tables, which are not read.
v1      256 bytes: "24ka", int32 1, the same 7 int32 (vocab_size positive), uint8 1 = tied classifier, zeros. float32.
v2      the header of v1 with int32 2 and, after the tied flag, int32 group size. Norms float32; every matrix int8,
        followed by one float32 factor for each group of consecutive values: value = int8 * factor.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._core.files import read_file_size, replacing
from ..errors import BadArgument
from .checkpoint import LAYERED, Checkpoint, bad_checkpoint, matrix_shapes
from .config import Config

MAGIC = b"24ka"
V0_HEADER = struct.Struct("<7i")
V1_HEADER = struct.Struct("<4si7iB")
V2_HEADER = struct.Struct("<4si7iBi")
V1_HEADER_BYTES = 256


def tensor_shapes(config: Config, version: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the body's tensors in file order."""
    dim, layers, vocab = config.dim, config.n_layers, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"token_embedding": (vocab, dim), "rms_final": (dim,), "wcls": (vocab, dim)}
    shapes |= {"rms_att": (layers, dim), "rms_ffn": (layers, dim)}
    shapes |= {name: (layers, *shape) for name, shape in matrix_shapes(config).items()}
    attention, ffn = ("wq", "wk", "wv", "wo"), ("w1", "w2", "w3")
    if version == 0:
        tables = ("freq_cis_real", "freq_cis_imag")  # not used
        shapes |= dict.fromkeys(tables, (config.seq_len, config.head_dim // 2))
        order = "token_embedding", "rms_att", *attention, "rms_ffn", *ffn, "rms_final", *tables
    else:
        order = "rms_att", "rms_ffn", "rms_final", "token_embedding", *attention, *ffn
    return {name: shapes[name] for name in (*order, *(() if tied else ("wcls",)))}


def header_bytes(version: int) -> int:
    return V0_HEADER.size if version == 0 else V1_HEADER_BYTES


def checkpoint_bytes(config: Config, version: int, tied: bool, group: int = 0) -> int:
    """The exact size of the file; `group` is for version 2."""
    size = header_bytes(version)
    for name, shape in tensor_shapes(config, version, tied).items():
        count = math.prod(shape)
        size += count + 4 * (count // group) if version == 2 and not name.startswith("rms") else 4 * count
    return size


class Quantised(Sequence):
    """One matrix of a v2 file, for each layer; an item becomes float32 when it is read."""

    def __init__(self, body: np.ndarray, layers: int, shape: tuple[int, int], group: int):
        self.layers = body.reshape(layers, -1)  # uint8: the int8 values of a layer, then its factors
        self.shape, self.group = shape, group

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> np.ndarray:
        raw, count = self.layers[layer], math.prod(self.shape)
        values = raw[:count].view(np.int8).reshape(-1, self.group)
        factors = np.frombuffer(raw[count:].tobytes(), "<f4")  # a copy, because they may be unaligned in the file
        return (values * factors[:, None]).reshape(self.shape)


def _read_header(path: str | os.PathLike[str], size: int) -> tuple[int, bool, Config, int]:
    """(version, tied, config, group size)"""
    try:
        with open(path, "rb") as file:
            header = file.read(V1_HEADER_BYTES)
    except OSError as error:
        raise bad_checkpoint(path, f": {error.strerror}") from None
    if header.startswith(MAGIC):
        if size < V1_HEADER_BYTES:
            raise bad_checkpoint(path, f" is truncated: {size} bytes are less than its {V1_HEADER_BYTES}-byte header")
        _, version, *shape, tied, group = V2_HEADER.unpack_from(header)
        if version not in (1, 2):
            raise bad_checkpoint(path, f" has format version {version}: 0, 1 and 2 are read")
        return version, bool(tied), Config(*shape), group
    if size < V0_HEADER.size:
        raise bad_checkpoint(path, f" is truncated: {size} bytes are less than its {V0_HEADER.size}-byte header")
    *shape, vocab_size, seq_len = V0_HEADER.unpack_from(header)
    return 0, vocab_size > 0, Config(*shape, abs(vocab_size), seq_len), 0


def load_llama2c(path: str | os.PathLike[str]) -> Checkpoint:
    """Maps a llama2.c checkpoint. Raises BadArgument for any other or damaged file."""
    size = read_file_size("checkpoint", path)
    version, tied, config, group = _read_header(path, size)
    problem = config.problem()
    if version == 2 and not problem:
        counts = [math.prod(shape) for shape in matrix_shapes(config).values()]
        counts.append(config.vocab_size * config.dim)
        if group < 1 or any(count % group for count in counts):
            problem = f"group_size={group}, which does not divide every matrix"
    if problem:
        raise bad_checkpoint(path, f" is no llama2.c checkpoint: its header says {problem}")
    expected = checkpoint_bytes(config, version, tied, group)
    if size != expected:
        what = "is truncated" if size < expected else f"has {size - expected} trailing bytes"
        raise bad_checkpoint(path, f" {what}: {size} bytes where its header ({config}) needs {expected}")
    body = np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=header_bytes(version)))
    tensors, at = {}, 0
    for name, shape in tensor_shapes(config, version, tied).items():
        count = math.prod(shape)
        if version == 2 and not name.startswith("rms"):
            end = at + count + 4 * (count // group)
            layers = Quantised(body[at:end], math.prod(shape[:-2]), shape[-2:], group)
            tensors[name] = layers if name in LAYERED else layers[0]
        else:
            end = at + 4 * count
            tensors[name] = body[at:end].view("<f4").reshape(shape)
        at = end
    dtype = "int8" if version == 2 else "float32"
    return Checkpoint(os.fspath(path), f"llama2.c v{version}", tied, config, dtype, tensors)


def save_checkpoint(
    path: str | os.PathLike[str], config: Config, tensors: Mapping[str, Any], version: int = 0, tied: bool = True
) -> None:
    """Writes a checkpoint. `tensors` has the names and shapes of tensor_shapes (or is as a Checkpoint holds them); the
    values are converted to float32. The unread tables of version 0 may be left out and become zeros."""
    if version not in (0, 1):
        raise BadArgument(f"version={version} is neither 0 nor 1")
    if problem := config.problem():
        raise BadArgument(f"config: {problem}")
    if not config.is_llama2c:
        raise BadArgument(f"config ({config}) has constants that a llama2.c checkpoint cannot carry")
    *shape, vocab_size, seq_len = config.shape
    if version == 0:
        header = V0_HEADER.pack(*shape, vocab_size if tied else -vocab_size, seq_len)
    else:
        header = V1_HEADER.pack(MAGIC, 1, *shape, vocab_size, seq_len, tied).ljust(V1_HEADER_BYTES, b"\0")
    shapes = tensor_shapes(config, version, tied)
    for name, wanted in shapes.items():
        if name not in tensors and not name.startswith("freq"):
            raise BadArgument(f"tensors lacks {name}, of shape {wanted}")
    with replacing(path) as file:
        file.write(header)
        for name, wanted in shapes.items():
            values = tensors[name] if name in tensors else np.zeros(wanted)
            found = values.shape if isinstance(values, np.ndarray) else (len(values), *values[0].shape)
            if found != wanted:
                raise BadArgument(f"{name} has shape {found}: expected {wanted}")
            for array in values if name in LAYERED else [values]:
                file.write(np.ascontiguousarray(array, "<f4").tobytes())
