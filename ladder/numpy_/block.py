"""A model of a thread block on Hopper that shows the order of its work: barriers, rings of tiles, tensor cores, turns.

A role (the producer, a warpgroup) is a generator. It yields one of two things:

    Wait     it sleeps until a condition holds. A condition that holds already takes no time.
    Work     it is busy for one turn.

`run` lets every role do its part of one turn, then starts the next turn. In the same turn the tensor cores work on the
products that the roles have issued. So a turn is a slice of time in which everything happens at once, and the log of
all turns says who was busy when. The lengths are a model, not a measurement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Event(NamedTuple):
    """One turn of somebody's work."""

    turn: int
    who: str  # "producer", "warpgroup 0", "warpgroup 1"
    what: str  # "load K", "load V", "softmax"; "S" and "O" are done by the tensor cores for a warpgroup
    tile: int


class Work(NamedTuple):
    what: str
    tile: int


class Wait(NamedTuple):
    what: str
    over: Callable[[], bool]


Role = Generator["Work | Wait", None, None]


class Barrier:
    """Counts arrivals. Each time `count` have arrived, a phase ends and the count starts again. An mbarrier works this
    way, and so do the numbered barriers. Hardware keeps only the lowest bit of `phases`, which is enough because no
    role ever lags two phases."""

    def __init__(self, name: str, count: int = 1):
        self.name, self.count, self.arrived, self.phases = name, count, 0, 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1

    def phase(self, n: int) -> Wait:
        """A wait until phase n has ended. Phases count from 0; phase -1 has ended before the start."""
        return Wait(f"{self.name}, phase {n}", lambda: self.phases > n)


class Ring:
    """Tiles on their way from the producer to the readers: tile j lies in stage j mod stages.

    full[stage] ends a phase when the tile is there, empty[stage] when all readers have read it. The stages are arrays
    that are overwritten again and again, so a reader that came late would read a later tile.
    """

    def __init__(self, name: str, source: np.ndarray, rows: int, stages: int, readers: int):
        self.name, self.source, self.rows = name, source, rows
        self.stage = [np.empty((rows, source.shape[1]), source.dtype) for _ in range(stages)]
        self.full = [Barrier(f"{name} full[{s}]") for s in range(stages)]
        self.empty = [Barrier(f"{name} empty[{s}]", readers) for s in range(stages)]

    def _place(self, tile: int) -> tuple[int, int]:
        """The stage of a tile, and how many earlier tiles used that stage."""
        return tile % len(self.stage), tile // len(self.stage)

    # the producer's side

    def free(self, tile: int) -> Wait:
        stage, before = self._place(tile)
        return self.empty[stage].phase(before - 1)

    def fill(self, tile: int) -> None:
        """Copies a tile as TMA does: rows past the end become zeros, and the barrier `full` is signalled."""
        stage, _ = self._place(tile)
        rows = self.source[tile * self.rows : (tile + 1) * self.rows]
        self.stage[stage][:] = 0
        self.stage[stage][: len(rows)] = rows
        self.full[stage].arrive()

    # the readers' side

    def there(self, tile: int) -> Wait:
        stage, before = self._place(tile)
        return self.full[stage].phase(before)

    def __getitem__(self, tile: int) -> np.ndarray:
        return self.stage[self._place(tile)[0]]

    def release(self, tile: int) -> None:
        self.empty[self._place(tile)[0]].arrive()


@dataclass
class Product:
    """A product issued to the tensor cores. `compute` runs in the product's last turn, and reads the operands then."""

    who: str
    what: str
    tile: int
    compute: Callable[[], None]
    turns_left: int

    def done(self) -> Wait:
        return Wait(f"{self.what} of tile {self.tile}", lambda: self.turns_left == 0)


@dataclass
class TensorCores:
    """Run one product at a time. The products of a warpgroup run in the order in which it issued them. While two
    warpgroups have products, their products alternate turn by turn."""

    turns: int  # turns that one product takes
    queues: dict[str, deque[Product]] = field(default_factory=dict)  # the warpgroup that was served last comes last

    def begin(self, who: str, what: str, tile: int, compute: Callable[[], None]) -> Product:
        """Returns at once: the product is asynchronous, as wgmma is."""
        product = Product(who, what, tile, compute, self.turns)
        self.queues.setdefault(who, deque()).append(product)
        return product

    def work(self) -> Product | None:
        """Does one turn of the next warpgroup's product and returns that product, or None if there is none."""
        for who, queue in list(self.queues.items()):
            if queue:
                product = queue[0]
                self.queues[who] = self.queues.pop(who)
                product.turns_left -= 1
                if product.turns_left == 0:
                    queue.popleft()
                    product.compute()
                return product
        return None


def run(roles: dict[str, Role], tensor_cores: TensorCores) -> list[Event]:
    """Runs all roles to their ends. Raises RuntimeError when every role that is left waits (a deadlock)."""
    log: list[Event] = []
    waits: dict[str, Wait | None] = dict.fromkeys(roles)
    turn = 0
    while roles:
        busy = []
        for who, role in list(roles.items()):
            if (wait := waits[who]) and not wait.over():
                continue
            step = next(role, None)
            while isinstance(step, Wait) and step.over():
                step = next(role, None)
            waits[who] = step if isinstance(step, Wait) else None
            if isinstance(step, Work):
                busy.append(Event(turn, who, *step))
            elif step is None:
                del roles[who]
        if product := tensor_cores.work():  # last: roles see its result in the next turn
            busy.append(Event(turn, product.who, product.what, product.tile))
        if roles and not busy and not any((wait := waits[who]) is None or wait.over() for who in roles):
            stuck = "; ".join(f"{who} for {waits[who].what}" for who in roles)
            raise RuntimeError(f"deadlock in turn {turn}: everybody waits, {stuck}")
        log += busy
        turn += 1
    return log


def timeline(log: list[Event]) -> str:
    """The log as text, one column a turn: S and O are products; a digit is the tile (mod 10) of a load or a softmax."""
    lines: dict[str, list[str]] = {}
    end = 1 + max((event.turn for event in log), default=-1)
    for who in sorted({event.who for event in log}):
        mine = [event for event in log if event.who == who]
        if any(event.what.startswith("load") for event in mine):
            lines[f"{who}, K"] = ["."] * end
            lines[f"{who}, V"] = ["."] * end
        else:
            lines[f"{who}, products"] = ["."] * end
            lines[f"{who}, softmax"] = ["."] * end
        for event in mine:
            if event.what in ("S", "O"):
                lines[f"{who}, products"][event.turn] = event.what
            else:
                row = f"{who}, softmax" if event.what == "softmax" else f"{who}, {event.what[-1]}"
                lines[row][event.turn] = str(event.tile % 10)
    width = max(map(len, lines), default=0)
    used = len({event.turn for event in log if event.what in ("S", "O")})
    text = [f"{name:<{width}}  {''.join(cells)}" for name, cells in lines.items()]
    return "\n".join([*text, f"{end} turns; the tensor cores worked in {used} of them"])
