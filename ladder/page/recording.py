"""The trace of the page's time line: its format, a check of it, and a model that stands in for a recording.

    python ladder/page/recording.py          writes trace.json from the model
    python ladder/page/recording.py FILE     checks a recording

trace.json, all times of one block of the Hopper kernel:

    {"source": "...",         GPU, kernel and date. The page labels a source that begins with "model:" as not measured
     "clock_mhz": 1755,       of the multiprocessor: the page shows cycles and nanoseconds
     "tiles": 8,              tiles of keys that the block walked through, 0 .. tiles - 1, in any order
     "stages": 2,             optional, tiles that a ring holds; default 2
     "about": "...",          optional, a sentence for the reader: shape, dtype
     "events": [{"role": "producer" | "consumer0" | "consumer1" | "consumer2",
                 "event": one of EVENTS below,
                 "tile": n,
                 "operand": "K" | "V",   optional, for copies and waits. A copy without it brings both K and V
                 "begin_ns": ..., "end_ns": ...}, ...]}
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

FILE = Path(__file__).resolve().with_name("trace.json")
ROLES = ("producer", "consumer0", "consumer1", "consumer2")
EVENTS = {
    "producer": ("wait_empty", "copy"),
    "consumer": ("wait_full", "wait_turn", "scores", "softmax", "values"),
}


def check(trace: dict) -> None:
    """Raises a ValueError that names the wrong field."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"trace: {what}")

    def number(value, least: float) -> bool:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        return real and math.isfinite(value) and value >= least

    need(isinstance(trace.get("source"), str) and bool(trace["source"]), "source says nothing")
    need(number(trace.get("clock_mhz"), 1), f"clock_mhz is {trace.get('clock_mhz')}")
    need(number(trace.get("tiles"), 1), f"tiles is {trace.get('tiles')}")
    need(number(trace.get("stages", 2), 1), f"stages is {trace.get('stages')}")
    need(bool(trace.get("events")), "no events")
    for number_of, event in enumerate(trace["events"]):
        where = f"events[{number_of}]"
        need(event.get("role") in ROLES, f"{where}.role is {event.get('role')!r}")
        known = EVENTS[event["role"].rstrip("012")]
        need(event.get("event") in known, f"{where}.event is {event.get('event')!r}, not one of {', '.join(known)}")
        tile = event.get("tile")
        need(isinstance(tile, int) and 0 <= tile < trace["tiles"], f"{where}.tile is {tile}")
        need(event.get("operand") in (None, "K", "V"), f"{where}.operand is {event.get('operand')!r}")
        begin, end = event.get("begin_ns"), event.get("end_ns")
        need(number(begin, 0) and number(end, 0) and begin <= end, f"{where} lasts from {begin} to {end}")


def model(tiles: int = 8, stages: int = 2, clock_mhz: int = 1755) -> dict:
    """A block of 2 x 64 rows, headdim 128, tiles of 128 keys, walked as wgmma_sm90/kernel.cuh does: the last keys
    first, K one tile ahead of V, S(n) and O += P(n + 1) V(n + 1) in one turn of a consumer.

    Cycles: a product of 64 x 128 x 128 takes the tensor cores 512 (4096 operations a cycle). A tile of 32 KB comes from
    L2 in 930. A softmax of 64 x 128 takes 980: 16 exponentials a cycle, and about as long again for the rest. Only one
    copy and one product run at a time.
    """
    PRODUCT, COPY, SOFTMAX = 512, 930, 980
    events = []
    copied, free = 0, 0  # when the copy engine and when the tensor cores become free
    full, empty = {}, {}  # (operand, tile) -> cycle
    ready = [0, 0]  # when each consumer has finished its earlier steps

    def record(role, event, tile, begin, end, operand=None):
        if end > begin:
            row = {"role": role, "event": event, "tile": tile}
            nanoseconds = {"begin_ns": round(begin * 1e3 / clock_mhz), "end_ns": round(end * 1e3 / clock_mhz)}
            events.append(row | ({"operand": operand} if operand else {}) | nanoseconds)

    def copy(operand, tile):
        nonlocal copied
        begin = max(copied, empty.get((operand, tile + stages), 0))
        record("producer", "wait_empty", tile, copied, begin, operand)
        record("producer", "copy", tile, begin, begin + COPY, operand)
        copied = full[operand, tile] = begin + COPY

    def product(consumer, event, operand, tile):
        nonlocal free
        arrived = max(ready[consumer], full[operand, tile])
        record(f"consumer{consumer}", "wait_full", tile, ready[consumer], arrived, operand)
        begin = max(arrived, free)
        record(f"consumer{consumer}", "wait_turn", tile, arrived, begin)
        record(f"consumer{consumer}", event, tile, begin, begin + PRODUCT)
        free = ready[consumer] = begin + PRODUCT
        empty[operand, tile] = max(empty.get((operand, tile), 0), free)

    for n in reversed(range(-1, tiles)):  # a last round of values alone
        if n >= 0:
            copy("K", n)
        if n + 1 < tiles:
            copy("V", n + 1)
        for consumer in (0, 1):
            if n >= 0:
                product(consumer, "scores", "K", n)
            scored = ready[consumer]
            if n + 1 < tiles:
                product(consumer, "values", "V", n + 1)
            if n >= 0:  # the softmax runs during this consumer's product with V
                record(f"consumer{consumer}", "softmax", n, scored, scored + SOFTMAX)
                ready[consumer] = max(ready[consumer], scored + SOFTMAX)
    about = (
        "128 query rows in two warpgroups, headdim 128, tiles of 128 keys, 16-bit inputs, "
        f"a ring of {stages} stages each for K and V."
    )
    events.sort(key=lambda event: (event["begin_ns"], event["role"]))
    return {
        "source": "model: The schedule as it follows from the speeds of an H200's units",
        "about": about,
        "clock_mhz": clock_mhz,
        "tiles": tiles,
        "stages": stages,
        "events": events,
    }


def dump(trace: dict) -> str:
    """trace as JSON with one event a line, so that a diff of two recordings is readable."""
    head = json.dumps({key: value for key, value in trace.items() if key != "events"}, indent=1)
    events = ",\n".join("  " + json.dumps(event) for event in trace["events"])
    return f'{head[:-2]},\n "events": [\n{events}\n ]\n}}\n'


def main(arguments: list[str]) -> None:
    if arguments:
        check(json.loads(Path(arguments[0]).read_text()))
    else:
        check(trace := model())
        FILE.write_text(dump(trace))


if __name__ == "__main__":
    main(sys.argv[1:])
