"""The suite `decode`: one query token of every sequence against its cache, bound by the speed of the memory.

Calls rotate through several KV caches, so that the level-2 cache of the GPU holds nothing of the next one. Calls run in
CUDA graphs. Peers are PyTorch's backends on the same contiguous cache, and a kernel that only reads the cache.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flash_attn_minimal import flash_attn_with_kvcache, kvcache_query

from ..report import table as markdown_table
from .check import largest
from .figure import figure_of, set_title
from .machine import DTYPES, SHORT, BenchError, load_average, open_machine
from .rows import label
from .suite import Outcome, Suite, measuring, register, rounded
from .systems import LABELS, Refused, only
from .timing import Protocol, interleave


@dataclass(frozen=True)
class Point:
    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    headdim: int
    queries: int = 1  # query tokens of every sequence
    shared: int | None = None  # with shared_prefix: the keys that all sequences have in the same pages
    cache: str | None = None  # with shared_prefix: the dtype of the cache, where it is not that of q

    def __str__(self) -> str:
        queries = "" if self.queries == 1 else f"{self.queries} queries, "
        heads = f"heads {self.nheads}/{self.nheads_k}, headdim {self.headdim}"
        shared = "" if self.shared is None else f", {self.shared} of them shared"
        return f"batch {self.batch}, {queries}{self.seqlen} keys{shared}, {heads}"

    def bytes(self, dtype: str) -> int:
        return 2 * self.batch * self.seqlen * self.nheads_k * self.headdim * DTYPES.get(dtype, 1)


LARGE = [
    Point(batch, seqlen, nheads, nheads_k, 128)
    for batch, seqlen, nheads, nheads_k in (
        (1, 1024, 32, 8), (1, 8192, 32, 8), (1, 32768, 32, 8), (1, 131072, 32, 8), (4, 4096, 32, 8), (16, 2048, 32, 8),
        (16, 8192, 32, 8), (64, 1024, 32, 8), (64, 8192, 32, 8), (8, 4096, 32, 32), (32, 8192, 64, 8),
        (128, 2048, 32, 8),
    )
]  # fmt: skip
FEW_KEYS = [Point(1, seqlen, 12, 12, 64) for seqlen in (128, 512, 1024)] + [Point(1, 256, 32, 8, 128)]
WIDE = [Point(1, 32768, 16, 2, 512), Point(16, 4096, 8, 1, 512), Point(8, 4096, 16, 16, 320)]
SHARED = [
    Point(batch, shared + 512, nheads, 8, 128, shared=shared)
    for batch, shared, nheads in ((64, 8192, 32), (64, 8192, 64), (16, 4096, 32), (4, 32768, 32), (64, 1024, 32))
] + [Point(64, 8704, 32, 8, 128, shared=0), Point(64, 8704, 32, 8, 128, shared=8192, cache="float8_e4m3fn")]
CPU = [Point(1, 1024, 8, 8, 64), Point(4, 1024, 16, 4, 64), Point(4, 1024, 16, 4, 64, shared=768)]
QUICK = {"cuda": [LARGE[0], LARGE[6]], "cpu": CPU[:1]}
PAGES = (16, 64)
EIGHT_BIT = ("float8_e4m3fn", "int8")
FACTOR, FLOOR = 2.0, 2e-5
L2_FACTOR, MAX_SETS = 5, 64

READ = r"""
extern "C" __global__ void __launch_bounds__(512) read(const uint4* x, long long count, unsigned* out) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    unsigned bits = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 8 * stride) {
        uint4 piece[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) piece[j] = i + j * stride < count ? __ldcs(x + i + j * stride) : uint4{};
#pragma unroll
        for (int j = 0; j < 8; ++j) bits ^= piece[j].x ^ piece[j].y ^ piece[j].z ^ piece[j].w;
    }
    if (bits == 0x9E3779B9u) *out = bits;
}"""


class Caches:
    """Sets of K and V of one point, with q, out and the other arguments of calls."""

    def __init__(self, machine, point: Point, dtype: str, seed: int):
        torch = self.torch = machine.torch
        wanted = math.ceil(L2_FACTOR * machine.l2_bytes / point.bytes(dtype)) if machine.l2_bytes else 1
        self.machine, self.dtype, self.sets = machine, dtype, max(1, min(MAX_SETS, wanted))
        self.ask(point, seed)
        heads = point.batch, point.seqlen, point.nheads_k, point.headdim
        self.kv = [machine.random((self.sets, *heads), dtype, seed + 1 + i) for i in range(2)]
        self.lengths = machine.int32([point.seqlen] * point.batch)
        self.order = {}
        generator = torch.Generator().manual_seed(seed)
        for page in PAGES:
            pages = torch.randperm(point.batch * point.seqlen // page, generator=generator).to(self.q.device)
            self.order[page] = table = pages.to(torch.int32).view(point.batch, -1)
            if point.shared:
                table[:, : point.shared // page] = table[:1, : point.shared // page].clone()

    def ask(self, point: Point, seed: int) -> None:
        """Makes q and out for a point."""
        size = point.batch, point.queries, point.nheads, point.headdim
        self.point = point
        self.q, self.out = self.machine.random(size, self.dtype, seed), self.machine.nans(size, self.dtype)

    def asked(self, point: Point, seed: int) -> Caches:
        """The same K and V with the queries of another point, which must have the same keys and key heads."""
        other = copy.copy(self)
        other.ask(point, seed)
        return other

    def paged(self, x, page: int):
        return x.reshape(-1, page, *x.shape[-2:])

    def eight_bit(self, name: str):
        """([K, V] rounded to 8 bits with one scale factor, that factor for every key head)."""
        torch, most = self.torch, 448.0 if name == "float8_e4m3fn" else 127.0
        factor = torch.full((self.point.nheads_k,), 5 / most, device=self.q.device)
        made = []
        for whole in self.kv:
            made.append(torch.empty(whole.shape, dtype=getattr(torch, name), device=whole.device))
            for i in range(self.sets):
                x = (whole[i].float() / factor[0]).clamp(-most, most)
                made[-1][i].copy_(x.round() if name == "int8" else x)
        return made, factor


def ours(
    caches: Caches, kernel: str | None, page: int, cache_dtype: str, **more: Any
) -> tuple[str, Callable[[int], Any], list]:
    """(name of the kernel, launch, [K, V, factor] for `judge`). K and V are those of set 0, (batch, seqlen, nheads_k,
    headdim), and factor is the scale of both. more: options of the call."""
    (k, v), scales = caches.kv, {}
    if cache_dtype != caches.dtype:
        (k, v), factor = caches.eight_bit(cache_dtype)
        scales = {"k_scale": factor, "v_scale": factor}
    options = {"cache_seqlens": caches.lengths, "out": caches.out, "kernel": kernel, **scales, **more}
    seen = [x[0] for x in (k, v)]
    pairs = [tuple(caches.paged(y, page) if page else y for y in x) for x in zip(k, v, strict=True)]
    if page:
        options["block_table"] = table = caches.order[page]
        seen = [caches.paged(x, page)[table.long()].reshape(x.shape) for x in seen]
    plan = kvcache_query(caches.q, *pairs[0], **options)
    if plan.status != "FA_OK":
        raise Refused(plan.error)
    factor = scales["k_scale"][0].item() if scales else 1.0

    def launch(i):
        return flash_attn_with_kvcache(caches.q, *pairs[i % caches.sets], **options)

    return plan.kernel, launch, [*seen, factor]


def peer(caches: Caches, name: str) -> Callable[[int], Any]:
    gqa = {"enable_gqa": True} if caches.point.nheads != caches.point.nheads_k else {}
    attention = caches.torch.nn.functional.scaled_dot_product_attention
    q, (k, v) = caches.q.transpose(1, 2), caches.kv

    def launch(i):
        with only(name):
            return attention(
                q, k[i % caches.sets].transpose(1, 2), v[i % caches.sets].transpose(1, 2), **gqa
            ).transpose(1, 2)

    return launch


def reader(caches: Caches) -> Callable[[int], Any]:
    """A launch that reads K and V of a set, with one launch each of a kernel that only reads."""
    try:
        import cupy
    except ImportError:
        raise Refused("the read-only kernel needs CuPy") from None
    kernel, blocks = cupy.RawKernel(READ, "read"), 4 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    result = caches.machine.int32([0])

    def launch(i):
        for x in caches.kv:
            x, stream = x[i % caches.sets], caches.torch.cuda.current_stream()
            with cupy.cuda.ExternalStream(stream.cuda_stream):
                count = x.numel() * x.element_size() // 16
                kernel((blocks,), (512,), (x.data_ptr(), cupy.int64(count), result.data_ptr()))

    return launch


def judge(caches: Caches, answer, k, v, factor: float) -> tuple[float, float]:
    """(max_err, err_budget) over the first and last head of the first and last sequence. The budget comes from the
    largest error of plain arithmetic in any of these heads. The last query sees all keys, the one before it all but
    one, and so on."""
    point, torch, error, allowed = caches.point, caches.torch, 0.0, 0.0
    dtype = getattr(torch, caches.dtype)
    group = point.nheads // point.nheads_k
    if not caches.machine.finite(answer):
        return math.inf, FLOOR
    for b in {0, point.batch - 1}:
        for h in {0, point.nheads - 1}:
            keys, values = (x[b, :, h // group].double() * factor for x in (k, v))
            s = caches.q[b, :, h].double() @ keys.T * point.headdim**-0.5
            hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + point.seqlen - point.queries)
            p = torch.softmax(s.masked_fill_(hidden, -math.inf), 1)
            exact = p @ values
            plain = (p.to(dtype).double() @ values).to(dtype).double()
            error = largest((error, (answer[b, :, h].double() - exact).abs().max().item()))
            allowed = largest((allowed, (plain - exact).abs().max().item()))
    return error, FACTOR * allowed + FLOOR


def one_kernel(options) -> str | None:
    """The kernel that --kernel names, or None to let the library choose."""
    named = options.kernel or ["best"]
    if len(named) > 1:
        raise BenchError(f"--kernel {','.join(named)}: suite {options.suite} takes one kernel")
    return None if named[0] == "best" else named[0]


def base_row(suite: str, caches: Caches) -> dict[str, Any]:
    """The fields that all rows of a point share."""
    point = caches.point
    row = {"suite": suite, "pass": "decode", "dtype": caches.dtype, "headdim": point.headdim}
    row |= {"headdim_v": point.headdim, "batch": point.batch, "nheads": point.nheads, "nheads_k": point.nheads_k}
    row |= {} if point.shared is None else {"shared": point.shared}
    return row | {"input_sets": caches.sets, "seqlen_q": point.queries, "seqlen_k": point.seqlen}


def leave_out(outcome: Outcome, system: str, point: Point, reason: str) -> None:
    outcome.left_out.append({"system": system, "shape": str(point), "reason": reason})


def check(
    caches: Caches, launch: Callable[[int], Any], seen: list, row: dict[str, Any], outcome: Outcome
) -> str | None:
    """Fills out with NaN, launches, and adds error and budget to the row. Returns None if the answer is right.
    Otherwise adds the row to the outcome as wrong, and returns a text about the error."""
    caches.out.fill_(float("nan"))
    err, budget = judge(caches, launch(0), *seen)
    row |= {"max_err": err, "err_budget": budget}
    if err <= budget:
        return None
    outcome.wrong += 1
    outcome.rows.append(rounded(row | {"wrong": True}))
    return f"error {err:.3g}, budget {budget:.3g}"


def peers_on(machine, headdim: int) -> tuple[str, ...]:
    if machine.device != "cuda":
        return ("torch",)
    return ("cudnn", "fa2") if headdim <= 256 else ("efficient",)  # the only backend above 256


def readers_on(machine) -> tuple[str, ...]:
    """The reader is a CUDA kernel: beside CuPy it would start on a machine's GPU with addresses of the CPU."""
    return ("read",) if machine.device == "cuda" else ()


def others(caches: Caches, names: Iterable[str], outcome: Outcome) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Yields (name, launch) of peers and of the reader ("read"). Those that refuse are left out."""
    for name in names:
        try:
            launch = reader(caches) if name == "read" else peer(caches, name)
            launch(0)
            caches.machine.synchronize()
        except (Refused, RuntimeError) as reason:
            leave_out(outcome, name, caches.point, str(reason).partition("\n")[0])
            continue
        yield name, launch


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, "torch", "decode")
    gpu = machine.device == "cuda"
    dtype = options.dtype or ("bfloat16" if gpu else "float32")
    points = QUICK[machine.device] if options.quick else LARGE + FEW_KEYS + WIDE + SHARED if gpu else CPU
    outcome = Outcome(load=load_average())
    print(f"{machine.title}, {dtype}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, len(points), "decode") as (meter, progress):
        for point in points:
            progress.step(f"{point}: {_one(machine, point, dtype, options, protocol, meter, outcome)}")
    return machine, outcome


def _one(machine, point: Point, dtype: str, options, protocol, meter, outcome: Outcome) -> str:
    """Checks and times everything at one point; returns the line to print."""
    seed = options.seed or 0
    caches = Caches(machine, point, dtype, seed)
    base = base_row("decode", caches)
    timed, notes = [], []
    kernel = one_kernel(options)
    eight_bit = EIGHT_BIT if point.headdim <= 256 else ()  # no fast kernel
    variants = [(0, dtype), *((page, dtype) for page in PAGES), *((0, name) for name in eight_bit)]
    asks = point.shared is not None
    if asks:
        variants = [(page, point.cache or dtype) for page in PAGES]
    asked = [(*variant, more) for variant in variants for more in ((False, True) if asks else (False,))]
    for page, cache_dtype, shared in asked:
        name = "ours" + (f" paged {page}" if page else "") + ("" if cache_dtype == dtype else f" {cache_dtype}")
        name += " shared" * shared
        try:
            found, launch, seen = ours(caches, kernel, page, cache_dtype, **{"shared_prefix": True} if shared else {})
        except Refused as refusal:
            leave_out(outcome, name, point, str(refusal))
            continue
        row = base | {"system": "ours", "kernel": found, "cache_dtype": cache_dtype, "page_size": page}
        row |= {"shared_prefix": shared} if asks else {}
        note = check(caches, launch, seen, row, outcome)
        del seen
        if note:
            notes.append(f"{name} is WRONG: {note}")
        else:
            timed.append((name, launch, row, point.bytes(cache_dtype)))
    names = () if asks else (*peers_on(machine, point.headdim), *readers_on(machine))
    for name, launch in others(caches, names, outcome):
        timed.append((name, launch, base | {"system": name}, point.bytes(dtype)))
    timings = interleave(machine, [launch for _, launch, *_ in timed], protocol, meter, seed=seed)
    parts = []
    for (name, _, row, read), timing in zip(timed, timings, strict=True):
        measured = timing.row(0.0)
        del measured["tflops"]
        speed = ""
        if not asks:  # else nobody needs to read every key of every sequence
            measured["tbps"] = read / measured["us"] * 1e-6
            speed = f" ({measured['tbps']:.2f} TB/s)"
        outcome.rows.append(rounded(row | measured))
        parts.append(f"{name} {measured['us']:.1f} us{speed}")
    machine.release()
    return "; ".join(parts + notes)


# ---- the table and the picture ----


def table(data: dict, rows: list[dict]) -> list[str]:
    """One line for each point: microseconds and TB/s of every system, then this library's speed relative to the fastest
    peer and to the read."""

    def name(row):
        if row["system"] != "ours":
            return row["system"]
        page = f"paged {row['page_size']}" * bool(row["page_size"])
        return " ".join(filter(None, ["ours", page, SHORT.get(row["cache_dtype"], row["cache_dtype"])]))

    shared = [row for row in rows if "shared" in row]
    rows = [row for row in rows if "shared" not in row]
    names = list(dict.fromkeys(map(name, rows)))
    points: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = tuple(row[x] for x in ("batch", "seqlen_k", "nheads", "nheads_k", "headdim"))
        points.setdefault(key, {})[name(row)] = row
    body = []
    for (batch, keys, nheads, nheads_k, headdim), found in points.items():
        cells = [f"{found[n]['us']:.1f} ({found[n]['tbps']:.2f})" if n in found else "" for n in names]
        mine = found.get(names[0], {}).get("us")
        peers = [row["us"] for row in found.values() if row["system"] not in ("ours", "read")]
        over = f"{min(peers) / mine:.2f}" if mine and peers else ""
        share = f"{found['read']['us'] / mine:.2f}" if mine and "read" in found else ""
        body.append([str(batch), str(keys), f"{nheads}/{nheads_k}", str(headdim), *cells, over, share])
    labels = [LABELS.get(n, n) for n in names]
    head = ["batch", "keys", "heads", "headdim", *labels, "**speed over the best peer**", "**share of the read**"]
    lines = ["## Microseconds of a call (TB/s of keys and values)", "", *markdown_table(head, body)]
    return lines + (shared_table(shared) if shared else [])


def shared_table(rows: list[dict]) -> list[str]:
    """Calls over sequences that begin with the same pages, without and with shared_prefix."""
    points: dict[tuple, dict[bool, dict]] = {}
    for row in rows:
        names = ("batch", "seqlen_k", "shared", "nheads", "nheads_k", "headdim", "page_size", "cache_dtype")
        points.setdefault(tuple(row[x] for x in names), {})[row["shared_prefix"]] = row
    body = []
    for (batch, keys, shared, nheads, nheads_k, headdim, page, cache), found in points.items():
        us = [found[x]["us"] if x in found else None for x in (False, True)]
        cells = ["" if x is None else f"{x:.1f}" for x in us]
        ratio = f"{us[0] / us[1]:.2f}" if us[0] and us[1] else ""
        body.append(
            [
                *(
                    str(x)
                    for x in (batch, keys, shared, f"{nheads}/{nheads_k}", headdim, page, SHORT.get(cache, cache))
                ),
                *cells,
                ratio,
            ]
        )
    head = ["batch", "keys", "of them shared", "heads", "headdim", "page", "cache", "plain, us", "shared_prefix, us"]
    return ["", "## Sequences that begin with the same pages", "", *markdown_table([*head, "**speed**"], body)]


def picture(data: dict, rows: list[dict]):
    """TB/s of keys and values at every point, a bar for each system, on the contiguous cache in the inputs' dtype."""
    rows = [row for row in rows if "shared" not in row]
    rows = [
        row for row in rows if row["system"] != "ours" or (row["cache_dtype"] == row["dtype"] and not row["page_size"])
    ]
    points = list(
        dict.fromkeys(tuple(row[x] for x in ("batch", "seqlen_k", "nheads", "nheads_k", "headdim")) for row in rows)
    )
    systems = list(dict.fromkeys(row["system"] for row in rows))
    figure, [[axis]] = figure_of(1, 1, max(6, 0.9 * len(points)), 4.2)
    for i, system in enumerate(systems):
        mine = {
            tuple(r[x] for x in ("batch", "seqlen_k", "nheads", "nheads_k", "headdim")): r["tbps"]
            for r in rows
            if r["system"] == system
        }
        x = [j + (i - (len(systems) - 1) / 2) * 0.8 / len(systems) for j in range(len(points))]
        axis.bar(x, [mine.get(point, 0) for point in points], 0.8 / len(systems), label=label(system))
    names = [f"{batch} x {keys}\n{nheads}/{nheads_k} x {headdim}" for batch, keys, nheads, nheads_k, headdim in points]
    axis.set_xticks(range(len(points)), names, fontsize=7)
    axis.set_ylabel("TB/s")
    set_title(figure, data, "One query token against a cache: keys and values read (more is better)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(systems))
    return figure


register(
    Suite(
        name="decode",
        about="one query token against caches of 128 to 131072 keys: contiguous, paged, 8-bit; beside cuDNN,\n"
        "FlashAttention-2 and a kernel that only reads the cache",
        options=frozenset({"device", "dtype", "kernel", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
    )
)
