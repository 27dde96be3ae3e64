"""Random sizes, layouts and options. They are often next to a multiple of a tile or to the number of
multiprocessors."""

from __future__ import annotations

from typing import Any

import numpy as np

TILES = (16, 32, 64, 128, 176, 192, 256)
HEADDIMS = (32, 64, 64, 64, 128, 128, 128, 40, 72, 80, 96, 160, 192, 256)
ODD_HEADDIMS = (1, 2, 7, 8, 16, 24, 33, 48, 100, 112, 144, 200, 224, 255, 320, 384, 511, 512)
WORK = 4e7  # batch * nheads * seqlen_q * seqlen_k * (headdim + headdim_v): the cost of the float64 answer
ELEMENTS = 1e6  # elements of q, or of k and v


class Draw:
    """A random generator that prefers edge cases. `plain`, from 0 to 1, makes unusual options rarer, so that calls are
    found for a kernel that serves few."""

    def __init__(self, rng: np.random.Generator, plain: float = 0.0):
        self.rng, self.plain = rng, plain

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def option(self, p: float) -> bool:
        """Whether an option is taken: with probability p, and less often the plainer the case."""
        return self.chance(p * (1 - self.plain))

    def pick(self, choices) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def below(self, high: int) -> int:
        return int(self.rng.integers(max(high, 1)))

    def seed(self) -> int:
        return int(self.rng.integers(2**31))

    def log_uniform(self, low: int, high: int) -> int:
        """A log-uniform integer from low to high; low >= 1."""
        return min(high, int(np.exp(self.rng.uniform(np.log(low), np.log(max(high, low) + 1)))))

    def size(self, high: int, low: int = 0) -> int:
        """A length: small, log-uniform, or next to a multiple of a tile."""
        high = max(high, low)
        kind = self.rng.random()
        if kind < 0.08:
            size = low + self.below(4)
        elif kind < 0.45 or high < 15:
            size = self.log_uniform(max(low, 1), max(high, 1))
        else:
            tile = self.pick([t for t in TILES if t <= high + 1] or [16])
            size = tile * self.log_uniform(1, max(high // tile, 1)) + self.pick((-1, 0, 0, 1))
        return min(max(size, low), high)

    def headdim(self, most: int = 512) -> int:
        kind = self.rng.random() + 0.4 * self.plain
        if kind < 0.2:
            return 1 + self.below(most)
        dims = ODD_HEADDIMS if kind < 0.35 else HEADDIMS
        return self.pick([d for d in dims if d <= most])

    def groups(self, most: int) -> int:
        """A number of query heads for each key head."""
        return min(self.pick((1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)), max(most, 1))

    def near_multiprocessors(self, multiprocessors: int, most: int) -> int:
        """A number of pieces of work just below, at or just above a multiple (0.5 to 3) of the multiprocessors."""
        times = self.pick((0.5, 1, 1, 1, 2, 2, 3))
        return int(min(max(round(multiprocessors * times) + self.pick((-2, -1, 0, 0, 1, 2)), 1), max(most, 1)))

    def budget(self, large: float = 0.02) -> tuple[float, float]:
        """(the work that the float64 answer may take, the elements of its inputs); now and then much larger."""
        if self.chance(large):
            return WORK * float(self.rng.uniform(1, 4)), ELEMENTS * float(self.rng.uniform(3, 20))
        part = float(np.exp(self.rng.uniform(np.log(0.01), 0)))
        return WORK * part, ELEMENTS * float(np.exp(self.rng.uniform(np.log(0.02), 0)))

    def layout(
        self, rank: int, backend, repeat: bool = True, axes_fixed: bool = False, aligned: float = 0.5, p: float = 0.35
    ) -> dict[str, Any]:
        """The layout of an array with `rank` axes; {} is contiguous."""
        layout: dict[str, Any] = {}
        if not self.option(p) and not self.chance(0.1):
            return layout
        step = 8 if self.chance(aligned + 0.5 * self.plain) else 1  # whole 16 bytes of 16-bit elements
        if not axes_fixed and rank > 2 and self.chance(0.4):
            layout["order"] = [*map(int, self.rng.permutation(rank - 1)), rank - 1]
        if self.chance(0.6):
            pad = [0] * rank
            for _ in range(1 + self.below(2)):
                pad[self.below(rank)] = step * (1 + self.below(4))
            if self.chance(0.05):
                pad[rank - 1] += step * 1000
            layout["pad"] = pad
        if backend.negative_strides and rank > 1 and self.chance(0.15):
            layout["flip"] = [self.below(rank - 1)]
        if repeat and rank > 1 and self.chance(0.12):
            layout["repeat"] = [self.below(rank - 1)]
            layout["flip"] = [axis for axis in layout.get("flip", []) if axis not in layout["repeat"]]
        if self.chance(0.3):
            layout["offset"] = step * (1 + self.below(4))
        return {key: value for key, value in layout.items() if value}

    def layouts(self, ranks: dict[str, int], backend, outputs=(), **how) -> dict[str, Any]:
        """Layouts of arrays by name. Contiguous arrays are left out."""
        drawn = {
            name: self.layout(rank, backend, **(how | ({"repeat": False} if name in outputs else {})))
            for name, rank in ranks.items()
        }
        return {name: layout for name, layout in drawn.items() if layout}
