"""Formulas for the bytes that each order of the loops moves between the large memory and the small one.

One head of attention has seqlen_q = seqlen_k = S and headdim d. The small memory holds M numbers. Orders:

    standard   S and P whole in memory                                        Theta(S d + S^2) numbers
    v1         keys outside, queries inside: O, row_max and row_sum come      Theta(S^2 d^2 / M), as tiles of keys
               from memory and go back for every tile of keys                 have M / 4d rows
               (Dao et al. 2022, algorithm 1 and theorem 2)
    v2         queries outside, keys inside: O stays, and every tile of       S^2 d / tile_m numbers of K and of V
               queries reads K and V (Dao 2023)
    v2 + L2    the same, but tiles of queries that run at the same time       K and V once for every wave of blocks
               find K and V in a cache between the two memories

_counted.py runs the first three and counts. The tests require that the formulas agree with the counts exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STATISTIC = 4  # bytes of row_max, of row_sum and of lse: float32


@dataclass(frozen=True)
class Problem:
    seqlen: int
    headdim: int
    causal: bool = False
    itemsize: int = 2  # bytes of an element of q, k, v, out
    heads: int = 1  # batch x heads
    score_itemsize: int = 4  # bytes of an element of S, P, and of v1's O

    @property
    def operand(self) -> int:
        """Bytes of q, k, v or out of one head."""
        return self.seqlen * self.headdim * self.itemsize

    @property
    def flops(self) -> float:
        """FLOP as bench counts them: a causal mask halves the work."""
        return 4.0 * self.seqlen**2 * self.headdim * self.heads * (0.5 if self.causal else 1.0)


@dataclass(frozen=True)
class Tile:
    m: int  # query rows
    n: int  # keys


def tile_of(small: int, headdim: int) -> Tile:
    """The tile of algorithm 1 for a small memory of `small` numbers: Q, K, V and O take a quarter each."""
    n = max(1, small // (4 * headdim))
    return Tile(min(n, headdim), n)


def standard(p: Problem) -> int:
    """Bytes of the three steps: q, k in; S out, in; P out, in; v in; out out. A mask saves nothing, because hidden
    scores are written as -inf."""
    return p.heads * (4 * p.operand + 4 * p.seqlen**2 * p.score_itemsize)


def v1(p: Problem, tile: Tile) -> int:
    """Bytes of v1: O, row_max and row_sum are set once, then read and written by every pair of tiles with a visible
    score."""
    row = p.headdim * p.score_itemsize + 2 * STATISTIC  # bytes of a row of O with its statistics
    total = p.seqlen * row + 2 * p.operand  # the start; K and V once
    for first_key in range(0, p.seqlen, tile.n):
        rows = p.seqlen
        if p.causal:  # from the first tile with a row that sees first_key
            rows -= first_key // tile.m * tile.m
        total += rows * (p.headdim * p.itemsize + 2 * row)
    return p.heads * (total + p.seqlen * p.headdim * (p.score_itemsize + p.itemsize))  # O in once more, out out


def v2(p: Problem, tile: Tile) -> int:
    """Bytes of v2: q in, out and lse out; for every tile of rows, the keys and values that it sees, in whole tiles."""
    keys = 0
    for first_row in range(0, p.seqlen, tile.m):
        seen = min(first_row + tile.m, p.seqlen) if p.causal else p.seqlen
        keys += min(math.ceil(seen / tile.n) * tile.n, p.seqlen)
    return p.heads * (2 * p.operand + p.seqlen * STATISTIC + 2 * keys * p.headdim * p.itemsize)


def once(p: Problem) -> int:
    """Bytes if every input is read once and every output written once. No order needs fewer."""
    return p.heads * (4 * p.operand + p.seqlen * STATISTIC)


def v2_cached(p: Problem, tile: Tile, cache: int, blocks_at_once: int) -> int:
    """Bytes of v2 with a cache of `cache` bytes before the large memory. Blocks run in waves, and blocks of one head
    run together. A wave reads K and V of its heads only once if the cache holds one tile of K and V for each of these
    heads. If the cache holds K and V of all heads, every array is read only once."""
    if p.heads * 2 * p.operand <= cache:
        return once(p)
    if 2 * tile.n * p.headdim * p.itemsize * min(p.heads, blocks_at_once) > cache:
        return v2(p, tile)
    per_head = math.ceil(p.seqlen / tile.m)
    blocks, reads = per_head * p.heads, 0
    for first in range(0, blocks, blocks_at_once):
        last = min(first + blocks_at_once, blocks) - 1
        for head in range(first // per_head, last // per_head + 1):
            # the last row of this head in this wave: a causal wave reads the keys up to it
            row = min(last - head * per_head + 1, per_head) * tile.m
            reads += min(row, p.seqlen) if p.causal else p.seqlen
    return min(v2(p, tile), p.heads * (2 * p.operand + p.seqlen * STATISTIC) + 2 * reads * p.headdim * p.itemsize)


def ratio_at_length(p: Problem, tile: Tile) -> float:
    """The limit of standard / v2 for large S: four passes over a score against the score's share of K and V."""
    return 4 * p.score_itemsize / (2 * p.headdim * p.itemsize / tile.m)
