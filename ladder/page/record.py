"""Records trace.json, the page's time line, on a Hopper GPU: one work item of a block whose kernel writes time stamps.

    PYTHONPATH=python python -m ladder.page.record && python ladder/page/build.py

It needs the experiments library (ladder/variants) and PyTorch. A stamp says when a thread begins an activity, which
lasts until the thread's next stamp (fa_trace in experiments.h). Events that no thread sees are inferred: a copy ends
when its first reader finds it, and the second of two products in flight begins when the first has ended.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from ladder import variants
from ladder.page import recording

EVENT = {name: number for number, name in enumerate(variants.TRACE_EVENTS)}
SHAPE = (4, 1024, 16, 128)  # batch, seqlen, heads, headdim: about four work items a block
ITEM = 1  # the item of a block that is recorded: item 0 finds nothing in L2
OPERANDS = {"wait_keys": "K", "wait_values": "V"}
Span = tuple[str, int, int, int]  # event, tile, begin, end in cycles


def spans(role: np.ndarray, item: int) -> list[Span]:
    """The activities of a role for an item. Each lasts until the role's next stamp; the item's last activity ends where
    the next item begins."""
    stamps = role["stamps"][: min(int(role["count"]), variants.TRACE_STAMPS)]
    places = np.flatnonzero(stamps["item"] == item)
    found = []
    for i in places:
        if i + 1 < len(stamps):
            name = variants.TRACE_EVENTS[stamps["event"][i]]
            found.append((name, int(stamps["tile"][i]), int(stamps["clock"][i]), int(stamps["clock"][i + 1])))
    return found


def consumer_events(found: list[Span]) -> list[tuple]:
    """(event, tile, begin, end, operand) for each activity of a consumer, with the page's names of events."""
    events: list[tuple] = []
    issued: dict[tuple[str, int], int] = {}  # products in flight: when each was issued
    free = 0  # when the previous product ended

    def finish(event: str, tile: int, end: int) -> None:
        nonlocal free
        if (begin := issued.pop((event, tile), None)) is not None:
            events.append((event, tile, max(begin, min(free, end)), end, None))
            free = max(free, end)

    for name, tile, begin, end in found:
        if name in OPERANDS:
            if not issued:  # otherwise the tensor cores work for this consumer while it waits
                events.append(("wait_full", tile, begin, end, OPERANDS[name]))
        elif name == "wait_turn":
            events.append(("wait_turn", tile, begin, end, None))
        elif name in ("scores", "product"):
            issued["scores" if name == "scores" else "values", tile] = begin
        elif name == "wait_scores":
            finish("scores", tile, end)
        elif name == "wait_product":
            finish("values", tile, end)
        elif name in ("softmax", "rescale"):
            events.append(("softmax", tile, begin, end, None))
    return events


def recorded(block: np.ndarray, consumers: int, item: int, clock_mhz: float, **about: Any) -> dict[str, Any]:
    """The trace of one item, in the format of recording.py. block: (roles,) of variants.ROLE."""
    reads = [spans(block[1 + i], item) for i in range(consumers)]
    arrived: dict[tuple[str, int], int] = {}  # (operand, tile) -> when its first reader had it
    for found in reads:
        for name, tile, _, end in found:
            if operand := OPERANDS.get(name):
                arrived[operand, tile] = min(end, arrived.get((operand, tile), end))
    copies = []
    for name, tile, begin, end in spans(block[0], item):
        if operand := OPERANDS.get(name):
            copies.append(("wait_empty", tile, begin, end, operand))
            copies.append(("copy", tile, end, max(end, arrived.get((operand, tile), end)), operand))
    roles = {"producer": copies} | {f"consumer{i}": consumer_events(found) for i, found in enumerate(reads)}
    start = min(begin for events in roles.values() for _, _, begin, _, _ in events)
    rows = []
    for role, events in roles.items():
        for event, tile, begin, end, operand in events:
            if end > begin:
                row = {"role": role, "event": event, "tile": tile} | ({"operand": operand} if operand else {})
                times = (round((cycles - start) * 1e3 / clock_mhz) for cycles in (begin, end))
                rows.append(row | dict(zip(("begin_ns", "end_ns"), times, strict=True)))
    rows.sort(key=lambda row: (row["begin_ns"], row["role"]))
    tiles = 1 + max(row["tile"] for row in rows)
    return {**about, "clock_mhz": round(clock_mhz), "tiles": tiles, "events": rows}


def record(name: str) -> dict[str, Any]:
    """Runs a trace variant. Raises the errors of the variants' library, and ValueError for a wrong answer or trace."""
    import torch

    variant = next(v for v in variants.variants() if v.name == name)
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    launch, out, _, workspace = variants.prepare_forward(name, q, k, v)
    for _ in range(200):  # until the clock has settled under load
        launch()
    clock = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={torch.cuda.current_device()}"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    torch.cuda.synchronize()
    true = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2).double() for x in (q, k, v)))
    error = (out.double() - true.transpose(1, 2)).abs().max().item()
    if not error < 0.01:
        raise ValueError(f"{name}: error {error} against float64")
    gpu = torch.cuda.get_device_name()
    trace = recorded(
        variants.read_trace(workspace)[0], variant.tile_m // 64, ITEM, float(clock.split()[0]),
        source=f"{gpu}, stamps of {name}, {datetime.date.today()}",
        about=f"{variant.tile_m} query rows in {variant.tile_m // 64} warpgroups, headdim {SHAPE[3]}, tiles of "
        f"{variant.tile_n} keys, bfloat16, a ring of {variant.stages} stages each for K and V. A copy is drawn from "
        "its start until its first reader finds it.",
        stages=variant.stages,
    )  # fmt: skip
    recording.check(trace)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variant", default="trace_ping_pong_d128", help="of the experiment `trace`")
    parser.add_argument("--output", type=Path, default=recording.FILE, help="default: the page's own trace.json")
    options = parser.parse_args()
    options.output.write_text(recording.dump(record(options.variant)))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
