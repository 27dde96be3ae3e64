"""Devices on which a model runs with flash attention, as in the product, or with standard attention, which keeps the
whole score matrix in memory.

Standard attention is a kernel of the library in a decode step on the host; elsewhere it uses array operations.
"""

from __future__ import annotations

import math
import time
from copy import copy
from typing import Any

import numpy as np

from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama import cuda, host
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.cuda import _bits
from flash_attn_minimal.llama.model import Array, Llama
from flash_attn_minimal.transformer import ops

ATTENTIONS = ("flash", "standard")


def _check(attention: str) -> None:
    if attention not in ATTENTIONS:
        raise BadArgument(f"attention={attention!r} is none of {', '.join(ATTENTIONS)}")


def on(model: Llama, device) -> Llama:
    """The same matrices with another device object of the same kind and dtypes."""
    other = copy(model)
    other.device = device
    return other


class Host(host.Host):
    """The host, with one of ATTENTIONS."""

    def __init__(self, attention: str = "flash", dtype: str = "float32", matrix_dtype: str = "float32"):
        _check(attention)
        super().__init__(dtype, matrix_dtype)
        self.attention = attention

    def attend(self, q, k, v, cache_k, cache_v, rows, rope, config: Config) -> np.ndarray:
        if self.attention == "flash":
            return super().attend(q, k, v, cache_k, cache_v, rows, rope, config)
        if q.shape[1] == 1:
            return super().attend(q, k, v, cache_k, cache_v, rows, rope, config, kernel="cpu_naive")
        return self.array(lambda: self._standard(q, k, v, cache_k, cache_v, rows, rope, config))

    def _standard(self, q, k, v, cache_k, cache_v, rows, rope, config: Config) -> np.ndarray:
        """`attend` in array operations."""
        batch, seqlen = q.shape[:2]
        positions = np.maximum(rows.lengths, 0)[:, None] + np.arange(seqlen)
        cos, sin = rope[0][positions], rope[1][positions]
        rotate(q, cos, sin, config.rope_interleaved)
        rotate(k, cos, sin, config.rope_interleaved)
        out = np.empty(q.shape, self.dtype)
        for b in range(batch):
            if rows.lengths[b] < 0:  # an idle slot
                out[b] = 0
                continue
            start, end = int(rows.lengths[b]), int(rows.lengths[b]) + seqlen
            keys, values = self._append(k[b], v[b], cache_k, cache_v, rows, b, start, end)
            out[b] = standard_attention(np, q[b : b + 1], keys, values, config.window)[0]
        return out

    def _append(self, k, v, cache_k, cache_v, rows, b, start, end):
        """Writes the new keys and values of sequence b to the cache; returns all keys and values of the sequence, as
        views if the cache is contiguous."""
        if rows.table is None:
            at = rows.first + b
            cache_k[at, start:end], cache_v[at, start:end] = k, v
            return cache_k[at : at + 1, :end], cache_v[at : at + 1, :end]
        page_size = cache_k.shape[1]
        row = np.arange(start, end)
        page, offset = rows.table[b, row // page_size], row % page_size
        cache_k[page, offset], cache_v[page, offset] = k, v
        pages = rows.table[b, : -(-end // page_size)]
        keys, values = (c[pages].reshape(1, -1, *c.shape[2:])[:, :end] for c in (cache_k, cache_v))
        return keys, values

    def bandwidth(self) -> float:
        """The bytes per second that a large copy reads and writes."""
        source, target = np.ones(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
        best = math.inf
        for _ in range(3):
            started = time.perf_counter()
            np.copyto(target, source)
            best = min(best, time.perf_counter() - started)
        return 2 * source.nbytes / best

    def read_bandwidth(self, nbytes: int) -> float:
        """The bytes per second of a product with a matrix of nbytes, at most 256 MiB: the best of several. A matrix
        that fits into a cache is read from the cache, like a step's weights."""
        matrix = np.ones((max(1, min(nbytes, 1 << 28) // 4096), 1024), np.float32)
        vector, best = np.ones(1024, np.float32), math.inf
        for _ in range(5):
            started = time.perf_counter()
            matrix @ vector
            best = min(best, time.perf_counter() - started)
        return matrix.nbytes / best


class Cuda(cuda.Cuda):
    """The GPU, with one of ATTENTIONS."""

    def __init__(self, attention: str = "flash", dtype: str = "float32", cache_dtype: str | None = None):
        _check(attention)
        super().__init__(dtype, cache_dtype)
        self.attention = attention

    @property
    def reads_unfilled(self) -> bool:  # type: ignore[override]
        return self.attention == "standard"  # it multiplies the values there by 0

    def longest_bucket(self, longest: int, context: int) -> int:
        """Standard attention reads keys up to the next power of two, so that steps share a graph until the keys reach
        it."""
        return 0 if self.attention == "flash" else min(context, max(64, 1 << (longest - 1).bit_length()))

    def attend(self, q, k, v, cache_k, cache_v, rows, rope, config: Config) -> Any:
        if self.attention == "flash":
            return super().attend(q, k, v, cache_k, cache_v, rows, rope, config)
        return self._standard_attention(q, k, v, cache_k, cache_v, rows, rope, config)

    def _standard_attention(self, q, k, v, cache_k, cache_v, rows, rope, config: Config) -> Any:
        """Standard attention in array operations over the first rows.longest keys of every sequence, in which keys
        beyond a sequence's own are masked."""
        xp, (batch, seqlen, nheads, headdim), nheads_k = self.xp, q.shape, k.shape[2]
        own = xp.maximum(rows.lengths, 0)[:, None] + xp.arange(seqlen, dtype=np.int32)  # (batch, seqlen) positions
        for x in (q, k):
            ops.rope(x, *rope, positions=own, interleaved=config.rope_interleaved, out=x)
        keys, values = self._append_and_gather(k, v, cache_k, cache_v, rows, own)
        column = xp.arange(keys.shape[1], dtype=np.int32)
        visible = column <= own[..., None]
        if config.window:
            visible &= column > own[..., None] - config.window
        if rows.table is not None:  # after a sequence's keys pages may hold NaN, and 0 * NaN is NaN
            values = xp.where((column <= own[:, -1:])[..., None, None], _bits(values), 0).view(values.dtype)

        group = nheads // nheads_k
        m, n = group * seqlen, keys.shape[1]
        q = _bits(q).reshape(batch, seqlen, nheads_k, group, headdim).transpose(0, 2, 3, 1, 4)
        q = xp.ascontiguousarray(q).view(self.dtype).reshape(batch * nheads_k, m, headdim)
        keys, values = (self._by_head(x) for x in (keys, values))  # (batch * nheads_k, n, headdim)
        s = xp.empty((batch * nheads_k, m, n), np.float32)
        self._cublas.product(q, keys, s, True, alpha=headdim**-0.5)
        s = s.reshape(batch, nheads_k, group, seqlen, n)
        s = xp.where(visible[:, None, None], s, np.float32(-np.inf))
        s -= s.max(-1, keepdims=True)
        xp.exp(s, out=s)
        s /= s.sum(-1, keepdims=True)
        out = xp.empty((batch * nheads_k, m, headdim), self.dtype)
        self._cublas.product(self.cast(s, self.dtype).reshape(batch * nheads_k, m, n), values, out, False)
        out = _bits(out).reshape(batch, nheads_k, group, seqlen, headdim).transpose(0, 3, 1, 2, 4)
        return xp.ascontiguousarray(out).view(self.dtype).reshape(batch, seqlen, nheads, headdim)

    def _append_and_gather(self, k, v, cache_k, cache_v, rows, own) -> tuple[Any, Any]:
        """Writes the new keys and values to the cache; returns those of all sequences, (batch, n, nheads_k,
        headdim)."""
        xp, batch, page_size = self.xp, len(own), cache_k.shape[1]
        which = xp.arange(batch)[:, None]
        if rows.table is None:
            entry, offset = rows.first + which, own
        else:
            entry, offset = rows.table[which, own // page_size], own % page_size
        _bits(cache_k)[entry, offset], _bits(cache_v)[entry, offset] = _bits(k), _bits(v)
        if rows.table is None:
            here = slice(rows.first, rows.first + batch)
            return cache_k[here, : rows.longest], cache_v[here, : rows.longest]
        pages = rows.table[:, : -(-rows.longest // page_size)]
        shape = (batch, -1, *cache_k.shape[2:])
        return tuple(_bits(c)[pages].reshape(shape).view(c.dtype) for c in (cache_k, cache_v))

    def _by_head(self, x: Any) -> Any:
        """(batch, n, nheads_k, headdim) -> (batch * nheads_k, n, headdim). A view for one sequence, else a copy,
        because cuBLAS takes a single stride between matrices."""
        batch, n, nheads_k, headdim = x.shape
        if batch == 1:
            return x[0].transpose(1, 0, 2)
        copy = self.xp.ascontiguousarray(_bits(x).transpose(0, 2, 1, 3)).view(x.dtype)
        return copy.reshape(batch * nheads_k, n, headdim)

    def bandwidth(self) -> float:
        cupy, size = self.xp, 1 << 29
        with self.stream:
            source, target = cupy.zeros(size, np.uint8), cupy.empty(size, np.uint8)
            times = []
            for _ in range(4):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(self.stream)
                target[...] = source
                end.record(self.stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(start, end) * 1e-3)
        return 2 * size / min(times)

    def read_bandwidth(self, nbytes: int) -> float:
        """The bytes per second of a sum over nbytes, at most 512 MiB: the best of several."""
        cupy = self.xp
        with self.stream:
            source = cupy.zeros(max(1, min(nbytes, 1 << 29) // 4), np.float32)
            total, times = cupy.empty((), np.float32), []
            for _ in range(5):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(self.stream)
                source.sum(out=total)
                end.record(self.stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(start, end) * 1e-3)
        return source.nbytes / min(times)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    """RoPE in place: x (batch, seqlen, nheads, headdim) float32; cos, sin (batch, seqlen, headdim / 2)."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = turned


def standard_attention(xp, q: Array, k: Array, v: Array, window: int = 0) -> Array:
    """Causal attention of the last rows of each sequence over all its keys: the last row sees the last key.

    q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim) -> the shape of q. 16-bit inputs
    are converted to float32 first. A row sees the last `window` keys up to its own; 0 = all keys up to its own.
    """
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    group = nheads // nheads_k  # the query heads that share a key head are adjacent: one product has all their rows
    rows = (
        q.reshape(batch, seqlen_q, nheads_k, group, headdim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch, nheads_k, group * seqlen_q, headdim)
    )
    keys = k.transpose(0, 2, 3, 1).astype(xp.float32, copy=False)
    values = v.transpose(0, 2, 1, 3).astype(xp.float32, copy=False)
    s = (rows.astype(xp.float32, copy=False) * headdim**-0.5) @ keys  # (batch, nheads_k, group * seqlen_q, seqlen_k)
    if seqlen_q > 1 or 0 < window < seqlen_k:  # else the single row sees every key
        own = xp.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
        visible = xp.arange(seqlen_k) <= own
        if window:
            visible &= xp.arange(seqlen_k) > own - window
        s = s.reshape(batch, nheads_k, group, seqlen_q, seqlen_k)
        s = xp.where(visible, s, xp.float32(-np.inf)).reshape(batch, nheads_k, group * seqlen_q, seqlen_k)
    p = xp.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = (p @ values).reshape(batch, nheads_k, group, seqlen_q, headdim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, seqlen_q, nheads, headdim).astype(q.dtype, copy=False)
