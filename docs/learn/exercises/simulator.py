"""Parts of a GPU whose rules are arithmetic: the banks of shared memory, and barriers with phases, on which roles
wait."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from judging import require

BANKS, WORD = 32, 4


def wavefronts(addresses: list[int], width: int) -> tuple[int, str]:
    """How often shared memory must answer an access of `width` bytes by each lane, compared with one answer for every
    128 bytes: 1 is free of conflicts. And the first conflict in words. Lanes with the same word share an answer."""
    lanes = BANKS * WORD // width  # that are answered at once
    worst, first = 1, ""
    for begin in range(0, len(addresses), lanes):
        words: dict[int, dict[int, int]] = {}  # bank -> word -> the first lane that wants it
        for lane, address in enumerate(addresses[begin : begin + lanes], begin):
            for word in range(address // WORD, (address + width) // WORD):
                words.setdefault(word % BANKS, {}).setdefault(word, lane)
        bank, wanted = max(words.items(), key=lambda item: len(item[1]))
        if len(wanted) > worst:
            worst, (one, other) = len(wanted), list(wanted.values())[:2]
            first = f"lanes {one} and {other} want different words of bank {bank}"
    return worst, first


class Mbarrier:
    """A barrier whose phase ends when `count` arrivals have come and all expected bytes have landed."""

    def __init__(self, name: str, count: int):
        self.name, self.count, self.pending, self.bytes, self.phase = name, count, count, 0, 0
        self.after_arrival: Callable[[], None] = lambda: None  # what others do before the role that arrived goes on

    def arrive(self, expect: int = 0):
        """One arrival, which may announce bytes that a copy will bring (arrive.expect_tx)."""
        self.bytes += expect
        self.pending -= 1
        self._end()
        self.after_arrival()

    def land(self, count: int):
        self.bytes -= count
        self._end()

    def _end(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def done(self, parity: int) -> bool:
        """Whether the phase of this parity is over. A fresh barrier is in phase 0, so done(1) is true at once."""
        return self.phase != parity

    def __str__(self):
        return (
            f"{self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals and {self.bytes} bytes missing)"
        )


Role = Iterator[tuple[Mbarrier, int]]  # a generator that yields (barrier, parity) to wait


def run(
    roles: dict[str, Role],
    landings: list[Callable[[], None]],
    first: tuple[str, ...],
    seed: int,
    call: str,
    barriers: list[Mbarrier],
) -> None:
    """Runs all roles to their end. Of those that can go on, the earliest in `first` does; without it, a random one.
    A role is also late at times after its arrival at one of `barriers`. Copies in `landings` land in any order, soon
    or only when all wait for them. Fails if all that is left waits."""
    draw = random.Random(seed)
    soon = draw.choice((0, 0.3, 0.9))
    waits: dict[str, tuple[Mbarrier, int] | None] = dict.fromkeys(roles)
    running: list[str] = []  # all but the last are late after an arrival

    def can_go_on() -> list[str]:
        return [name for name, wait in waits.items() if name not in running and (wait is None or wait[0].done(wait[1]))]

    def land():
        landings.pop(draw.randrange(len(landings)))()

    def step(name: str):
        running.append(name)
        try:
            waits[name] = wait = next(roles[name])
            if wait is not None:
                pair = isinstance(wait, tuple) and len(wait) == 2 and isinstance(wait[0], Mbarrier)
                require(pair, f"{call}: {name} yields no pair (barrier, parity)")
                require(wait[1] in (0, 1), f"{call}: {name} waits for parity {wait[1]}: a parity is 0 or 1")
        except StopIteration:
            del waits[name]
        finally:
            running.pop()

    def others():
        for _ in range(draw.choice((0, 0, 1, 2, 8))):
            ready = can_go_on()
            if landings and (not ready or draw.random() < soon):
                land()
            elif ready:
                step(draw.choice(ready))

    for barrier in barriers:
        barrier.after_arrival = others
    for _ in range(100000):
        ready = can_go_on()
        if not waits:
            break
        if landings and (not ready or draw.random() < soon):
            land()
            continue
        if not ready:
            stuck = "\n    ".join(
                f"{name} waits for parity {wait[1]} of {wait[0]}" for name, wait in waits.items() if wait
            )
            require(False, f"{call}: deadlock\n    {stuck}")
        step(next((name for name in first if name in ready), None) or draw.choice(ready))
    require(not waits, f"{call}: a role that never ends")
    for landing in landings:
        landing()


def orders(names: list[str]) -> list[tuple[str, ...]]:
    """Each order of precedence, in which a role that is late comes last; and none, which is random, some times."""
    return [*[()] * 10, *itertools.permutations(names)]
