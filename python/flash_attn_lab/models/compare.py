"""`python -m flash_attn_lab compare`: times flash and standard attention on the same text, in turns, so that other load
on the machine disturbs both equally."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flash_attn_minimal._commands.command import Parser, command
from flash_attn_minimal.errors import BadArgument, FlashAttnError
from flash_attn_minimal.llama.engine import Engine, Request
from flash_attn_minimal.llama.generate import add_options, context_of, device_types, loaded
from flash_attn_minimal.llama.model import Llama

from .. import PROGRAM
from .standard import ATTENTIONS, Cuda, Host, on

PIECE = 16  # decode steps that an engine makes in its turn
CACHED = 1 << 26  # bytes: a step that reads fewer reads them from a cache, and is not limited by reading
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


def open_device(*given: str, attention: str = ATTENTIONS[0]) -> Any:
    """The device that the options of `generate` name, with flash or standard attention."""
    kind, types = device_types(*given)
    return (Host if kind == "cpu" else Cuda)(attention, *types)


def limit(engine: Engine, steps_per_second: float) -> str | None:
    """The line that compares the speed with the one at which memory can be read; None where a cache is read."""
    model, device, timing = engine.model, engine.device, engine.timing
    read = model.step_bytes + timing.positions_read * engine.cache.position_bytes / timing.decode_steps
    if read <= CACHED:
        return None
    # A step is a read too: if it is faster than the measured read of as many bytes, its rate is the limit.
    bandwidth = max(device.read_bandwidth(round(read)), steps_per_second * read)
    reached = 100 * steps_per_second * read / bandwidth
    return (
        f"limit    {read / 2**20:.1f} MiB read per step at {bandwidth / 1e9:.1f} GB/s (the fastest such read here) "
        f"allow {bandwidth / read:.1f} steps/s: {reached:.1f} % reached by flash attention"
    )


def report(model: Llama, engine: Engine, found: Comparison) -> str:
    """The lines that are printed after the text."""
    lines = [f"run      {' and '.join(ATTENTIONS)} attention, {engine.device.name}, {engine.cache.describe()}"]
    lines += [f"{name:8} {speed:.1f} steps/s" for name, speed in found.steps_per_second.items()]
    how = f"medians of {found.pieces} pieces of {PIECE} steps each, in turns; the texts are the same"
    lines.append(f"ratio    flash is {found.ratio:.2f} times as fast ({how})")
    if line := limit(engine, found.steps_per_second[ATTENTIONS[0]]):
        lines.append(line)
    return "\n".join(lines)


@command("compare")
def main(argv: list[str]) -> int:
    parser = Parser("compare", PROGRAM, description="A model's text with flash and with standard attention in turns.")
    add_options(parser)
    args = parser.parse_args(argv)
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    checkpoint, model, tokenizer, jobs = loaded(args, seed, open_device)
    weights = getattr(checkpoint, "weights", args.weights)
    given = args.device, args.dtype, checkpoint.dtype, args.cache_dtype, weights
    other = on(model, open_device(*given, attention=ATTENTIONS[1]))
    context = context_of(model, jobs)
    engines = {
        name: Engine(each, len(jobs), context, args.page_size)
        for name, each in zip(ATTENTIONS, (model, other), strict=True)
    }
    found = in_turns(engines, jobs)
    for number, request in enumerate(found.requests):
        print("\n" * bool(number) + tokenizer.decode(request.prompt + request.tokens), flush=True)
    print(report(model, engines[ATTENTIONS[0]], found), file=sys.stderr)
    return 0
