"""Exercise 6. Which lane of a warp holds which element of a tensor-core product, and why P needs no shuffle.

mma.m16n8k16 multiplies A (16 x 16) by B (16 x 8) and adds the product to C (16 x 8). The 32 lanes hold the matrices
together. With lane = 4 g + q:

    C   4 values a lane      c0, c1: row g, columns 2 q and 2 q + 1         c2, c3: row g + 8, the same columns
    A   4 pairs a lane       a0: row g, columns 2 q and 2 q + 1             a1: row g + 8, the same columns
                             a2: row g, columns 2 q + 8 and 2 q + 9         a3: row g + 8, columns 2 q + 8 and 2 q + 9

S = Q K^T leaves two neighbouring C tiles, 16 keys, in a lane. P V wants them as A.

    python docs/learn/exercises/06_fragments.py
"""

import numpy as np
from judging import close, main, require

TO_WRITE = ("accumulator", "pack")


def accumulator(lane, i):
    """The row and the column of value i = 0 .. 3 of a lane in the 16 x 8 tile C."""
    raise NotImplementedError("accumulator(lane, i) -> row, column")


def pack(c, c_next):
    """A lane's four values of the tile of keys 0 .. 7 and of that of keys 8 .. 15 -> its a0, a1, a2, a3: four pairs."""
    raise NotImplementedError("pack(c, c_next) -> a0, a1, a2, a3")


# ---- the judge ----


def judge(accumulator, pack):
    places = [tuple(accumulator(lane, i)) for lane in range(32) for i in range(4)]
    expected = [(lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2) for lane in range(32) for i in range(4)]
    for n, (place, want) in enumerate(zip(places, expected, strict=True)):
        require(place == want, f"accumulator({n // 4}, {n % 4}) is {place}, expected {want}")
    p = np.random.default_rng(6).standard_normal((16, 16))
    a = np.full((16, 16), np.nan)
    for lane in range(32):
        tiles = [[p[row, column + 8 * t] for row, column in places[4 * lane : 4 * lane + 4]] for t in (0, 1)]
        pairs = pack(*tiles)
        require(np.shape(pairs) == (4, 2), f"pack returns the shape {np.shape(pairs)}, expected (4, 2)")
        for i, pair in enumerate(pairs):
            column = 2 * (lane % 4) + 8 * (i // 2)
            a[lane // 4 + 8 * (i % 2), column : column + 2] = pair
    close("the A operand of all lanes", a, p, 0)


if __name__ == "__main__":
    main(globals())
