"""The times of kernels for gradients of short sequences, and the numbers of cuda/api/attention/short_gradients.h.

    python tests/short_gradients.py measure OUT.json [--calls 1000] [--seed 905] [--seconds 90]   on a GPU, with PyTorch
    python tests/short_gradients.py fit docs/benchmarks/h200/short_gradients.json     prints the table; needs SciPy

As tests/few_queries.py, whose timer it takes. The form of an estimate stands in the header, and here.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import few_queries
import numpy as np

ROOT = few_queries.ROOT
HEADER = ROOT / "cuda" / "api" / "attention" / "short_gradients.h"
DATA = ROOT / "docs" / "benchmarks" / "h200" / "short_gradients.json"
SHORT, LONG = "mma_short_sm80", ("wgmma_sm90", "wgmma_pair_sm90")  # up to head dim 128, and above
BUCKETS = (64, 128, 256)
NUMBERS = ("start", "of_round", "of_step", "extra", "rows", "bias", "mask", "natural", "dropout", "pairs", "lists")
GUESS = {"short": (4, 3, 3, 1, 1, 0.3, 0.2, 0.3, 0.3, 0.3, 1), "long": (9, 4, 2, 3, 3, 0.3, 0.1, 0.2, 0.3, 0.2, 10)}
MULTIPROCESSORS = 132
REGULAR = 0.3
BLOCK_N = 128


def up(x: float, y: float) -> int:
    return math.ceil(x / y)


def described(call) -> dict:
    """Numbers of a call of the sweep that an estimate needs."""
    options = set(call.options)
    left, right = call.window if "window" in options else (-1, -1)
    width = max(call.headdim, call.headdim_v)
    kinds = {
        "bias": any(name.startswith("bias") for name in options), "mask": "key_mask" in options,
        "natural": bool(options & {"softcap", "alibi"}), "dropout": "dropout" in options,
        "pairs": bool(options & {"pair_mask", "causal_mask"}),
    }  # fmt: skip
    return {
        "batch": call.batch, "heads": call.nheads, "heads_k": call.nheads_k, "rows": call.seqlen_q,
        "keys": call.seqlen_k, "left": left, "right": 0 if "causal" in options else right, "width": width,
        "bucket": next(i for i, bucket in enumerate(BUCKETS) if width <= bucket),
        **{name: float(on) for name, on in kinds.items()},
    }  # fmt: skip


def of_short(call: dict, sms: int = MULTIPROCESSORS) -> tuple[float, float, float, float]:
    """Rounds, steps, clusters, steps of blocks that write dq, too: backward_short_plan."""
    tiles_q, tiles_k, group = up(call["rows"], 64), up(call["keys"], 64), call["heads"] // call["heads_k"]
    places, queries, heads_k = sms * (2 if call["bucket"] < 2 else 1), tiles_q * call["heads"], call["heads_k"]
    queries, heads_k = queries * call["batch"], heads_k * call["batch"]
    hides = call["bias"] or call["mask"] or call["pairs"]
    writes = tiles_k <= 1 and (not hides or tiles_q * group <= 1) and queries + heads_k > places
    clusters, most = tiles_k * heads_k + (0 if writes else queries), max(tiles_q * group, tiles_k)
    blocks = 1
    while blocks < 8 and blocks < most and 2 * clusters * blocks <= places:
        blocks *= 2
    steps = max(up(most, blocks), (tiles_k * heads_k * tiles_q * group + (0 if writes else queries * tiles_k)) / places)
    return up(clusters * blocks, places), steps, float(blocks > 1), steps if writes else 0.0


def head_walk(rows: int, keys: int, left: int, right: int, tile: int, top_left: bool = False) -> tuple[int, float]:
    """The longest and the mean walk over a head, in tiles: head_walk of wgmma_sm90/walk_parts.h."""
    shift, blocks = 0 if top_left else keys - rows, up(keys, BLOCK_N)
    first = -rows if left < 0 else min(max(shift - left, -rows), keys)
    last = keys if right < 0 else min(max(shift + right, -rows), keys)
    walks, samples = [], min(blocks, 16)
    for x in range(samples):
        key0 = (x * (blocks - 1) // (samples - 1) if samples > 1 else 0) * BLOCK_N
        top, bottom = key0 - last, min(key0 + BLOCK_N, keys) - 1 - first
        hidden = top >= rows or bottom < 0
        walks.append(0 if hidden else min(bottom, rows - 1) // tile + 1 - max(top, 0) // tile)
    return max(walks), sum(walks) / samples


def walk_parts(blocks: int, longest: float, mean: float, group: int, slots: int, sms: int, columns: int):
    """backward_walk_parts of wgmma_sm90/walk_parts.h: rounds, time in tiles of the main kernel, (heads, rows)."""
    of_keys, tail, of_addition, of_row_parts, gain, most_blocks, cached = 2, 0.6, 1.5, 1.5, 0.95, 8, 40e6

    def time(heads: int, rows: int) -> float:
        most = up(int(longest), rows) * group / heads + of_keys
        average = mean / rows * group / heads + of_keys
        slower = 1.03 if rows > 1 and group > 1 else 1
        rounds = up(blocks * heads * rows, slots)
        if mean > 0.9 * longest or rounds <= 1:
            return slower * rounds * most
        return slower * max(blocks * heads * rows * average / slots + tail * average, most)

    best, least = (1, 1), gain * time(1, 1)
    for heads in range(1, group + 1):
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
            parts = heads * rows
            if parts == 1 or group % heads or (rows > 1 and (1 < heads < group or 2 * rows > longest)):
                continue
            if max(2, parts) * blocks > most_blocks * sms:
                continue
            size = blocks * parts * BLOCK_N * 2 * columns * 8
            traffic = min(size, cached) / 20e6 + max(0, size - cached) / 5e6
            now = time(heads, rows) + of_addition + (of_row_parts if rows > 1 else 0) + traffic
            if now < least:
                best, least = (heads, rows), now
    return up(blocks * best[0] * best[1], slots), time(*best), best


def shape_of_walks(call: dict, sms: int = MULTIPROCESSORS) -> tuple:
    """The arguments of walk_parts for a call of `described`."""
    tile, wide = 128 if call["bucket"] == 0 else 64, call["bucket"] == 2
    columns = 64 if call["bucket"] == 0 else 128 if call["bucket"] == 1 else 192 if call["width"] <= 192 else 256
    blocks = up(call["keys"], BLOCK_N) * call["batch"] * call["heads_k"]
    walks = head_walk(call["rows"], call["keys"], call["left"], call["right"], tile)
    return blocks, *walks, call["heads"] // call["heads_k"], sms // 2 if wide else sms, sms, columns


def of_long(call: dict, sms: int = MULTIPROCESSORS) -> tuple[float, float, float, float]:
    """Rounds, tiles, parts, millions of elements of dq: long_gradients_time of the header."""
    *shape, columns = shape_of_walks(call, sms)
    rounds, steps, parts = walk_parts(*shape, columns)
    direct = call["keys"] <= BLOCK_N and call["left"] < 0 and not (call["mask"] or call["pairs"])
    direct = direct and (call["right"] < 0 or call["rows"] <= call["keys"])
    size = call["batch"] * call["heads"] * call["rows"] * columns / 1e6
    return rounds, steps, float(parts > (1, 1)), size * (0.5 if direct else 1)


def estimate(numbers, made, call):
    """Microseconds. `made`: of of_short or of_long; `call`: of described. Arrays of both may be given."""
    t = dict(zip(NUMBERS, numbers, strict=True))
    rounds, steps, extra, rows = made
    options = 1 + sum(t[name] * call[name] for name in ("bias", "mask", "natural", "dropout", "pairs"))
    return (
        t["start"] + t["lists"] * call["pairs"] + t["of_round"] * rounds + t["of_step"] * steps * options
        + t["extra"] * extra + t["rows"] * rows
    )  # fmt: skip


def load(path: Path) -> list[tuple[dict, dict]]:
    """(call, microseconds of "short" and "long") of each row."""
    from flash_attn_lab.bench.calls.call import Call

    rows = json.loads(path.read_text())["rows"]
    return [
        (described(Call.parse(row["call"])), {"short" if name == SHORT else "long": x for name, x in row["us"].items()})
        for row in rows
    ]


FEATURES = {"short": of_short, "long": of_long}


def table_of_header() -> dict:
    table = {}
    for kind in FEATURES:
        text = HEADER.read_text().split(f"k{kind.title()}Gradients[3] = {{")[1].split("};")[0]
        for bucket, row in enumerate(re.findall(r"\{([\d., ]+)\}", text)):
            table[kind, bucket] = [float(x) for x in row.split(",")]
    return table


def regret(table: dict, rows) -> float:
    """The time of the kernels with the least estimates over that of the best ones, in the geometric mean."""
    logs = []
    for call, times in rows:
        known = {k: estimate(table[k, call["bucket"]], FEATURES[k](call), call) for k in times}
        logs.append(few_queries.loss(known, times))
    return math.exp(np.mean(logs))


def fit(rows) -> dict:
    from scipy.optimize import least_squares

    table = {}
    for kind, features in FEATURES.items():
        for bucket in range(3):
            own = [(c, t) for c, t in rows if c["bucket"] == bucket and kind in t and t[kind] < 3 * min(t.values())]
            made = np.array([features(call) for call, _ in own], float).T
            calls = {name: np.array([float(call[name]) for call, _ in own]) for name in own[0][0]}
            took = np.array([times[kind] for _, times in own])
            weight = np.array([min(times.values()) for _, times in own]) / took
            guess = np.log(GUESS[kind])

            def errors(x, made=made, calls=calls, took=took, weight=weight, guess=guess):
                off = np.log(estimate(np.exp(x), made, calls) / took)
                return np.concatenate([off * weight, (x - guess) * REGULAR])

            found = np.exp(least_squares(errors, guess, loss="soft_l1", f_scale=0.1).x)
            table[kind, bucket] = [round(x, 3) for x in found]
    return table


def kernels_of(call) -> tuple[str, ...]:
    wide = max(call.headdim, call.headdim_v) > 128
    return (SHORT, LONG[wide]) if call.backward and call.seqlen_q <= 640 else ()


def main() -> None:
    given = few_queries.arguments(__doc__, calls=1000, seed=905)
    if given.verb == "measure":
        few_queries.measure(given, "short_gradients", kernels_of, BUCKETS[-1])
        return
    rows = load(given.path)
    table = fit(rows)
    for kind in FEATURES:
        lines = ("{" + ", ".join(f"{x:g}" for x in table[kind, bucket]) + "}" for bucket in range(3))
        print(f"constexpr GradientTimes k{kind.title()}Gradients[3] = {{\n    " + ",\n    ".join(lines) + "};")
    print(f"// regret {regret(table, rows):.4f}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    main()
