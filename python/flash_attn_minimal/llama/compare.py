"""Times flash and standard attention on the same text, in turns, so that other load on the machine disturbs both
equally."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..errors import BadArgument, FlashAttnError
from .engine import Engine, Request

PIECE = 16  # decode steps that an engine makes in its turn
LEAST_ROUNDS = 3  # the least number of times that the text is written, after one warm-up


@dataclass(frozen=True)
class Comparison:
    requests: list[Request]
    steps_per_second: dict[str, float]  # the median over the pieces
    ratio: float  # the first engine's speed over the second's: the median over pairs of pieces at the same positions
    pieces: int


def in_turns(engines: Mapping[str, Engine], jobs: Sequence[tuple[Any, ...]], seconds: float = 3.0) -> Comparison:
    """Two engines write the texts of `jobs` (arguments of Engine.add) again and again, for this many seconds.

    The first and the last piece of a text do not count: a GPU runs some steps ahead, so the first piece runs more steps
    than are counted in it, and the last one fewer. Raises FlashAttnError if the texts differ.
    """
    rates: dict[str, list[float]] = {name: [] for name in engines}
    started = 0.0
    for number in itertools.count():
        requests = {name: [engine.add(*job) for job in jobs] for name, engine in engines.items()}
        turns = []
        while any(engine.busy for engine in engines.values()):
            names = list(engines)[:: -1 if len(turns) % 2 else 1]  # the engine that went last goes first
            turns.append({name: _piece(engines[name]) for name in names})
        _check_same(requests)
        if number == 0:
            started = time.perf_counter()
            continue
        for turn in turns[1:-1]:
            for name, rate in turn.items():
                rates[name].append(rate)
        if number >= LEAST_ROUNDS and time.perf_counter() - started >= seconds:
            break
    first, second = rates.values()
    if not first:
        raise BadArgument(f"the text has {len(turns)} pieces of {PIECE} steps: too few to compare, which takes 3")
    ratio = median(a / b for a, b in zip(first, second, strict=True))
    return Comparison(next(iter(requests.values())), {n: median(r) for n, r in rates.items()}, ratio, len(first))


def _piece(engine: Engine) -> float:
    """Steps per second of the next PIECE steps."""
    before, started = engine.timing.decode_steps, time.perf_counter()
    while engine.busy and engine.timing.decode_steps - before < PIECE:
        engine.step()
    engine.device.synchronize()
    return (engine.timing.decode_steps - before) / (time.perf_counter() - started)


def _check_same(requests: Mapping[str, list[Request]]) -> None:
    (name, texts), (other, others) = requests.items()
    for text, theirs in zip(texts, others, strict=True):
        if error := text.error or theirs.error:
            raise error
        if text.tokens != theirs.tokens:
            pairs = itertools.zip_longest(text.tokens, theirs.tokens)
            at = next(i for i, (mine, its) in enumerate(pairs) if mine != its)
            raise FlashAttnError(f"the texts of {name} and {other} attention differ from new token {at} on")
