"""A model's tensors by name, from any source.

Names. Matrices are (out, in); names marked (layers) have one entry for each layer:

    token_embedding                       rms_att, rms_ffn (layers)                rms_final      wcls (unless tied)
    wq, wk, wv, wo, w1, w2, w3 (layers)   bq, bk, bv (layers; only some models)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import BadArgument
from .config import Config

STACKED = {"wqkv": ("wq", "wk", "wv"), "wo": ("wo",), "w13": ("w1", "w3"), "w2": ("w2",)}  # one product each
LAYERED = ("rms_att", "rms_ffn", "wq", "wk", "wv", "wo", "w1", "w2", "w3")


@dataclass(frozen=True)
class Checkpoint:
    """A model's description and tensors; each tensor is read when it is first used."""

    path: str
    format: str  # such as "llama2.c v0", for messages
    tied: bool  # the classifier is the embedding
    config: Config
    dtype: str  # of the matrices as stored: float32, float16, bfloat16, int8
    tensors: Mapping[str, Any]  # an array, or for the layered names a sequence of arrays

    def __getitem__(self, name: str) -> Any:
        return self.tensors["token_embedding" if name == "wcls" and self.tied else name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def parts(self, name: str, layer: int) -> list[Any]:
        """The stored arrays that make up a matrix of STACKED, from top to bottom; one array if it is stored whole."""
        if name in self.tensors:
            return [self.tensors[name][layer]]
        return [self.tensors[part][layer] for part in STACKED[name]]


def bad_checkpoint(path: str | os.PathLike[str], why: str) -> BadArgument:
    """why: begins with a space, or with a colon."""
    return BadArgument(f"checkpoint {str(path)!r}{why}")


def matrix_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """The matrices of one layer, (out, in)."""
    dim, hidden = config.dim, config.hidden_dim
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return {
        "wq": (q, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, q),
        "w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim),
    }  # fmt: skip
