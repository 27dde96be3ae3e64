"""A Llama model's shape and the constants of its formulas, for all file formats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._core.files import LARGEST, SMALLEST, is_constant, is_int, quoted

MAX_DIMENSION = 1 << 24  # far above any Llama model's; text or another format, read as int32, gives larger numbers


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is stretched to a context longer than that of the first training. "linear" divides all frequencies by
    `factor`. "llama3" divides only the slow ones, with a ramp between low_freq_factor and high_freq_factor turns in the
    original context.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def problem(self) -> str | None:
        """Describes the first impossible number, or None."""
        if self.kind not in ("linear", "llama3"):
            return f"kind={quoted(self.kind)} is neither 'linear' nor 'llama3'"
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            if not is_constant(getattr(self, name)):
                return f"{name}={quoted(getattr(self, name))} is not a number from {SMALLEST:g} to {LARGEST:g}"
        if self.low_freq_factor >= self.high_freq_factor:
            return f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor}"
        if not is_int(self.original_context, 1, MAX_DIMENSION):
            return f"original_context={quoted(self.original_context)} is outside 1 .. {MAX_DIMENSION}"
        return None

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_context * frequencies / (2 * np.pi)  # of each pair over the original context
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(ramp, 0, 1)  # 1: a fast pair, unchanged; 0: a slow one, divided
        return kept * frequencies + (1 - kept) * frequencies / self.factor


_SHAPE = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


@dataclass(frozen=True)
class Config:
    """The first seven fields are those of a llama2.c header, in its order; the others default to llama2.c's
    constants."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int  # the context: positions 0 .. seq_len - 1
    head_size: int = 0  # 0 = dim / n_heads
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = True  # RoPE rotates pairs (2i, 2i + 1) of a head, else pairs (i, i + head_dim / 2)
    window: int = 0  # the number of keys that a row sees, its own included; 0 = all keys up to its own

    @property
    def head_dim(self) -> int:
        return self.head_size or self.dim // self.n_heads

    @property
    def shape(self) -> tuple[int, ...]:
        """The seven numbers of a llama2.c header."""
        return tuple(getattr(self, name) for name in _SHAPE)

    @property
    def is_llama2c(self) -> bool:
        """Whether a llama2.c checkpoint, whose header has only the seven numbers, can hold this model."""
        return self == Config(*self.shape)

    def problem(self) -> str | None:
        """Describes the first impossible number, or None."""
        for name, value in zip(_SHAPE, self.shape, strict=True):
            if not is_int(value, 1, MAX_DIMENSION):
                return f"{name}={quoted(value)} is outside 1 .. {MAX_DIMENSION}"
        for name in ("head_size", "window"):
            if not is_int(getattr(self, name), 0, MAX_DIMENSION):
                return f"{name}={quoted(getattr(self, name))} is outside 0 .. {MAX_DIMENSION}"
        for name in ("rms_eps", "rope_theta"):
            if not is_constant(getattr(self, name)):
                return f"{name}={quoted(getattr(self, name))} is not a number from {SMALLEST:g} to {LARGEST:g}"
        if not isinstance(self.rope_interleaved, bool):
            return f"rope_interleaved={quoted(self.rope_interleaved)} is not a bool"
        if not isinstance(self.rope_scaling, (RopeScaling, type(None))):
            return f"rope_scaling={quoted(self.rope_scaling)} is not an object"
        if self.rope_scaling and (problem := self.rope_scaling.problem()):
            return f"rope_scaling: {problem}"
        if not self.head_size and self.dim % self.n_heads:
            return f"dim={self.dim} is not a multiple of n_heads={self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            return f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
        if self.head_dim % 2 or not 0 < self.head_dim <= 512:
            name = "head_dim" if self.head_size else "dim / n_heads"
            return f"{name} = {self.head_dim} is not an even head size up to 512"
        return None

    def rope_tables(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, float32 (positions, head_dim / 2): pair i of a head at position t is rotated by the angle
        t * theta^(-2i / head_dim), or by a smaller one with rope_scaling."""
        frequencies = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        if self.rope_scaling:
            frequencies = self.rope_scaling(frequencies)
        angles = np.outer(np.arange(positions), frequencies)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def __str__(self) -> str:
        extras = f", window {self.window}" if self.window else ""
        return (
            f"dim {self.dim}, hidden {self.hidden_dim}, {self.n_layers} layers, {self.n_heads} heads "
            f"({self.n_kv_heads} kv) of {self.head_dim}, vocabulary {self.vocab_size}, context {self.seq_len}{extras}"
        )
