"""FlashAttention in Triton: the forward pass, and gradients in three kernels.

A program owns a tile of queries (forward, dq) or of keys (dk and dv), and walks over the tiles of the other kind.
Kernels see arrays as descriptors of shape (batch, seqlen, heads * headdim): loading a tile is one TMA copy, and rows
past the end of a sequence are read as zeros and never written. Triton chooses everything below a tile: which thread
holds what, the shared memory, the wgmma instructions, and how many copies are under way.
"""

from __future__ import annotations

import math
import time

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = math.log2(math.e)
SHORT = 512  # calls with at most this many keys are bound by their launch, and not tuned
SIZES = ["nheads", "nheads_k", "seqlen_q", "seqlen_k", "bucket"]


# ---- tuning ----


def _config(block_m: int, block_n: int, warps: int, stages: int) -> triton.Config:
    tiles = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    return triton.Config(tiles, num_warps=warps, num_stages=stages, pre_hook=_set_tiles)


def _set_tiles(arguments) -> None:
    """Sets the tile shape of the descriptors to that of the configuration that is launched next."""
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            rows = arguments["BLOCK_N" if name in ("k", "v", "dk", "dv") else "BLOCK_M"]
            value.block_shape = [1, rows, arguments["HEADDIM"]]


def _prune(configs, arguments, DTYPE, HEADDIM, **_):
    """The configurations to try. The first is for float32, which has no tensor cores here, the second for short calls.
    The largest tiles do not fit with a large headdim."""
    scalar, short, *rest = configs
    if DTYPE == tl.float32:
        return [scalar]
    if arguments["bucket"] <= SHORT:
        return [short]
    return [short, *(c for c in rest if max(c.kwargs.values()) * HEADDIM <= 128 * 128)]


spent: list[float] = []  # seconds to compile and time each configuration that was tried


def _measure(call, quantiles):
    began = time.perf_counter()
    try:
        return triton.testing.do_bench(call, warmup=10, rep=40, quantiles=quantiles)
    finally:
        spent.append(time.perf_counter() - began)


def _tuned(*configs):
    """Tunes a kernel: the fastest configuration for each headdim, dtype, mask and power of two of the keys.
    Configurations are (BLOCK_M, BLOCK_N, warps, stages)."""
    configs = [_config(*config) for config in configs]
    return triton.autotune(
        configs[1:2] if triton.knobs.runtime.interpret else configs,
        key=["bucket", "DTYPE", "HEADDIM", "CAUSAL"],
        prune_configs_by={"early_config_prune": _prune},
        do_bench=_measure,
    )


# ---- on the device ----


@triton.jit
def _load(array, batch, row, head, ROWS: tl.constexpr, HEADDIM: tl.constexpr):
    """A tile of one head, (ROWS, HEADDIM)."""
    return array.load([batch, row, head * HEADDIM]).reshape(ROWS, HEADDIM)


@triton.jit
def _store(array, batch, row, head, tile, ROWS: tl.constexpr, HEADDIM: tl.constexpr):
    array.store([batch, row, head * HEADDIM], tile.to(array.dtype).reshape(1, ROWS, HEADDIM))


@triton.jit
def _dot(a, b, c):
    """c + a b. A float32 product is not rounded to tf32."""
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _key_range(row, shift, seqlen_k, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Two numbers for a tile of rows: every row sees all keys before the first number, a multiple of BLOCK_N; no row
    sees a key from the second number on. With a causal mask row i sees the keys up to i + shift."""
    everybody, somebody = seqlen_k, seqlen_k
    if CAUSAL:
        everybody = tl.minimum(seqlen_k, tl.maximum(row + shift + 1, 0))
        somebody = tl.minimum(seqlen_k, tl.maximum(row + shift + BLOCK_M, 0))
    return everybody // BLOCK_N * BLOCK_N, somebody


@triton.jit
def _visible(rows, keys, shift, seqlen_k, CAUSAL: tl.constexpr):
    visible = keys < seqlen_k
    if CAUSAL:
        visible = visible & (keys <= rows + shift)
    return visible


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k, v, batch, head_k, rows, begin, end, shift, seqlen_k, scale_log2,
    HEADDIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from `begin` to `end`. Scores and row_max are in base 2; row_sum and acc are
    sums of exp2(score - row_max)."""
    for key in tl.range(begin, end, BLOCK_N):
        zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        score = _dot(q, _load(k, batch, key, head_k, BLOCK_N, HEADDIM).T, zero)
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            score = tl.where(_visible(rows[:, None], keys[None, :], shift, seqlen_k, CAUSAL), score, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)
        minuend = new_max
        if MASKED:  # a row may have seen no key yet
            minuend = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(score * scale_log2 - minuend[:, None])
        decay = tl.exp2(row_max - minuend)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = _dot(p.to(v.dtype), _load(v, batch, key, head_k, BLOCK_N, HEADDIM), acc * decay[:, None])
        row_max = new_max
    return acc, row_sum, row_max


@_tuned((16, 16, 8, 1), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2),
        (128, 128, 8, 3))  # fmt: skip
@triton.jit(do_not_specialize=SIZES)
def _forward(
    q, k, v, out, lse, nheads, nheads_k, seqlen_q, seqlen_k, scale_log2, bucket,
    DTYPE: tl.constexpr, HEADDIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the rows with most keys begin first
    row, head, batch = tile * BLOCK_M, tl.program_id(1), tl.program_id(2)
    head_k = head // (nheads // nheads_k)
    shift = seqlen_k - seqlen_q
    rows = row + tl.arange(0, BLOCK_M)
    everybody, somebody = _key_range(row, shift, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)

    q_tile = _load(q, batch, row, head, BLOCK_M, HEADDIM)
    acc = tl.zeros((BLOCK_M, HEADDIM), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, q_tile, k, v, batch, head_k, rows, 0, everybody, shift,
                                    seqlen_k, scale_log2, HEADDIM, CAUSAL, BLOCK_M, BLOCK_N, False)  # fmt: skip
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, q_tile, k, v, batch, head_k, rows, everybody, somebody,
                                    shift, seqlen_k, scale_log2, HEADDIM, CAUSAL, BLOCK_M, BLOCK_N, True)  # fmt: skip

    row_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a row that sees no key gives zeros, and -inf as its lse
    _store(out, batch, row, head, acc / row_sum[:, None], BLOCK_M, HEADDIM)
    lse += (batch.to(tl.int64) * nheads + head) * seqlen_q
    tl.store(lse + rows, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=rows < seqlen_q)


@triton.jit(do_not_specialize=SIZES)
def _delta(out, dout, delta, nheads, seqlen_q, HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta = sum over the columns of out * dout. It is subtracted from each row of dP, because P's rows sum to 1."""
    row, head, batch = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    rows = row + tl.arange(0, BLOCK_M)
    a = _load(out, batch, row, head, BLOCK_M, HEADDIM).to(tl.float32)
    b = _load(dout, batch, row, head, BLOCK_M, HEADDIM).to(tl.float32)
    delta += (batch.to(tl.int64) * nheads + head) * seqlen_q
    tl.store(delta + rows, tl.sum(a * b, 1), mask=rows < seqlen_q)


@triton.jit
def _load_rows(lse, delta, rows, seqlen_q):
    """lse in base 2, and delta. In rows past the last, lse is inf, so that P is 0 there."""
    there = rows < seqlen_q
    lse_tile = tl.load(lse + rows, mask=there, other=float("inf"))
    return lse_tile * 1.4426950408889634, tl.load(delta + rows, mask=there, other=0.0)


@_tuned((16, 16, 8, 1), (64, 64, 4, 1), (64, 64, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 3),
        (64, 128, 8, 1), (64, 128, 8, 2))  # fmt: skip
@triton.jit(do_not_specialize=SIZES)
def _backward_keys(
    dout, q, k, v, dk, dv, lse, delta, nheads, nheads_k, seqlen_q, seqlen_k, scale, scale_log2, bucket,
    DTYPE: tl.constexpr, HEADDIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys. The program sums over all query heads of its key head, so it needs no atomics.

    Scores are transposed, (keys, rows), so that P and dS are left operands of the products that sum over rows, and stay
    in registers. Every tile is masked: a second loop without the mask would cost more, in registers that spill. Keys
    past the last one need no mask, because their gradients are never written."""
    key, head_k, batch = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    shift = seqlen_k - seqlen_q
    keys = key + tl.arange(0, BLOCK_N)
    begin = 0
    if CAUSAL:  # the first tile in which a row sees one of the keys
        begin = tl.maximum(key - shift, 0) // BLOCK_M * BLOCK_M

    k_tile = _load(k, batch, key, head_k, BLOCK_N, HEADDIM)
    v_tile = _load(v, batch, key, head_k, BLOCK_N, HEADDIM)
    dk_acc = tl.zeros((BLOCK_N, HEADDIM), tl.float32)
    dv_acc = tl.zeros((BLOCK_N, HEADDIM), tl.float32)
    zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    group = nheads // nheads_k
    for head in range(head_k * group, (head_k + 1) * group):
        start = (batch.to(tl.int64) * nheads + head) * seqlen_q
        for row in tl.range(begin, seqlen_q, BLOCK_M):
            rows = row + tl.arange(0, BLOCK_M)
            q_tile = _load(q, batch, row, head, BLOCK_M, HEADDIM)
            lse_row, delta_row = _load_rows(lse + start, delta + start, rows, seqlen_q)
            p = tl.exp2(_dot(k_tile, q_tile.T, zero) * scale_log2 - lse_row[None, :])
            if CAUSAL:
                p = tl.where(keys[:, None] <= rows[None, :] + shift, p, 0.0)
            dout_tile = _load(dout, batch, row, head, BLOCK_M, HEADDIM)
            dv_acc = _dot(p.to(dout.dtype), dout_tile, dv_acc)
            ds = p * (_dot(v_tile, dout_tile.T, zero) - delta_row[None, :])
            dk_acc = _dot(ds.to(q.dtype), q_tile, dk_acc)
    _store(dk, batch, key, head_k, dk_acc * scale, BLOCK_N, HEADDIM)
    _store(dv, batch, key, head_k, dv_acc, BLOCK_N, HEADDIM)


@triton.jit
def _walk_keys(
    acc, q_tile, dout_tile, lse_row, delta_row, k, v, batch, head_k, rows, begin, end, shift, seqlen_k, scale_log2,
    HEADDIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the keys from `begin` to `end` to dq of a tile of rows."""
    for key in tl.range(begin, end, BLOCK_N):
        zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        k_tile = _load(k, batch, key, head_k, BLOCK_N, HEADDIM)
        p = tl.exp2(_dot(q_tile, k_tile.T, zero) * scale_log2 - lse_row[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            p = tl.where(_visible(rows[:, None], keys[None, :], shift, seqlen_k, CAUSAL), p, 0.0)
        v_tile = _load(v, batch, key, head_k, BLOCK_N, HEADDIM)
        ds = p * (_dot(dout_tile, v_tile.T, zero) - delta_row[:, None])
        acc = _dot(ds.to(k.dtype), k_tile, acc)
    return acc


@_tuned((16, 16, 8, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))
@triton.jit(do_not_specialize=SIZES)
def _backward_queries(
    dout, q, k, v, dq, lse, delta, nheads, nheads_k, seqlen_q, seqlen_k, scale, scale_log2, bucket,
    DTYPE: tl.constexpr, HEADDIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows, with the same walk over keys as the forward pass."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    row, head, batch = tile * BLOCK_M, tl.program_id(1), tl.program_id(2)
    head_k = head // (nheads // nheads_k)
    shift = seqlen_k - seqlen_q
    rows = row + tl.arange(0, BLOCK_M)
    everybody, somebody = _key_range(row, shift, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)

    q_tile = _load(q, batch, row, head, BLOCK_M, HEADDIM)
    dout_tile = _load(dout, batch, row, head, BLOCK_M, HEADDIM)
    start = (batch.to(tl.int64) * nheads + head) * seqlen_q
    lse_row, delta_row = _load_rows(lse + start, delta + start, rows, seqlen_q)
    acc = tl.zeros((BLOCK_M, HEADDIM), tl.float32)
    acc = _walk_keys(acc, q_tile, dout_tile, lse_row, delta_row, k, v, batch, head_k, rows, 0, everybody, shift,
                     seqlen_k, scale_log2, HEADDIM, CAUSAL, BLOCK_M, BLOCK_N, False)  # fmt: skip
    acc = _walk_keys(acc, q_tile, dout_tile, lse_row, delta_row, k, v, batch, head_k, rows, everybody, somebody, shift,
                     seqlen_k, scale_log2, HEADDIM, CAUSAL, BLOCK_M, BLOCK_N, True)  # fmt: skip
    _store(dq, batch, row, head, acc * scale, BLOCK_M, HEADDIM)


# ---- on the host ----


class _Call:
    """The sizes of a call as the kernels take them."""

    def __init__(self, q, k, causal: bool):
        self.batch, self.seqlen_q, self.nheads, self.headdim = q.shape
        _, self.seqlen_k, self.nheads_k, _ = k.shape
        self.scale = self.headdim**-0.5
        bucket = triton.next_power_of_2(max(self.seqlen_k, SHORT))
        self.sizes = (self.nheads, self.nheads_k, self.seqlen_q, self.seqlen_k)
        self.scales = (self.scale * LOG2_E, bucket)
        self.options = {
            "DTYPE": getattr(tl, str(q.dtype).removeprefix("torch.")),
            "HEADDIM": self.headdim,
            "CAUSAL": causal,
        }

    def rows(self, option):
        return triton.cdiv(self.seqlen_q, option["BLOCK_M"]), self.nheads, self.batch

    def keys(self, option):
        return triton.cdiv(self.seqlen_k, option["BLOCK_N"]), self.nheads_k, self.batch


def _describe(array) -> TensorDescriptor:
    """A descriptor of shape (batch, seqlen, heads * headdim). Its tile is set when the configuration is known."""
    batch, seqlen, heads, headdim = array.shape
    width = heads * headdim
    return TensorDescriptor(array, [batch, seqlen, width], [seqlen * width, width, 1], [1, 128, headdim])


def forward(q, k, v, causal: bool):
    """out like q, and lse (batch, nheads, seqlen_q) in float32."""
    call = _Call(q, k, causal)
    lse = torch.empty((call.batch, call.nheads, call.seqlen_q), dtype=torch.float32, device=q.device)
    if not k.numel():
        return torch.zeros_like(q), lse.fill_(-math.inf)
    out = torch.empty_like(q)
    if q.numel():
        _forward[call.rows](*map(_describe, (q, k, v, out)), lse, *call.sizes, *call.scales, **call.options)
    return out, lse


def backward(dout, q, k, v, out, lse, causal: bool):
    """dq, dk and dv."""
    call = _Call(q, k, causal)
    if not (q.numel() and k.numel()):
        return tuple(map(torch.zeros_like, (q, k, v)))
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    delta = torch.empty_like(lse)
    given = [_describe(x) for x in (dout, q, k, v)]
    rows = 128
    grid = call.rows({"BLOCK_M": rows})
    _delta[grid](_describe(out), given[0], delta, call.nheads, call.seqlen_q, HEADDIM=call.headdim, BLOCK_M=rows)
    rest = (lse, delta, *call.sizes, call.scale, *call.scales)
    _backward_keys[call.keys](*given, _describe(dk), _describe(dv), *rest, **call.options)
    _backward_queries[call.rows](*given, _describe(dq), *rest, **call.options)
    return dq, dk, dv


def tuned() -> list[tuple[str, tuple, str]]:
    """The results of tuning in this process: kernel, (bucket, dtype, headdim, causal), and the fastest
    configuration."""
    kernels = (_forward, _backward_keys, _backward_queries)
    return [(fn.base_fn.__name__, key[:4], str(config)) for fn in kernels for key, config in fn.cache.items()]
