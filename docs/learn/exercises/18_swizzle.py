"""Exercise 18. An order of 16-byte pieces in shared memory, in which neither copies nor ldmatrix conflict.

A tile has rows of 4, 8 or 16 pieces of 16 bytes (head dims 32, 64 and 128 in bf16), without padding. Shared memory has
32 banks of 4 bytes; 8 lanes are answered at once if their pieces lie in different banks. Two accesses count:

    a copy       8 lanes write neighbouring pieces: of one row, or of two rows of 4 pieces
    ldmatrix     8 lanes read the same piece of 8 rows, which begin at a multiple of 8

    python docs/learn/exercises/18_swizzle.py
"""

from numbers import Integral

from judging import main, require
from simulator import wavefronts

TO_WRITE = ("offset",)


def offset(row, piece, pieces):
    """The byte at which piece `piece` of row `row` begins; a row has `pieces`."""
    raise NotImplementedError("offset(row, piece, pieces) -> bytes")


# ---- the judge ----


def judge(offset):
    rows = 64
    for pieces in (8, 16, 4):
        tile = f"rows of {16 * pieces} bytes"
        taken = {}
        for row in range(rows):
            for piece in range(pieces):
                at, call = offset(row, piece, pieces), f"{tile}: offset({row}, {piece}, {pieces})"
                require(isinstance(at, Integral) and at % 16 == 0, f"{call} is {at!r}, not a whole multiple of 16")
                require(
                    0 <= at < 16 * rows * pieces,
                    f"{call} is {at}, outside of the {16 * rows * pieces} bytes of the tile",
                )
                require(at not in taken, f"{call} is {at}, where {taken.get(at)} is")
                taken[at] = f"piece {piece} of row {row}"
        places = [(row, piece) for row in range(rows) for piece in range(pieces)]
        for begin in range(0, len(places), 8):
            times, why = wavefronts([offset(*place, pieces) for place in places[begin : begin + 8]], 16)
            row, piece = places[begin]
            require(times == 1, f"{tile}: a copy from piece {piece} of row {row} takes {times} times as long: {why}")
        for piece in range(pieces):
            for first in range(0, rows, 8):
                times, why = wavefronts([offset(first + lane, piece, pieces) for lane in range(8)], 16)
                call = f"ldmatrix of piece {piece} of rows {first} to {first + 7}"
                require(times == 1, f"{tile}: {call} takes {times} times as long: {why}")


if __name__ == "__main__":
    main(globals())
