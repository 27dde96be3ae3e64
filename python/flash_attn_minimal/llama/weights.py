"""llama2.c checkpoints: the two float32 formats, memory-mapped.

Both are little endian: a header, then float32 tensors without padding, row-major, each per-layer tensor stored for all
layers together.

v0      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len. A negative vocab_size says that
        the classifier is not tied to the embedding and stands at the end of the file. The body carries two RoPE tables
        that nothing reads.
v1      256 bytes: "24ka", int32 1, the same 7 int32 (vocab_size positive), uint8 1 = tied classifier, zeros.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from .._library import BadArgument

MAGIC = b"24ka"
V0_HEADER = struct.Struct("<7i")
V1_HEADER = struct.Struct("<4si7iB")
V1_HEADER_BYTES = 256
MAX_HEADER_NUMBER = (
    1 << 24
)  # no dimension of a Llama model comes near; text or another format read as int32 goes beyond


@dataclass(frozen=True)
class Config:
    """The shape of a model, in the order of the file header."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def problem(self) -> str | None:
        """What makes these numbers impossible, or None."""
        for name, value in vars(self).items():
            if not 0 < value <= MAX_HEADER_NUMBER:
                return f"{name}={value} is outside 1 .. {MAX_HEADER_NUMBER}"
        if self.dim % self.n_heads:
            return f"dim={self.dim} is not a multiple of n_heads={self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            return f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
        if self.head_dim % 2 or self.head_dim > 512:
            return f"dim / n_heads = {self.head_dim} is not an even head size up to 512"
        return None

    def __str__(self) -> str:
        return (
            f"dim {self.dim}, hidden {self.hidden_dim}, {self.n_layers} layers, {self.n_heads} heads "
            f"({self.n_kv_heads} kv) of {self.head_dim}, vocabulary {self.vocab_size}, context {self.seq_len}"
        )


def tensor_shapes(config: Config, version: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the body's tensors in file order; matrices are (..., out, in)."""
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = astuple(config)
    hs = config.head_dim
    embedding = {"token_embedding": (vocab, dim)}
    rms_att, rms_ffn, rms_final = {"rms_att": (layers, dim)}, {"rms_ffn": (layers, dim)}, {"rms_final": (dim,)}
    attention = {
        "wq": (layers, heads * hs, dim),
        "wk": (layers, kv_heads * hs, dim),
        "wv": (layers, kv_heads * hs, dim),
        "wo": (layers, dim, heads * hs),
    }
    ffn = {"w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "w3": (layers, hidden, dim)}
    classifier = {} if tied else {"wcls": (vocab, dim)}
    if version == 0:
        unused = {"freq_cis_real": (seq_len, hs // 2), "freq_cis_imag": (seq_len, hs // 2)}
        return {**embedding, **rms_att, **attention, **rms_ffn, **ffn, **rms_final, **unused, **classifier}
    return {**rms_att, **rms_ffn, **rms_final, **embedding, **attention, **ffn, **classifier}


def header_bytes(version: int) -> int:
    return V0_HEADER.size if version == 0 else V1_HEADER_BYTES


def checkpoint_bytes(config: Config, version: int, tied: bool) -> int:
    """The exact size of the file."""
    floats = sum(math.prod(shape) for shape in tensor_shapes(config, version, tied).values())
    return header_bytes(version) + 4 * floats


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file; every tensor is a read-only float32 view of the mapped file, read when it is first used."""

    path: str
    version: int
    tied: bool  # the classifier is the embedding
    config: Config
    tensors: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors["token_embedding" if name == "wcls" and self.tied else name]


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


def _read_header(path: str | os.PathLike[str], size: int) -> tuple[int, bool, Config]:
    try:
        with open(path, "rb") as file:
            header = file.read(V1_HEADER_BYTES)
    except OSError as error:
        raise BadArgument(f"checkpoint {str(path)!r}: {error.strerror}") from None
    if header.startswith(MAGIC):
        if size < V1_HEADER_BYTES:
            raise BadArgument(
                f"checkpoint {str(path)!r} is truncated: {size} bytes are less than its {V1_HEADER_BYTES}-byte header"
            )
        _, version, *shape, tied = V1_HEADER.unpack_from(header)
        if version != 1:
            raise BadArgument(f"checkpoint {str(path)!r} has format version {version}: 0 and 1 (float32) are read")
        return 1, bool(tied), Config(*shape)
    if size < V0_HEADER.size:
        raise BadArgument(
            f"checkpoint {str(path)!r} is truncated: {size} bytes are less than its {V0_HEADER.size}-byte header"
        )
    *shape, vocab_size, seq_len = V0_HEADER.unpack_from(header)
    return 0, vocab_size > 0, Config(*shape, abs(vocab_size), seq_len)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Maps a llama2.c checkpoint of version 0 or 1. A file that is not exactly one raises BadArgument."""
    size = read_file_size("checkpoint", path)
    version, tied, config = _read_header(path, size)
    if problem := config.problem():
        raise BadArgument(f"checkpoint {str(path)!r} is no llama2.c checkpoint: its header says {problem}")
    expected = checkpoint_bytes(config, version, tied)
    if size != expected:
        what = "is truncated" if size < expected else f"has {size - expected} trailing bytes"
        raise BadArgument(f"checkpoint {str(path)!r} {what}: {size} bytes where its header ({config}) needs {expected}")
    body = np.asarray(np.memmap(path, dtype="<f4", mode="r", offset=header_bytes(version)))
    tensors, at = {}, 0
    for name, shape in tensor_shapes(config, version, tied).items():
        count = math.prod(shape)
        tensors[name] = body[at : at + count].reshape(shape)
        at += count
    return Checkpoint(os.fspath(path), version, tied, config, tensors)


def save_checkpoint(
    path: str | os.PathLike[str], config: Config, tensors: Mapping[str, np.ndarray], version: int = 0, tied: bool = True
) -> None:
    """Writes a checkpoint; `tensors` by the names and shapes of tensor_shapes, converted to float32. The tables of
    version 0 that nothing reads may be left out and become zeros."""
    if version not in (0, 1):
        raise BadArgument(f"version={version} is neither 0 nor 1")
    if problem := config.problem():
        raise BadArgument(f"config: {problem}")
    *shape, vocab_size, seq_len = astuple(config)
    if version == 0:
        header = V0_HEADER.pack(*shape, vocab_size if tied else -vocab_size, seq_len)
    else:
        header = V1_HEADER.pack(MAGIC, 1, *shape, vocab_size, seq_len, tied).ljust(V1_HEADER_BYTES, b"\0")
    shapes = tensor_shapes(config, version, tied)
    for name, wanted in shapes.items():
        if name not in tensors and not name.startswith("freq"):
            raise BadArgument(f"tensors lacks {name}, of shape {wanted}")
    part = Path(f"{os.fspath(path)}.part")  # an older file stays until the new one is whole
    try:
        with open(part, "wb") as file:
            file.write(header)
            for name, wanted in shapes.items():
                values = tensors[name] if name in tensors else np.zeros(wanted)
                if np.shape(values) != wanted:
                    raise BadArgument(f"{name} has shape {np.shape(values)}: expected {wanted}")
                file.write(np.ascontiguousarray(values, "<f4").tobytes())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
