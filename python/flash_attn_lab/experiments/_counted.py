"""Attention in NumPy that counts the bytes it moves: only `Memory.read` and `Memory.write` move data between the large
memory and the small one. One head: q, k, v, out (seqlen, headdim), lse (seqlen,) float32. Sums are float64, so that
the answers can be compared; arrays in memory have the type that a kernel would store."""

from __future__ import annotations

import numpy as np

from ._traffic import Tile


class Memory:
    def __init__(self) -> None:
        self.moved = 0  # bytes

    def read(self, array: np.ndarray) -> np.ndarray:
        self.moved += array.nbytes
        return array.astype(np.float64)

    def write(self, target: np.ndarray, value) -> None:
        self.moved += target.nbytes
        target[...] = value


def scores(q: np.ndarray, k: np.ndarray, row: int, key: int, causal: bool) -> np.ndarray:
    """scale q k^T of a tile whose first row is `row` and first key `key`, in natural units; hidden scores are -inf."""
    s = q @ k.T * q.shape[1] ** -0.5
    if causal:
        hidden = key + np.arange(len(k)) > (row + np.arange(len(q)))[:, None]
        s[hidden] = -np.inf
    return s


def standard(memory: Memory, q, k, v, out, lse, causal=False, score_dtype=np.float32) -> None:
    """Three steps, each of which reads its inputs from memory and writes its result there."""
    s = np.empty((len(q), len(k)), score_dtype)
    memory.write(s, scores(memory.read(q), memory.read(k), 0, 0, causal))
    held = memory.read(s)
    memory.write(s, np.exp(held - held.max(1, keepdims=True)))  # P before its division, in place of S
    p = memory.read(s)
    memory.write(out, p @ memory.read(v) / p.sum(1, keepdims=True))
    lse[...] = np.log(p.sum(1)) + held.max(1)  # not counted, because the three steps have no lse


def v1(memory: Memory, q, k, v, out, lse, tile: Tile, causal=False, sum_dtype=np.float32) -> None:
    """FlashAttention's order: a tile of keys stays, and all queries pass by."""
    o = np.empty(out.shape, sum_dtype)
    row_max, row_sum = np.empty(len(q), np.float32), np.empty(len(q), np.float32)
    memory.write(o, 0)
    memory.write(row_max, -np.inf)
    memory.write(row_sum, 0)
    for key in range(0, len(k), tile.n):
        keys, values = memory.read(k[key : key + tile.n]), memory.read(v[key : key + tile.n])
        for row in range(key // tile.m * tile.m if causal else 0, len(q), tile.m):
            rows = slice(row, row + tile.m)
            s = scores(memory.read(q[rows]), keys, row, key, causal)
            before, total = memory.read(row_max[rows]), memory.read(row_sum[rows])
            new = np.maximum(before, s.max(1))
            base = np.where(np.isneginf(new), 0, new)  # a row that has seen no key
            p, scale = np.exp(s - base[:, None]), np.exp(before - base)
            memory.write(o[rows], scale[:, None] * memory.read(o[rows]) + p @ values)
            memory.write(row_sum[rows], scale * total + p.sum(1))
            memory.write(row_max[rows], new)
    memory.write(out, memory.read(o) / row_sum[:, None])
    lse[...] = row_max + np.log(row_sum)  # not counted, because row_max and row_sum are already in memory


def v2(memory: Memory, q, k, v, out, lse, tile: Tile, causal=False) -> None:
    """FlashAttention-2's order: a tile of queries stays with its O, and all keys pass by."""
    for row in range(0, len(q), tile.m):
        rows = slice(row, row + tile.m)
        queries = memory.read(q[rows])
        o = np.zeros((len(queries), v.shape[1]))
        row_max, row_sum = np.full(len(queries), -np.inf), np.zeros(len(queries))
        end = min(row + tile.m, len(k)) if causal else len(k)
        for key in range(0, end, tile.n):
            keys, values = memory.read(k[key : key + tile.n]), memory.read(v[key : key + tile.n])
            s = scores(queries, keys, row, key, causal)
            new = np.maximum(row_max, s.max(1))
            p, scale = np.exp(s - new[:, None]), np.exp(row_max - new)
            o = scale[:, None] * o + p @ values
            row_sum, row_max = scale * row_sum + p.sum(1), new
        memory.write(out[rows], o / row_sum[:, None])
        memory.write(lse[rows], row_max + np.log(row_sum))


def plain_v2(q, k, v, tile: Tile) -> np.ndarray:
    """out (seqlen, headdim) of v2 in float32, without counting or a mask, to be timed."""
    out, scale = np.empty_like(q), np.float32(q.shape[1] ** -0.5)
    for row in range(0, len(q), tile.m):
        queries = q[row : row + tile.m] * scale
        o = np.zeros((len(queries), v.shape[1]), np.float32)
        row_max = np.full((len(queries), 1), -np.inf, np.float32)
        row_sum = np.zeros((len(queries), 1), np.float32)
        for key in range(0, len(k), tile.n):
            s = queries @ k[key : key + tile.n].T
            new = np.maximum(row_max, s.max(1, keepdims=True))
            np.exp(np.subtract(s, new, out=s), out=s)
            factor = np.exp(row_max - new)
            o *= factor
            o += s @ v[key : key + tile.n]
            row_sum = factor * row_sum + s.sum(1, keepdims=True)
            row_max = new
        out[row : row + tile.m] = o / row_sum
    return out
