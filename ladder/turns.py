"""Compares orders in which key blocks may add to dq: `python -m ladder.turns`.

A deterministic backward pass adds to each tile of dq in one fixed order, so blocks wait for each other. How long they
wait depends only on the order, and can be computed. Time is counted in query tiles. Thread blocks take key blocks in
the order of a list. A key block adds its part of a tile when its products are done and the previous key block has
added; the next key block may add `lag` later. A key block's products run at most AHEAD tiles ahead of its additions.

An order is three choices:
    list    in which order key blocks are taken; those of a head also add in this order
    walk    in which order a key block visits its query tiles
    width   how many heads stand side by side in the list
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

AHEAD = 3
NOISE = 0.06  # standard deviation of the time of a tile


@dataclass(frozen=True)
class Shape:
    headdim: int
    seqlen: int
    heads: int
    heads_k: int
    batch: int
    causal: bool

    @property
    def block_m(self) -> int:
        return 128 if self.headdim <= 64 else 64

    @property
    def tiles(self) -> int:
        return -(-self.seqlen // self.block_m)

    @property
    def blocks(self) -> int:
        return -(-self.seqlen // 128)

    @property
    def group(self) -> int:
        return self.heads // self.heads_k

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads_k

    @property
    def workers(self) -> int:
        """Key blocks that run at the same time. Above headdim 128 two thread blocks share one."""
        return 132 if self.headdim <= 128 else 66

    @property
    def start(self) -> float:
        """Time to begin and end a key block, in tiles."""
        return 2.0 if self.headdim <= 128 else 3.0

    @property
    def section(self) -> int:
        """The number of heads whose tiles fit into L2, as backward_section_heads in wgmma_sm90/tiles.h."""
        heads = 1
        while 2 * heads * self.seqlen * self.group * 8 * self.headdim <= 32 << 20 and heads < self.all_heads:
            heads *= 2
        return min(heads, self.all_heads)

    @property
    def section_in_order(self) -> int:
        """As backward_section_heads_in_order in wgmma_sm90/tiles.h."""
        least = 8 if self.group > 1 else 32 if self.headdim <= 64 else 16
        return min(max(self.section, least), self.all_heads)

    def first_tile(self, n: int) -> int:
        return n * 128 // self.block_m if self.causal else 0


def sections(shape: Shape, width: int) -> list[range]:
    return [range(h, min(shape.all_heads, h + width)) for h in range(0, shape.all_heads, width)]


def lowest_first(shape: Shape, width: int) -> Iterable[tuple[int, int]]:
    return [(h, n) for heads in sections(shape, width) for n in range(shape.blocks) for h in heads]


def highest_first(shape: Shape, width: int) -> Iterable[tuple[int, int]]:
    """With a causal mask the key blocks with the fewest queries come first."""
    return list(lowest_first(shape, width))[::-1]


def walk_up(shape: Shape, n: int) -> np.ndarray:
    """Tiles upwards, one head of the group after another; a visit is head * tiles + tile."""
    m = np.arange(shape.first_tile(n), shape.tiles)
    return (np.arange(shape.group)[:, None] * shape.tiles + m).ravel()


def walk_down(shape: Shape, n: int) -> np.ndarray:
    """Tiles downwards; at each tile, all heads of the group."""
    m = np.arange(shape.first_tile(n), shape.tiles)[::-1]
    return (np.arange(shape.group) * shape.tiles + m[:, None]).ravel()


def makespan(shape: Shape, order, walk, width: int, lag: float | None) -> float:
    """The time at which the last thread block ends. With lag None, no block waits."""
    noise = np.random.default_rng(0)
    free = [0.0] * shape.workers  # when each thread block takes its next key block
    added: dict[int, np.ndarray] = {}  # head -> when each tile may next be added to
    for head, n in order(shape, width):
        begin = heapq.heappop(free) + shape.start
        visits = walk(shape, n)
        done = np.cumsum(np.maximum(1 + NOISE * noise.standard_normal(len(visits)), 0.7))
        if lag is None:
            heapq.heappush(free, begin + done[-1])
            continue
        tiles = added.setdefault(head, np.zeros(shape.group * shape.tiles))
        turn = np.maximum.accumulate(tiles[visits])  # turns are taken one after another
        allowed = np.zeros(len(visits))
        allowed[AHEAD:] = turn[:-AHEAD]
        # products[i] = max(products[i - 1], allowed[i]) + time of tile i
        products = np.maximum.accumulate(np.maximum(allowed - done + np.diff(done, prepend=0.0), begin)) + done
        handed = np.maximum(products, turn)
        tiles[visits] = handed + lag
        heapq.heappush(free, handed[-1])
    return max(free)


ORDERS = {
    "lowest keys first, tiles upwards": (lowest_first, walk_up),
    "highest keys first, tiles upwards": (highest_first, walk_up),
    "lowest keys first, tiles downwards": (lowest_first, walk_down),
}
LIBRARY = "the same, more heads side by side"  # find_key_block in wgmma_sm90/work.cuh


def ratios(shape: Shape, lag: float) -> dict[str, float]:
    """The speed of each order relative to the free order: lowest keys first, without waits."""
    plain = makespan(shape, lowest_first, walk_up, shape.section if shape.causal else 1, None)
    spans = {name: makespan(shape, *order, shape.section, lag) for name, order in ORDERS.items()}
    spans[LIBRARY] = makespan(shape, lowest_first, walk_down, shape.section_in_order, lag)
    return {name: plain / span for name, span in spans.items()}


def shapes() -> list[Shape]:
    """The shapes of the benchmark `backward`, and shapes of models with grouped heads."""
    plain = [
        Shape(d, n, 2048 // d, 2048 // d, 16384 // n, causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    grouped = [(128, 8192, 64, 8, 1), (128, 8192, 64, 8, 2), (256, 8192, 32, 2, 1), (256, 8192, 32, 2, 2)]
    return plain + [Shape(*sizes, causal) for sizes in grouped for causal in (False, True)]


def main() -> None:
    for lag in (1.0, 1.5):
        print(f"\nThe next block adds {lag} tiles later.\n")
        print("| headdim | mask | heads | seqlen | batch |", *(f"{name} |" for name in (*ORDERS, LIBRARY)))
        print("| --- " * (6 + len(ORDERS)) + "|")
        for s in shapes():
            cells = [s.headdim, "causal" if s.causal else "full", f"{s.heads}/{s.heads_k}", s.seqlen, s.batch]
            print("|", " | ".join(map(str, cells)), "|", *(f"{x:.3f} |" for x in ratios(s, lag).values()))


if __name__ == "__main__":
    main()
