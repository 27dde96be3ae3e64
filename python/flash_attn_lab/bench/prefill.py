"""The suite `prefill`: causal chunks of queries against long caches, and latent attention, whose values are columns of
its keys. The same keys are timed contiguous and in shuffled pages, and also without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_attn_minimal import flash_attn_func, flash_attn_with_kvcache, kvcache_query, query

from ..report import table as markdown_table
from .check import FACTOR, FLOOR, attend, largest
from .machine import DTYPES, SHORT, load_average, open_machine
from .rows import number, unit
from .suite import Outcome, Suite, measuring, register, rounded, speed_text
from .timing import Protocol, interleave

ROWS = 16  # rows of a head that are checked


@dataclass(frozen=True)
class Chunk:
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int

    @property
    def latent(self) -> bool:
        return self.headdim != self.headdim_v

    @property
    def flops(self) -> float:
        pairs = self.seqlen_q * self.seqlen_k - self.seqlen_q * (self.seqlen_q - 1) // 2
        return 2.0 * self.batch * self.nheads * pairs * (self.headdim + self.headdim_v)

    @property
    def kept(self) -> int:
        """Elements of the cache. Each is read at least once."""
        width = self.headdim if self.latent else self.headdim + self.headdim_v
        return self.batch * self.seqlen_k * self.nheads_k * width

    def __str__(self) -> str:
        dims = f"{self.headdim}/{self.headdim_v}" if self.latent else f"{self.headdim}"
        heads = f"heads {self.nheads}/{self.nheads_k}"
        return f"headdim {dims}, batch {self.batch}, {self.seqlen_q} queries, {self.seqlen_k} keys, {heads}"


CHUNKS = {
    "cuda": [
        *(Chunk(1, 512, n, 32, 8, 128, 128) for n in (8192, 65536)),
        *(Chunk(1, 2048, n, 32, 8, 128, 128) for n in (8192, 32768)),
        Chunk(8, 128, 16384, 32, 8, 128, 128),
        Chunk(1, 2048, 16384, 32, 8, 64, 64),
        Chunk(1, 2048, 16384, 16, 4, 256, 256),
        *(Chunk(b, 1, n, 16, 1, 576, 512) for b, n in ((32, 4096), (128, 4096), (128, 16384))),
        *(Chunk(b, 1, 4096, 128, 1, 576, 512) for b in (32, 64)),
    ],
    "cpu": [Chunk(1, 128, 2048, 8, 2, 64, 64), Chunk(1, 2, 1024, 16, 1, 576, 512)],
}
PAGES = {False: (1, 16, 64, 256), True: (16, 64)}  # latent or not -> page sizes


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine, seed = open_machine(options.device, options.framework), options.seed or 0
    dtype = options.dtype or ("bfloat16" if machine.device == "cuda" else "float32")
    chunks = CHUNKS[machine.device][:: 2 if options.quick else 1]
    outcome = Outcome(load=load_average())
    print(f"{machine.title}, {SHORT[dtype]}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, len(chunks), "prefill") as (meter, progress):
        for chunk in chunks:
            progress.step(f"{chunk}: {_one(machine, chunk, dtype, seed, protocol, meter, outcome)}")
    return machine, outcome


def _one(machine, chunk: Chunk, dtype: str, seed: int, protocol: Protocol, meter, outcome: Outcome) -> str:
    q = machine.random((chunk.batch, chunk.seqlen_q, chunk.nheads, chunk.headdim), dtype, seed)
    k = machine.random((chunk.batch, chunk.seqlen_k, chunk.nheads_k, chunk.headdim), dtype, seed + 1)
    v = k[..., : chunk.headdim_v] if chunk.latent else machine.random(k.shape, dtype, seed + 2)
    out = machine.nans((*q.shape[:3], chunk.headdim_v), dtype)
    lengths = machine.int32([chunk.seqlen_k] * chunk.batch)
    calls = []  # layout, the kernel, launch
    if not chunk.latent:
        plan = query(q, k, v, causal=True)
        calls.append(("no cache", plan.kernel, lambda i: flash_attn_func(q, k, v, causal=True, out=out)))
    layouts = [("contiguous", (k, v), {})]
    draw = np.random.default_rng(seed)
    for page in PAGES[chunk.latent]:
        order = draw.permutation(chunk.batch * chunk.seqlen_k // page)
        pages = [_paged(machine, x, page, order) for x in ((k,) if chunk.latent else (k, v))]
        pages = [pages[0], pages[0][..., : chunk.headdim_v]] if chunk.latent else pages
        layouts.append((f"page {page}", pages, {"block_table": machine.int32(order.reshape(chunk.batch, -1))}))
    for layout, (keys, values), table in layouts:
        given = {"cache_seqlens": lengths, "causal": True, **table}

        def launch(i, keys=keys, values=values, given=given):
            return flash_attn_with_kvcache(q, keys, values, out=out, **given)

        calls.append((layout, kvcache_query(q, keys, values, **given).kernel, launch))

    row: dict[str, Any] = {
        "suite": "prefill", "system": "ours", "pass": "fwd", "dtype": dtype, "headdim": chunk.headdim,
        "headdim_v": chunk.headdim_v, "causal": True, "seqlen_q": chunk.seqlen_q, "seqlen_k": chunk.seqlen_k,
        "batch": chunk.batch, "nheads": chunk.nheads, "nheads_k": chunk.nheads_k,
    }  # fmt: skip
    rows, launches, notes = [], [], []
    for layout, kernel, launch in calls:
        out[...] = float("nan")
        launch(0)
        machine.synchronize()
        err, budget = _judge(machine, chunk, dtype, q, k, v, out)
        found = row | {"layout": layout, "kernel": kernel, "max_err": err, "err_budget": budget}
        if err <= budget:
            rows.append(found)
            launches.append(launch)
        else:
            outcome.wrong += 1
            outcome.rows.append(rounded(found | {"wrong": True}))
            notes.append(f"{layout} is WRONG: error {err:.3g}, budget {budget:.3g}")
    for found, timing in zip(rows, interleave(machine, launches, protocol, meter, seed), strict=True):
        timed = timing.row(chunk.flops / 1e12)
        timed["tbps"] = chunk.kept * DTYPES[dtype] / timed["us"] * 1e-6
        outcome.rows.append(rounded(found | timed))
        notes.append(f"{found['layout']} {timed['us']:.1f} us, {speed_text(timed['tflops'])}")
    machine.release()
    return "; ".join(notes)


def _paged(machine, x, page: int, order: np.ndarray):
    """The rows of x as pages of a pool. Page i, counted over all sequences, is at index order[i] of the pool."""
    pages = x.reshape(-1, page, *x.shape[2:])
    return pages[machine.int32(np.argsort(order))]


def _judge(machine, chunk: Chunk, dtype: str, q, k, v, out) -> tuple[float, float]:
    """The largest error on rows of the first and the last head, and its budget."""
    if not machine.finite(out):
        return float("inf"), FLOOR[dtype]
    rows = np.unique(np.linspace(0, chunk.seqlen_q - 1, ROWS).astype(int))
    err = plain = 0.0
    for b, h in ((0, 0), (chunk.batch - 1, chunk.nheads - 1)):
        head = h // (chunk.nheads // chunk.nheads_k)
        qh, kh, vh = (machine.host(x) for x in (q[b, :, h], k[b, :, head], v[b, :, head]))
        at = rows + chunk.seqlen_k - chunk.seqlen_q
        exact = attend(qh[rows], kh, vh, at, True)
        plain = largest((plain, np.abs(attend(qh[rows], kh, vh, at, True, dtype) - exact).max()))
        err = largest((err, np.abs(machine.host(out[b, :, h])[rows] - exact).max()))
    return err, FACTOR * plain + FLOOR[dtype]


# ---- the table ----


def table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each shape, one column for each layout of the keys."""
    name, scale = unit(data)
    keys = ("headdim", "batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k")
    lines: list[str] = []
    for latent, title in (
        (False, f"Chunks of queries, {name}"),
        (True, f"Latent attention, TB/s of the cache and {name}"),
    ):
        shapes: dict[tuple, dict[str, str]] = {}
        chosen = [row for row in rows if (row["headdim"] != row["headdim_v"]) == latent]
        for row in chosen:
            speed = number(row["tflops"] * scale)
            found = shapes.setdefault(tuple(row[key] for key in keys), {})
            found[row["layout"]] = f"{row['tbps']:.2f}, {speed}" if latent else speed
        layouts = list(dict.fromkeys(row["layout"] for row in chosen))
        body = [
            [*map(str, shape[:4]), f"{shape[4]}/{shape[5]}", *(found.get(layout, "") for layout in layouts)]
            for shape, found in shapes.items()
        ]
        if body:
            lines += [
                f"## {title}",
                "",
                *markdown_table(["headdim", "batch", "queries", "keys", "heads", *layouts], body),
                "",
            ]
    return lines[:-1]


register(
    Suite(
        name="prefill",
        about="causal chunks against caches, contiguous and paged, beside the same without a cache; latent attention",
        options=frozenset({"device", "framework", "dtype", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
    )
)
