"""Times launches. All systems of one shape take turns, in a new shuffled order every round, so that a card that grows
warm, or a busy neighbour, affects each of them equally."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass
class Protocol:
    rounds: int = 9
    burst_s: float = 0.01  # seconds of launches between two readings of the clock
    sustained: bool = False  # also run each for a third of a second, long enough for the power limit to set the clock
    max_launches: int = 512  # in one burst


QUICK = Protocol(rounds=5, burst_s=0.004)
SUSTAINED_ROUNDS, SUSTAINED_S = 4, 1 / 3
CALLS = itertools.count()


@dataclass
class Timing:
    """Microseconds of one launch, one entry for each burst."""

    bursts: list[float] = field(default_factory=list)
    sustained: list[float] = field(default_factory=list)
    conditions: list[tuple[float, float]] = field(default_factory=list)  # (MHz, W) of each sustained stretch
    capture_failed: bool = False  # the launches could not become a CUDA graph: the host's work may be in the times

    def row(self, tflop: float) -> dict[str, float]:
        """The timing part of a benchmark row. The spread is the distance between the quartiles."""
        us = median(self.bursts)
        row = {"us": us, "us_min": min(self.bursts), "us_spread": 0.0}
        if len(self.bursts) > 1:
            low, _, high = quantiles(self.bursts, n=4, method="inclusive")
            row["us_spread"] = high - low
        row["tflops"] = tflop / (us * 1e-6)
        if self.sustained:
            row["sustained_us"] = median(self.sustained)
            row["sustained_tflops"] = tflop / (row["sustained_us"] * 1e-6)
        if self.conditions:
            row["sustained_mhz"] = median(c[0] for c in self.conditions)
            row["sustained_w"] = median(c[1] for c in self.conditions)
        return row


def estimate_us(machine, launch) -> float:
    """An estimate to choose the size of the bursts; not a result."""
    launch(0)
    machine.synchronize()
    count, us = 1, 0.0
    while count <= 64:
        start = time.perf_counter()
        for i in range(count):
            launch(i)
        machine.synchronize()
        us = (time.perf_counter() - start) / count * 1e6
        if us * count > 2000:
            break
        count *= 4
    return us


def interleave(machine, launches, protocol: Protocol, meter, seed: int, graphs: bool | None = None) -> list[Timing]:
    """Times every launch(i) of the list. Answers are not checked here. Short launches run in CUDA graphs; with
    graphs=True all do, with graphs=False none. Every call draws new orders. Otherwise a system would follow the same
    other system, which heats the card or lets it rest, on every shape of a run."""
    order = random.Random(f"{seed} {next(CALLS)}")
    runs = []
    for launch in launches:
        us = estimate_us(machine, launch)
        count = max(1, min(protocol.max_launches, math.ceil(protocol.burst_s * 1e6 / us)))
        length = us if graphs is None else 0.0 if graphs else math.inf
        burst = machine.burst(launch, count, length)
        runs.append((burst, count, us, Timing(capture_failed=getattr(burst, "capture_failed", False))))

    for _ in range(protocol.rounds):
        for burst, count, us, timing in order.sample(runs, len(runs)):
            seconds = machine.seconds(burst, warm=us * count < 5e4)  # a long launch warms up within itself
            timing.bursts.append(seconds * 1e6 / count)

    for _ in range(SUSTAINED_ROUNDS if protocol.sustained else 0):
        for burst, count, _, timing in order.sample(runs, len(runs)):
            repeat = max(1, round(SUSTAINED_S * 1e6 / (median(timing.bursts) * count)))
            start = time.perf_counter()
            timing.sustained.append(machine.seconds(burst, repeat, warm=False) * 1e6 / (count * repeat))
            if found := meter.between(start, time.perf_counter()):
                timing.conditions.append(found)
    return [run[3] for run in runs]
