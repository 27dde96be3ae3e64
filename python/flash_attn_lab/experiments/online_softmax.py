"""Counts how often the running maximum moves, and how often it must move under cheaper policies. The counts are made in
NumPy, on activations of the model in the package and on random inputs.

A row of scores (in base 2, as in the kernels) is processed in tiles of keys. Policies for the maximum m:

    exact        m is the maximum of all tiles so far; O is multiplied by 2^(old m - new m) for every later tile
    skipped      like exact, but the product with 1 is left out if m moves in no row of a warp (a vote)
    lazy         m moves only when a tile exceeds it by 2^8 (FlashAttention-4; kLazy in wgmma_sm90/plan.h)
    speculative  m is the first tile's; no later maximum is computed. When the sum of a row's exponentials comes too
                 near to overflow, the warp does the tile again with its maximum (kSpeculative there)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from flash_attn_minimal.llama.cache import KVCache
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.model import Llama, Rows
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

from ..bench.check import round_to
from ..bench.figure import COLOURS, MINE, figure_of
from ..models.standard import Host, on
from ..report import table as markdown_table
from .experiment import Experiment, Run, register
from .experiment import Rows as Table
from .report import set_title

LOG2E = math.log2(math.e)
WARP = 16  # rows of O that one warp holds and scales together
THRESHOLD = 8.0  # log2 of the lazy maximum's threshold
SWEEP = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
LIMITS = {"bfloat16": 60.0, "float16": 15.0}  # log2 of the sum at which the speculative tile is done again
TILES = (16, 32, 64, 128)
DRAWN = (*MINE[:4], COLOURS["fa2"], COLOURS["cudnn"])
TEXTS = 8  # texts that the model writes


@dataclass
class Heads:
    """Scores in base 2, (heads, rows, keys) float64, with -inf for hidden ones; v (heads, keys, headdim)."""

    name: str
    scores: np.ndarray
    v: np.ndarray


# ---- the source of the scores ----


class Listening(Host):
    """The host device. It also keeps the rotated q and k, and v, of every layer of a prompt."""

    def __init__(self) -> None:
        super().__init__(attention="standard")
        self.heard: list[tuple[np.ndarray, ...]] = []

    def _standard(self, q, k, v, cache_k, cache_v, rows, rope, config):
        out = super()._standard(q, k, v, cache_k, cache_v, rows, rope, config)  # rotates q and k in place
        self.heard.append(tuple(x[0].astype(np.float64) for x in (q, k, v)))
        return out


def activations(seed: int, length: int | None = None) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Lets the model in the package write a text at temperature 1. Yields (layer, q, k, v) for each layer, with q
    (seqlen, heads, headdim), k and v (seqlen, heads_k, headdim) of all tokens of the text."""
    checkpoint = load_checkpoint(DEFAULT_CHECKPOINT)
    device = Listening()
    model = Llama(checkpoint, device)
    length = min(length or model.config.seq_len, model.config.seq_len)
    start = find_tokenizer(checkpoint).encode("")
    writer = Engine(on(model, Host()), 1, context=length)
    request = writer.add(start, length - len(start) + 1, Sampling(temperature=1.0, seed=seed))
    while writer.busy:
        writer.step()
    tokens = np.array([(start + request.tokens)[:length]], np.int32)
    cache = KVCache(device, model.config, 1, length)
    model.forward(Rows(tokens, np.zeros(1, np.int32), None, 0, length), cache)
    for layer, (q, k, v) in enumerate(device.heard):
        yield layer, q, k, v


def heads_of(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Heads:
    """The scores of q (rows, heads, headdim) and k (keys, heads_k, headdim), with v (keys, heads_k, headdim)."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, 1).transpose(1, 0, 2) for x in (k, v))
    s = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) * (q.shape[2] ** -0.5 * LOG2E)
    if causal:
        s[:, np.arange(s.shape[2]) > np.arange(s.shape[1])[:, None]] = -np.inf
    return Heads(name, s, v)


def random_heads(seed: int, length: int, heads: int, headdim: int, causal: bool) -> Heads:
    q, k, v = np.random.default_rng(seed).standard_normal((3, length, heads, headdim))
    return heads_of(f"random, {length} keys", q, k, v, causal)


# ---- counting ----


@dataclass
class Count:
    """Counts over the (row, tile) pairs in which the row sees a key, except the first such pair of each row. For warps:
    over (warp, tile) pairs in which this holds for one of the warp's 16 rows."""

    row_tiles: int = 0
    moved: int = 0  # the exact maximum rises
    lazy: int = 0  # a tile exceeds the lazy maximum
    warp_tiles: int = 0
    warp_moved: int = 0  # the exact maximum of one of the rows rises
    warp_lazy: int = 0
    warp_again: int = 0  # speculative: tiles done again

    def row(self) -> dict[str, float]:
        rows, warps = max(1, self.row_tiles), max(1, self.warp_tiles)
        return {
            "row_tiles": self.row_tiles,
            "rows_moved": self.moved / rows,
            "rows_lazy": self.lazy / rows,
            "warp_tiles": self.warp_tiles,
            "warps_moved": self.warp_moved / warps,
            "warps_lazy": self.warp_lazy / warps,
            "warps_again": self.warp_again / warps,
        }


def tile_order(keys: int, tile: int, backwards: bool) -> list[slice]:
    starts = range(0, keys, tile)
    return [slice(start, min(start + tile, keys)) for start in (reversed(starts) if backwards else starts)]


def warps(flags: np.ndarray) -> np.ndarray:
    """(heads, rows) -> (heads, warps): whether any row of a warp is flagged."""
    heads, rows = flags.shape
    padded = np.zeros((heads, -(-rows // WARP) * WARP), bool)
    padded[:, :rows] = flags
    return padded.reshape(heads, -1, WARP).any(2)


def count(heads: Heads, tile: int, backwards: bool, threshold: float = THRESHOLD, dtype: str = "bfloat16") -> Count:
    """Counts how often each policy acts. The speculative maximum behaves as in the kernel: the first tile that a row
    sees sets it, and a tile that is done again raises it like the lazy maximum."""
    s, found = heads.scores, Count()
    shape = s.shape[:2]
    exact, lazy, guess = (np.full(shape, -np.inf) for _ in range(3))
    for keys in tile_order(s.shape[2], tile, backwards):
        part = s[:, :, keys]
        top = part.max(2)
        seen = top > -np.inf
        later = seen & (exact > -np.inf)  # not a row's first tile: there is something to scale
        rises, exceeds = later & (top > exact), later & (top > lazy + threshold)
        with np.errstate(invalid="ignore"):
            sums = np.exp2(np.where(np.isneginf(part), -np.inf, part - guess[:, :, None])).sum(2)
        again = later & (np.log2(np.maximum(sums, 1e-300)) > LIMITS[dtype])
        found.row_tiles += int(later.sum())
        found.moved += int(rises.sum())
        found.lazy += int(exceeds.sum())
        found.warp_tiles += int(warps(later).sum())
        found.warp_moved += int(warps(rises).sum())
        found.warp_lazy += int(warps(exceeds).sum())
        redone = warps(again)
        found.warp_again += int(redone.sum())
        first = seen & ~later
        exact = np.maximum(exact, top)
        lazy = np.where(first | exceeds, top, lazy)
        spread = np.repeat(redone, WARP, 1)[:, : shape[1]]
        guess = np.where(first | (spread & later & (top > guess + THRESHOLD)), top, guess)
    return found


def error(heads: Heads, tile: int, backwards: bool, threshold: float, dtype: str = "bfloat16") -> float:
    """RMS error of the output over its RMS. P is rounded to `dtype` before P V, relative to a maximum that moves when a
    tile exceeds it by `threshold`. All other arithmetic is float64."""
    s, shape = heads.scores, heads.scores.shape[:2]
    m, total = np.full(shape, -np.inf), np.zeros(shape)
    out = np.zeros((*shape, heads.v.shape[2]))
    for keys in tile_order(s.shape[2], tile, backwards):
        part = s[:, :, keys]
        top = part.max(2)
        new = np.where((top > m + threshold) | (np.isneginf(m) & (top > -np.inf)), top, m)
        base = np.where(np.isneginf(new), 0.0, new)
        scale = np.exp2(m - base)
        p = np.exp2(part - base[:, :, None])
        total = total * scale + p.sum(2)
        rounded = round_to(p.astype(np.float32), dtype).astype(np.float64)
        out = out * scale[:, :, None] + rounded @ heads.v[:, keys]
        m = new
    p = np.exp2(s - s.max(2, keepdims=True))
    exact = p @ heads.v / p.sum(2, keepdims=True)
    got = out / total[:, :, None]
    return float(np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()))


def records(tiles: int) -> float:
    """The expected number of moves of the running maximum over `tiles` exchangeable numbers, after the first:
    1/2 + 1/3 + ... ."""
    return sum(1 / i for i in range(2, tiles + 1))


# ---- the experiment ----


def run(run: Run) -> None:
    length, texts = (64, 1) if run.quick else (256, TEXTS)
    layers: dict[int, list[Heads]] = {}
    for text in range(texts):
        for layer, q, k, v in activations(run.seed + text, length):
            layers.setdefault(layer, []).append(heads_of(f"model, layer {layer + 1}", q, k, v, True))
    sources = [
        Heads(parts[0].name, *(np.concatenate([getattr(part, x) for part in parts]) for x in ("scores", "v")))
        for parts in layers.values()
    ]
    sources.append(random_heads(run.seed, length, 4 * texts, 32, True))
    if not run.quick:
        sources.append(random_heads(run.seed, 4096, 1, 128, True))
    tiles = TILES[:2] if run.quick else TILES
    jobs = [(heads, tile, backwards) for heads in sources for tile in tiles for backwards in (False, True)]
    with run.steps(len(jobs), "online-softmax"):
        for heads, tile, backwards in jobs:
            run.step(_one(run, heads, tile, backwards))


def _one(run: Run, heads: Heads, tile: int, backwards: bool) -> str:
    keys = heads.scores.shape[2]
    row: dict[str, Any] = {"source": heads.name, "heads": len(heads.scores), "keys": keys, "tile": tile}
    row["order"] = "last key first" if backwards else "first key first"
    found = count(heads, tile, backwards)
    row |= found.row()
    row["warps_again_float16"] = count(heads, tile, backwards, dtype="float16").row()["warps_again"]
    if heads.name.startswith("random"):
        row["rows_expected"] = expected(keys, tile)
    row["sweep"] = {f"{t:g}": round(count(heads, tile, backwards, t).row()["warps_lazy"], 6) for t in SWEEP}
    if keys <= 512:  # the outputs of 4096 keys would take most of the time
        row |= {f"rms_{name}": error(heads, tile, backwards, t) for name, t in (("exact", 0.0), ("lazy", THRESHOLD))}
    run.add(row)
    return f"{heads.name}, tiles of {tile}, {row['order']}: the maximum moves in {row['rows_moved']:.1%} of row tiles"


def expected(keys: int, tile: int) -> float:
    """The share of a causal square's row tiles in which the maximum of exchangeable scores moves. A tile of n keys
    after m earlier keys holds the largest with probability n / (n + m). A diagonal tile has fewer keys than other
    tiles."""
    moves = pairs = 0.0
    for row in range(keys):
        seen = row + 1
        for start in range(tile, seen, tile):
            size = min(tile, seen - start)
            moves += size / (start + size)
            pairs += 1
    return moves / max(1.0, pairs)


# ---- the page ----


def table(data: dict, rows: Table) -> list[str]:
    head = ["scores", "tile", "order", "rows: exact moves", "expected", "rows: lazy moves", "warps: exact"]
    head += ["warps: lazy", "warps: done again, bf16", "fp16", "RMS error, exact", "lazy"]

    def percent(row, name):
        return f"{row[name]:.2%}" if name in row else ""

    body = [
        [
            row["source"], str(row["tile"]), row["order"], percent(row, "rows_moved"), percent(row, "rows_expected"),
            percent(row, "rows_lazy"), percent(row, "warps_moved"), percent(row, "warps_lazy"),
            percent(row, "warps_again"), percent(row, "warps_again_float16"),
            *(f"{row[name]:.2e}" if name in row else "" for name in ("rms_exact", "rms_lazy")),
        ]
        for row in rows
    ]  # fmt: skip
    return [
        f"Shares of the tiles after a row's (or a warp's) first one, over {rows[0]['heads']} heads and texts of each "
        "layer. A warp is 16 rows, and acts when one of them must.",
        "",
        *markdown_table(head, body),
    ]


def shown_tile(rows: Table) -> int:
    """The tile size for the text and the left picture: 64 keys, or the largest size below."""
    return max((row["tile"] for row in rows if row["tile"] <= 64), default=rows[0]["tile"])


def mean(rows: Table, name: str) -> float:
    """The mean of a field over result rows, weighted by the numbers of tiles that they count."""
    weight = "row_tiles" if name.startswith("rows") else "warp_tiles"
    return sum(row[name] * row[weight] for row in rows) / max(1, sum(row[weight] for row in rows))


def findings(data: dict, rows: Table) -> list[str]:
    tile, found = shown_tile(rows), []
    kinds = {"the model's scores": "model", "random scores": "random"}
    for what, kind in kinds.items():
        for order in dict.fromkeys(row["order"] for row in rows):
            mine = [r for r in rows if r["source"].startswith(kind) and (r["tile"], r["order"]) == (tile, order)]
            if mine:
                row, warp, lazy = (mean(mine, name) for name in ("rows_moved", "warps_moved", "warps_lazy"))
                found.append(
                    f"{what.capitalize()}, tiles of {tile} keys, {order}: the maximum of a row moves in {row:.1%} of "
                    f"its later tiles. A warp holds {WARP} rows, and one of them moves in {warp:.1%}: a vote saves the "
                    f"other {1 - warp:.1%} of the products. With a threshold of 2^{THRESHOLD:.0f} a warp acts in "
                    f"{lazy:.2%}."
                )
    model = [row for row in rows if row["source"].startswith("model") and row["tile"] == tile]
    if model:
        layers = len({row["source"] for row in model})
        found.append(
            f"The model is small: {layers} layers, {model[0]['keys']} tokens, at most {-(-model[0]['keys'] // tile)} "
            f"tiles of {tile} keys in a row. In longer rows the maximum moves in fewer tiles, as the random ones show."
        )
        first, last = ([r for r in model if r["order"] == order] for order in ("first key first", "last key first"))
        if first and last:
            ratio = mean(first, "warps_lazy") / max(mean(last, "warps_lazy"), 1e-12)
            found.append(
                "A causal model looks at near keys more than at far ones, so the order of the tiles matters: with the "
                f"lazy maximum the way from the first key on makes a warp act {ratio:.1f} times as often as the way "
                "back from the last one, which the fast kernels take."
            )
    wide, narrow = (max(rows, key=itemgetter(name)) for name in ("warps_again", "warps_again_float16"))
    back = [row["warps_again_float16"] for row in rows if row["order"] == "last key first"]
    found.append(
        "The speculative policy computes no maximum after the first tile. With P in bfloat16 (sums to 2^60) a warp "
        + (f"does up to {wide['warps_again']:.2%} of its tiles again" if wide["warps_again"] else "does no tile again")
        + f", with P in float16 (sums to 2^15) up to {narrow['warps_again_float16']:.2%} ({narrow['source']}, tiles of "
        + f"{narrow['tile']}, {narrow['order']})"
        + (f", and from the last key back up to {max(back):.2%}." if back else ".")
    )
    checked = [row for row in rows if "rows_expected" in row and row["order"] == "first key first"]
    if checked:
        worst = max(abs(row["rows_moved"] - row["rows_expected"]) for row in checked)
        found.append(
            "Of exchangeable scores the n-th tile holds the largest so far with probability 1 / n, so that T tiles "
            "move the maximum about ln T times. What the random rows do differs from this by at most "
            f"{100 * worst:.1f} percentage points from the first key on. From the last one back it is more: the first "
            "tile is the one that the diagonal cuts."
        )
    errors = [(row["rms_lazy"] / row["rms_exact"], row) for row in rows if row.get("rms_exact")]
    if errors:
        low, (high, at) = min(ratio for ratio, _ in errors), max(errors, key=lambda pair: pair[0])
        found.append(
            "P is rounded relative to itself, under any maximum. The exact one still has an advantage: the largest "
            f"weight of a row is 2^0, which bfloat16 holds exactly. The RMS error under the lazy maximum is {low:.2f} "
            f"to {high:.2f} times that under the exact one (the most in {at['source']}, tiles of {at['tile']}, "
            f"{at['order']}), {at['rms_lazy']:.1e} at most of the answer's RMS there, where bfloat16's own step is "
            f"{2**-8:.1e}."
        )
    return found


def picture(data: dict, rows: Table):
    """The share of warps that must scale O. Left: over the threshold. Right: over the size of the tile, exact
    maximum."""
    figure, axes = figure_of(1, 2, 10, 4.4, sharey=True)
    sources = list(dict.fromkeys(row["source"] for row in rows))
    middle = shown_tile(rows)
    left, right = axes[0]
    styles = {"first key first": "-", "last key first": "--"}
    for source, colour in zip(sources, DRAWN * 3, strict=False):
        for order, style in styles.items():
            mine = [row for row in rows if row["source"] == source and row["order"] == order]
            look = {"color": colour, "marker": "o", "markersize": 4}
            for row in (row for row in mine if row["tile"] == middle):
                pairs = [(float(t), 100 * share) for t, share in row["sweep"].items()]
                left.plot(*zip(*pairs, strict=True), style, **look)
            points = sorted((row["tile"], 100 * row["warps_moved"]) for row in mine)
            if points:
                right.plot(*zip(*points, strict=True), style, **look)
        right.plot([], [], color=colour, label=source)
    for order, style in styles.items():
        right.plot([], [], style, color="#7F7F7F", label=order)
    left.set_xlabel(f"threshold, powers of two (tiles of {middle} keys)")
    left.set_ylabel("warps of 16 rows that must scale O, %")
    left.axvline(THRESHOLD, color="#7F7F7F", linestyle=":", linewidth=1)
    left.annotate("lazy", (THRESHOLD, 0.93), xycoords=("data", "axes fraction"), color="#7F7F7F")
    right.set_xscale("log", base=2)
    right.set_xticks(sorted({row["tile"] for row in rows}), [str(n) for n in sorted({row["tile"] for row in rows})])
    right.set_xlabel("keys of a tile (threshold 0)")
    set_title(figure, data, "How often the running maximum moves")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


register(
    Experiment(
        name="online-softmax",
        about="how often the running maximum moves, what a lazy and a speculative maximum save (NumPy)",
        question="The online softmax multiplies its sums by 2^(old - new maximum) when a tile of keys raises a row's "
        "maximum. How often does that happen, and how much of it can be left out without an error?",
        method="Scores q k^T of every layer and head are taken from the model in the package while it reads texts "
        "that it has written at temperature 1, and from normal random inputs; both are causal. NumPy walks through "
        "them in tiles of keys, from the first key on and, as the Hopper kernel does, from the last one back.\n\n"
        "*Exact*: the maximum of all tiles so far. *Lazy*: it moves only when a tile exceeds it by 2^8, as in "
        "FlashAttention-4; P and the sums stay below 2^8 times what they were, which no float type minds. "
        "*Speculative*: the first tile's maximum is kept, and a warp does a tile again when a sum of exponentials "
        "passes 2^60 (2^15 with P in float16). Any maximum gives the same quotient O / row_sum. The counts depend on "
        "the seed alone.",
        run=run,
        table=table,
        findings=findings,
        pictures={"": picture},
        framework="numpy",
        portable=lambda device: True,
    )
)
