"""The times of kernels for few queries, and the numbers of cuda/attention/decode/common/few_queries.h.

    python tests/few_queries.py measure OUT.json [--calls 1900] [--seed 900] [--seconds 90]    on a GPU, with PyTorch
    python tests/few_queries.py fit docs/benchmarks/h200/few_queries.json      prints the table; needs SciPy

`fit` minimises the errors of log(estimate / time), those of a kernel far from the best one weighing less. Then it moves
single numbers by up to 40 % where the choices become better; a third of that holds in calls that it has not seen. The
form of an estimate stands in the header, and here in `estimate`, which the test of the table uses, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "cuda" / "attention" / "decode" / "common" / "few_queries.h"
DATA = ROOT / "docs" / "benchmarks" / "h200" / "few_queries.json"
KERNELS = (
    "mma_sm80", "wgmma_sm90", "wgmma_wide_sm90", "wgmma_split_sm90", "decode_split_sm80", "decode_wide_sm80",
    "decode_ring_sm90", "decode_cluster_sm90", "decode_lanes_cluster_sm90",
)  # fmt: skip
BUCKETS = (64, 128, 256, 512)
MOST_QUERIES = 64
NUMBERS = (
    "start", "of_round", "of_step", "reads", "reads_again", "start_scores", "step_scores", "step_pages",
    "start_natural", "step_natural", "merge", "step_rows", "start_rows", "ragged", "cache", "cache_start",
)  # fmt: skip
GUESS = (3, 0.8, 0.5, 1, 0.3, 0.5, 0.2, 0.1, 0.3, 0.1, 2, 0.3, 1, 0.1, 0.2, 0.3)
MULTIPROCESSORS = 132
REGULAR = 0.4  # how strongly a number is drawn to its guess


def described(call) -> dict:
    """Numbers of a call of the sweep that an estimate needs."""
    options = set(call.options)
    width, keys = max(call.headdim, call.headdim_v), call.seqlen_k
    left, right = call.window if "window" in options else (-1, -1)
    if left >= 0:
        right = 0 if "causal" in options else right
        keys = min(keys, left + call.seqlen_q + (right if right >= 0 else keys))
    return {
        "bucket": next(i for i, bucket in enumerate(BUCKETS) if width <= bucket),
        "batch": call.batch, "heads": call.nheads, "heads_k": call.nheads_k, "columns": call.headdim + call.headdim_v,
        "columns_v": call.headdim_v, "rows": call.seqlen_q * call.nheads // call.nheads_k, "keys": keys,
        "cache": float(call.is_cache),
        "scores": float(any(name.startswith("bias") or "mask" in name or name == "dropout" for name in options)),
        "natural": float(bool(options & {"softcap", "alibi"})), "pages": float(0 < call.page < 64),
        "paged": float(call.page > 0),
        "ragged": float(bool(call.headdim * 2 % 128 or call.headdim_v * 2 % 128)),
    }  # fmt: skip


def units_stay_whole(kernel: str, call: dict, tile_rows: int, tile: int, places: int) -> bool:
    """decode_units_stay_whole of decode.h."""
    ring, large = kernel == "decode_ring_sm90", kernel == "decode_wide_sm80" or call["bucket"] == 2
    tiles = math.ceil(call["keys"] / tile)
    units = call["batch"] * call["heads_k"] * math.ceil(call["rows"] / tile_rows)
    if call["keys"] > 2048 and 4 * units < 3 * places:
        return False
    step = (0.4 if ring else 1.7 if large else 0.85) * (4 if tile_rows > 16 else 1) * (1.5 if call["scores"] else 1)
    bytes_of_unit = call["keys"] * call["columns"] * 2
    time = lambda blocks, steps, n: max(steps * step, n * bytes_of_unit / 5e6) if blocks else 0  # noqa: E731
    rounds, rest = divmod(units, places)
    whole = rounds * time(1, tiles, places) + time(rest, tiles, rest)
    cut = time(1, max(1, math.ceil(units * tiles / places)), units)
    rows = call["batch"] * call["rows"] * call["heads_k"]
    merge = (2.0 if large else 1.4) + 0.005 * rows * max(1, call["columns_v"] / 128)
    merge += 2.0 if ring and 10 * units * tiles >= 9 * places else 0.0
    return whole <= cut + merge


def features(kernel: str, call: dict, sms: int = MULTIPROCESSORS) -> tuple[float, ...]:
    """Rounds, steps, reads, reads again, merge, more than 16 rows, pages that take time."""
    up = lambda x, y: math.ceil(x / y)  # noqa: E731
    bucket, units, rows, keys = call["bucket"], call["batch"] * call["heads_k"], call["rows"], call["keys"]
    read, tiles = units * keys * 2 * call["columns"] / 4.2e6, up(keys, 128 if bucket == 0 else 64)
    if kernel in ("mma_sm80", "wgmma_sm90", "wgmma_wide_sm90"):
        mma, blocks = kernel == "mma_sm80", call["batch"] * call["heads"]
        again = blocks * keys * 2 * call["columns"] / 6.5e6
        if kernel == "wgmma_wide_sm90":
            blocks *= 2  # halves of the columns of V
        rounds = up(blocks, sms * (2 if mma and bucket < 3 else 1))
        return (
            rounds,
            rounds * up(keys, 128 if not mma else 64 if bucket < 2 else 32),
            read,
            again,
            0,
            0,
            call["paged" if mma else "pages"],
        )
    if "cluster" in kernel:
        lanes, blocks = "lanes" in kernel, 2
        while blocks < 8 and units * blocks * 2 <= 2 * sms:
            blocks *= 2
        blocks = 16 if units * 16 <= sms else blocks
        rounds = up(units * blocks, int(sms * (0.95 if lanes or bucket > 0 else 2)))
        return (
            rounds,
            rounds * up(tiles, blocks) * (up(rows, 4) if lanes else 1),
            read,
            0,
            0,
            rounds * (rows > 1) * rows / 16,
            call["pages"],
        )
    if kernel == "wgmma_split_sm90":
        row_tiles = up(rows, 64)
        filled, merges = units * row_tiles / sms, tiles > 1 and units * row_tiles % sms != 0
        return (
            max(1, filled),
            max(1, filled * tiles),
            read * row_tiles,
            0,
            float(merges),
            float(rows > 16),
            call["pages"],
        )
    split = kernel == "decode_split_sm80"
    tile_rows, tile = (
        64 if split and rows > 16 else 16,
        32 if kernel == "decode_wide_sm80" else 128 if bucket == 0 else 64,
    )
    row_tiles, places, tiles = up(rows, tile_rows), sms * (2 if split and bucket < 2 else 1), up(keys, tile)
    filled, wide = units * row_tiles / places, float(split and rows > 16)
    if units_stay_whole(kernel, call, tile_rows, tile, places):
        rounds = up(units * row_tiles, places)
        return rounds, rounds * tiles, read * row_tiles, 0, 0, wide, call["pages"]
    merges = tiles > 1 and units * row_tiles % places != 0
    return max(1, filled), max(1, filled * tiles), read * row_tiles, 0, float(merges), wide, call["pages"]


def estimate(numbers, made, call):
    """Microseconds. `made`: of features; `call`: of described. Arrays of both may be given."""
    t = dict(zip(NUMBERS, numbers, strict=True))
    rounds, steps, read, again, merges, wide, pages = made
    shorter = 1 - 0.5 * t["cache"] * call["cache"]
    steps = (
        steps * shorter * t["of_step"]
        * (1 + t["step_scores"] * call["scores"] + t["step_pages"] * pages + t["step_rows"] * wide
           + t["step_natural"] * call["natural"])
    )  # fmt: skip
    read, again = read * shorter * t["reads"] * (1 + t["ragged"] * call["ragged"]), again * t["reads_again"]
    starts = (
        t["start"] + t["cache_start"] * call["cache"] + t["of_round"] * rounds + t["start_scores"] * call["scores"]
        + t["start_natural"] * call["natural"] + t["merge"] * merges + t["start_rows"] * wide
    )  # fmt: skip
    return starts + np.sqrt(steps**2 + read**2 + again**2)


def load(path: Path) -> list[tuple[dict, dict]]:
    """(call, microseconds of each kernel) of each row: the geometric mean of keys in L2 and keys in memory."""
    from flash_attn_lab.bench.calls.call import Call

    rows = json.loads(path.read_text())["rows"]
    mean = lambda row, kernel: math.sqrt(row["us"][kernel] * max(row.get("us_cold", row["us"])[kernel], 1))  # noqa: E731
    return [(described(Call.parse(row["call"])), {kernel: mean(row, kernel) for kernel in row["us"]}) for row in rows]


def table_of_header() -> dict:
    text = HEADER.read_text().split("kFewTimes[kFewKernels][kFewBuckets] = {")[1].split("// clang-format on")[0]
    rows = [[float(x) for x in row.split(",")] for row in re.findall(r"\{([\d., ]+)\}", text)]
    places = [(kernel, bucket) for kernel in KERNELS for bucket in range(len(BUCKETS))]
    return dict(zip(places, rows, strict=True))


def estimates_of(table: dict, call: dict, made: dict) -> dict:
    """Kernel -> microseconds, of those that have numbers. made: kernel -> features."""
    numbers = {kernel: table[kernel, call["bucket"]] for kernel in made}
    return {kernel: estimate(numbers[kernel], made[kernel], call) for kernel in made if any(numbers[kernel])}


def loss(estimates: dict, times: dict) -> float:
    """The logarithm of the time of the kernel with the least estimate over that of the fastest one."""
    return math.log(times[min(estimates, key=estimates.get)] / min(times.values()))


def regret(table: dict, rows) -> float:
    """The time of the kernels with the least estimates over that of the best ones, in the geometric mean."""
    logs = []
    for call, times in rows:
        logs.append(loss(estimates_of(table, call, {k: features(k, call) for k in times}), times))
    return math.exp(np.mean(logs))


def fit(rows) -> dict:
    from scipy.optimize import least_squares

    table = {}
    for kernel in KERNELS:
        for bucket in range(len(BUCKETS)):
            own = [(call, times) for call, times in rows if call["bucket"] == bucket and kernel in times]
            table[kernel, bucket] = [0.0] * len(NUMBERS)
            if len(own) < 20:
                continue
            made = np.array([features(kernel, call) for call, _ in own], float).T
            calls = {name: np.array([call[name] for call, _ in own], float) for name in own[0][0]}
            took = np.array([times[kernel] for _, times in own])
            weight = np.array([min(times.values()) for _, times in own]) / took
            guess, most = np.log(GUESS), np.log([1.0 if name == "cache" else 60.0 for name in NUMBERS])

            def errors(x, made=made, calls=calls, took=took, weight=weight, guess=guess):
                with np.errstate(all="ignore"):
                    off = np.log(estimate(np.exp(x), made, calls) / took)
                return np.concatenate([off * weight, (x - guess) * REGULAR])

            found = np.exp(
                least_squares(errors, guess, bounds=(np.log(1e-4), most + 1e-9), loss="soft_l1", f_scale=0.1).x
            )
            # Numbers of what the kernel never meets.
            used = {
                "reads_again": made[3].any(), "merge": made[4].any(),
                "step_rows": made[5].any(), "start_rows": made[5].any(),
                **{name: calls["scores"].any() for name in ("start_scores", "step_scores")},
            }  # fmt: skip
            table[kernel, bucket] = [
                round(x, 3) if used.get(n, True) else 0.0 for n, x in zip(NUMBERS, found, strict=True)
            ]
    return table


def tuned(table: dict, rows) -> dict:
    """The table after small steps of its numbers, one after another, each kept where the choice becomes better."""
    table = {place: list(numbers) for place, numbers in table.items()}
    for bucket in range(len(BUCKETS)):
        own = [(call, {k: features(k, call) for k in times}, times) for call, times in rows if call["bucket"] == bucket]

        def cost(own=own) -> float:
            return sum(loss(estimates_of(table, call, made), times) for call, made, times in own)

        best = cost()
        for factors in ((0.85, 1.18, 0.7, 1.4), (0.92, 1.09)):
            for kernel, i, factor in itertools.product(KERNELS, range(len(NUMBERS)), factors):
                numbers, before = table[kernel, bucket], table[kernel, bucket][i]
                numbers[i] = round(before * factor, 3)
                if (NUMBERS[i] == "cache" and numbers[i] > 1) or (now := cost()) >= best - 1e-6:
                    numbers[i] = before
                else:
                    best = now
    return table


def microseconds(launch, repeats: int = 0) -> float:
    """Device time of a launch that is given a number: the median of five graphs of them. 0 repeats: by its time."""
    from statistics import median

    import torch

    for i in range(2):
        launch(i)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def between(run) -> float:
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    repeats = repeats or max(5, min(20, int(3e3 / max(between(lambda: launch(0)), 10))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            launch(i)
    return round(median(between(graph.replay) for _ in range(5)) / repeats, 2)


class Cold:
    """Device times of launches whose keys lie in memory and not in L2, as in a step of a model, which reads weights
    between two of its calls: a read of 128 MB comes before each launch, and its time is taken off."""

    REPEATS = 8

    def __init__(self):
        import torch

        read = torch.empty(32 << 20, device="cuda").fill_(1.0)
        sums = torch.empty((), device="cuda")
        self.read = lambda: torch.sum(read, (0,), out=sums)
        self.alone = microseconds(lambda i: self.read(), self.REPEATS)

    def microseconds(self, launch) -> float:
        def both(i: int) -> None:
            self.read()
            launch(i)

        return round(microseconds(both, self.REPEATS) - self.alone, 2)


def write(path: Path, machine, command: str, suite: str, rows: list[dict]) -> None:
    from datetime import date

    from flash_attn_lab.report import commit

    about = {
        "machine": {"gpu": machine.name}, "date": f"{date.today()}", "commit": commit(), "command": command,
        "suite": suite, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(about, indent=0) + "\n")


def measure(given: argparse.Namespace, suite: str, kernels_of, widest: int, colds: bool = False) -> None:
    """Writes the times of random calls of the sweep in the kernels that kernels_of(call) names, if it names any. colds:
    those with keys in memory, too."""
    from flash_attn_lab.bench.calls.call import drawn
    from flash_attn_lab.bench.calls.make import Arrays, ours
    from flash_attn_lab.bench.machine import open_machine
    from flash_attn_lab.bench.systems import Refused

    machine, rows, end, number = open_machine("cuda", "torch"), [], time.monotonic() + given.seconds, -1
    cold = Cold() if colds else None
    while len(rows) < given.calls and time.monotonic() < end:
        number += 1
        call = drawn(given.seed, number, "cuda", ("bfloat16", "float16"))
        kernels = () if call.packed is not None or max(call.headdim, call.headdim_v) > widest else kernels_of(call)
        if not kernels:
            continue
        arrays, took, took_cold = Arrays.of(machine, call), {}, {}
        for kernel in kernels:
            try:
                launch = ours(arrays, kernel).launch
                took[kernel] = microseconds(launch)
                if cold:
                    took_cold[kernel] = cold.microseconds(launch)
            except Refused:
                continue
        if len(took) > 1:
            rows.append({"call": str(call), "us": took} | ({"us_cold": took_cold} if cold else {}))
            print(f"[{len(rows)}/{given.calls}] {call}", file=sys.stderr)
    write(given.path, machine, " ".join(sys.argv), suite, rows)


def arguments(about: str, calls: int, seed: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("measure", "fit"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--calls", type=int, default=calls)
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--seconds", type=float, default=90)
    return parser.parse_args()


def main() -> None:
    given = arguments(__doc__, calls=1900, seed=900)
    if given.verb == "measure":

        def kernels_of(call) -> tuple[str, ...]:
            wide = max(call.headdim, call.headdim_v) > 256
            kernels = tuple(kernel for kernel in KERNELS if kernel == "mma_sm80" or ("wide" in kernel) == wide)
            return () if call.backward or call.seqlen_q > MOST_QUERIES else kernels

        measure(given, "few_queries", kernels_of, BUCKETS[-1], colds=True)
        return
    rows = load(given.path)
    table = tuned(fit(rows), rows)
    for kernel in KERNELS:
        lines = ("{" + ", ".join(f"{x:g}" for x in table[kernel, bucket]) + "}" for bucket in range(len(BUCKETS)))
        print("    {  // " + kernel + "\n" + ",\n".join(f"     {line}" for line in lines) + "},")
    print(f"// regret {regret(table, rows):.3f}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    main()
