"""Exercise 19. Which thread of a warpgroup holds which number of a wgmma product, and whom it asks for the row's
maximum.

wgmma.m64nNk16 leaves a 64 x N tile of float32 sums in the registers of 128 threads, N / 2 each. Warp w of the four owns
rows 16 w to 16 w + 15. Within a warp the layout is that of mma.m16n8k16, repeated every 8 columns: with lane = 4 g + q,
numbers 0 and 1 are row g, columns 2 q and 2 q + 1; numbers 2 and 3 are row g + 8, the same columns; number 4 is column
2 q + 8 of row g again.

    python docs/learn/exercises/19_wgmma_fragments.py
"""

import numpy as np
from judging import close, main, require

TO_WRITE = ("place", "owner", "partners")


def place(thread, i):
    """Number i of thread 0 .. 127 -> its row and column in the tile."""
    raise NotImplementedError("place(thread, i) -> row, column")


def owner(row, column):
    """The inverse: which thread holds it, and as which of its numbers."""
    raise NotImplementedError("owner(row, column) -> thread, i")


def partners(thread):
    """The lanes of its warp that hold parts of the same rows as the thread, itself among them, in ascending order."""
    raise NotImplementedError("partners(thread) -> lanes")


# ---- the judge ----


def judge(place, owner, partners):
    for n in (8, 64, 176):
        tile = np.random.default_rng(n).standard_normal((64, n))
        seen = {}
        for thread in range(128):
            for i in range(n // 2):
                at, call = tuple(place(thread, i)), f"n={n}: place({thread}, {i})"
                row, column = (
                    16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2),
                    8 * (i // 4) + 2 * (thread % 4) + i % 2,
                )
                require(at == (row, column), f"{call} is {at}, expected {row, column}")
                seen[at] = thread, i
        for at, want in seen.items():
            got = tuple(owner(*at))
            require(got == want, f"n={n}: owner{at} is {got}, expected {want}")
        for thread in range(128):
            lanes = list(partners(thread))
            call = f"n={n}: thread {thread} asks lanes {lanes}"
            require(all(0 <= lane < 32 for lane in lanes), f"{call}, which are not lanes of its warp")
            for half in (0, 1):
                row = place(thread, 2 * half)[0]
                found = [tile[place(thread // 32 * 32 + lane, i)] for lane in lanes for i in range(n // 2)
                         if place(thread // 32 * 32 + lane, i)[0] == row]  # fmt: skip
                require(len(found) == n, f"{call}: together they hold {len(found)} of the {n} numbers of row {row}")
                close(f"{call}: the maximum of row {row}", max(found), tile[row].max(), 0)
            require(len(lanes) == 4, f"{call}: four hold all of its rows")


if __name__ == "__main__":
    main(globals())
