"""Exercise 20. A ring of tiles between one producer and several consumers, with the barriers of Hopper.

An mbarrier is made with a count. Its phase ends when that many arrivals have come and all bytes that they announced
have landed; then the next phase begins, with the same count. barrier.arrive(expect=bytes) arrives and announces. To
wait, a role yields (barrier, parity): it goes on when the phase of that parity is over. On a fresh barrier parity 1
counts as over.

The producer announces TILE_BYTES at full[slot] and starts copy(tile, slot, full[slot]), which returns at once: the tile
lands later, and then reports to the barrier. Every consumer reads every tile, read(slot), and says so at empty[slot].

Write the counts of the two kinds of barrier, the producer, and a consumer. The simulator runs them in every order of
precedence and in random ones, and finds deadlocks, tiles that are overwritten too early, and reads of tiles that have
not landed.

    python docs/learn/exercises/20_phases.py
"""

from judging import main, require
from simulator import Mbarrier, orders, run

TO_WRITE = ("counts", "producer", "consumer")

TILE_BYTES = 8192


def counts(consumers):
    """The counts with which the barriers full and empty are made."""
    raise NotImplementedError("counts(consumers) -> count of full, count of empty")


def producer(tiles, slots, full, empty, copy):
    """A generator: brings tiles 0 .. tiles - 1 into the slots in turn. full and empty have a barrier for each slot."""
    raise NotImplementedError("producer(tiles, slots, full, empty, copy)")


def consumer(tiles, slots, full, empty, read):
    """A generator: reads as many tiles from the slots in turn: read(slot)."""
    raise NotImplementedError("consumer(tiles, slots, full, empty, read)")


# ---- the judge ----


def judge(counts, producer, consumer):
    for consumers in (1, 2, 3):
        for slots in (1, 2, 3):
            for tiles in (0, 1, slots, 2 * slots, 4 * slots + 1):
                for seed, first in enumerate(orders(["producer", *(f"consumer {n}" for n in range(consumers))])):
                    one(counts, producer, consumer, consumers, slots, tiles, first, seed)


def one(counts, producer, consumer, consumers, slots, tiles, first, seed):
    call = f"{consumers} consumers, {slots} slots, {tiles} tiles"
    if first:
        call += f", precedence {', '.join(first)}"
    of_full, of_empty = counts(consumers)
    full = [Mbarrier(f"full[{slot}]", of_full) for slot in range(slots)]
    empty = [Mbarrier(f"empty[{slot}]", of_empty) for slot in range(slots)]
    held = [None] * slots  # the tile that is there
    readers = [set() for _ in range(slots)]  # who has not read it yet
    taken = {n: [] for n in range(consumers)}
    landings = []

    def copy(tile, slot, barrier):
        late = "" if held[slot] is None else f"the copy of tile {held[slot]} into slot {slot} is still under way: "
        unread = f"tile {tile} overwrites slot {slot}, which consumer {min(readers[slot], default='')} has not read"
        require(not readers[slot], f"{call}: {late}{unread}")
        held[slot], readers[slot] = None, set(range(consumers))

        def land():
            held[slot] = tile
            barrier.land(TILE_BYTES)

        landings.append(land)

    def reader(n):
        def read(slot):
            require(held[slot] is not None, f"{call}: consumer {n} reads slot {slot} before its tile has landed")
            require(n in readers[slot], f"{call}: consumer {n} reads tile {held[slot]} in slot {slot} twice")
            readers[slot].remove(n)
            taken[n].append(held[slot])

        return read

    roles = {"producer": producer(tiles, slots, full, empty, copy)}
    roles |= {f"consumer {n}": consumer(tiles, slots, full, empty, reader(n)) for n in range(consumers)}
    run(roles, landings, first, seed, call, full + empty)
    for n, tiles_read in taken.items():
        require(tiles_read == list(range(tiles)), f"{call}: consumer {n} read the tiles {tiles_read}")


if __name__ == "__main__":
    main(globals())
