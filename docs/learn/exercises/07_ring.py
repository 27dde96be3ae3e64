"""Exercise 7. A producer, a consumer, and a ring of buffers between them, guarded by barriers with a parity.

A barrier (an mbarrier that one arrival completes) has a phase, 0 at first. arrive() ends the phase: 0 becomes 1, 1
becomes 0. done(parity) asks whether the phase of that parity is over: whether the barrier is in the other phase. A
fresh barrier is in phase 0, so done(1) is true at once.

Every slot has a barrier `full`, at which the producer arrives when the tile is there, and a barrier `empty`, at which
the consumer arrives when the tile has been read. Write both as generators that `yield` whenever they must wait. They
may look at nothing but the barriers. Right after an arrival the other side may already go on.

    python docs/learn/exercises/07_ring.py
"""

import numpy as np
from judging import main, require

TO_WRITE = ("producer", "consumer")


class Barrier:
    def __init__(self):
        self.phase = 0

    def arrive(self):
        self.phase ^= 1

    def done(self, parity):
        return self.phase != parity


def producer(tiles, slots, full, empty, put):
    """Puts tiles 0 .. tiles - 1 into the slots in turn: put(slot, tile). full and empty are lists of barriers."""
    raise NotImplementedError("producer(tiles, slots, full, empty, put)")


def consumer(tiles, slots, full, empty, take):
    """Takes as many tiles from the slots in turn: take(slot)."""
    raise NotImplementedError("consumer(tiles, slots, full, empty, take)")


# ---- the judge ----


def judge(producer, consumer):
    rng = np.random.default_rng(7)
    for slots in (1, 2, 3, 4):
        for tiles in (0, 1, slots, 2 * slots, 7 * slots + 1):
            for speed in (0.1, 0.5, 0.9):  # how often the producer is the one that goes on
                run(producer, consumer, slots, tiles, speed, rng)


def run(producer, consumer, slots, tiles, speed, rng):
    call = f"{slots} slots, {tiles} tiles"
    buffers, taken = [None] * slots, []
    at_work = []  # all but the last are late after an arrival

    class Watched(Barrier):
        def arrive(self):
            super().arrive()
            while rng.random() < 0.5 and (free := [side for side in sides if side not in at_work]):
                step(free[0])

        def done(self, parity):
            require(parity in (0, 1), f"{call}: done({parity}): a parity is 0 or 1")
            return super().done(parity)

    def step(side):
        at_work.append(side)
        if next(side, "ended") == "ended":
            sides.remove(side)
        at_work.pop()

    full, empty = [Watched() for _ in range(slots)], [Watched() for _ in range(slots)]

    def put(slot, tile):
        require(buffers[slot] is None, f"{call}: tile {tile} overwrites tile {buffers[slot]}, which nobody has read")
        buffers[slot] = tile

    def take(slot):
        require(buffers[slot] is not None, f"{call}: slot {slot} is read before its tile is there")
        taken.append(buffers[slot])
        buffers[slot] = None

    sides = [producer(tiles, slots, full, empty, put), consumer(tiles, slots, full, empty, take)]
    for _ in range(1000 * (tiles + 1)):
        if not sides:
            break
        step(sides[0] if len(sides) == 1 or rng.random() < speed else sides[1])
    require(not sides, f"{call}: deadlock after {len(taken)} tiles")
    require(taken == list(range(tiles)), f"{call}: the consumer took {taken}")


if __name__ == "__main__":
    main(globals())
