"""The forward pass on Hopper in Gluon: Triton's compiler, but the program states what a CUDA kernel would decide.

A block owns 128 rows of queries. Three roles run at once, as in wgmma_sm90: one warp copies tiles of K and V into rings
of shared memory with TMA, and two consumer warpgroups, of 64 rows each, multiply with wgmma. A consumer starts the
scores of the next tile before the product with V of this one, so that the tensor cores work during the softmax.

The tiles of keys are walked from the last to the first. The tiles at the diagonal or at the end of the sequence need a
mask and come first; the loop after them has no mask.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

LOG2_E = math.log2(math.e)
SIZES = ["nheads", "nheads_k", "seqlen_q", "seqlen_k"]
ROWS = gl.constexpr(64)  # of each consumer
CONSUMERS = gl.constexpr(2)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
MAX_REGISTERS = 168  # of a thread at launch, when all three warpgroups have equally many


@aggregate
class Call:
    """The state that all roles share. A `ready` barrier counts the bytes that have arrived in a tile, an `empty`
    barrier the consumers that have read the tile."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    lse: gl.tensor
    nheads: gl.tensor
    nheads_k: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    scale_log2: gl.tensor
    CAUSAL: gl.constexpr
    STAGES: gl.constexpr
    BLOCK_N: gl.constexpr
    HEADDIM: gl.constexpr
    q_tiles: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, out, lse, nheads, nheads_k, seqlen_q, seqlen_k, scale_log2, CAUSAL, STAGES,
        q_tiles, k_tiles, v_tiles, q_ready, k_ready, v_ready, k_empty, v_empty,
    ):  # fmt: skip
        self.q, self.k, self.v, self.out, self.lse = q, k, v, out, lse
        self.nheads, self.nheads_k, self.seqlen_q, self.seqlen_k = nheads, nheads_k, seqlen_q, seqlen_k
        self.scale_log2, self.CAUSAL, self.STAGES = scale_log2, gl.constexpr(CAUSAL), gl.constexpr(STAGES)
        _, block_n, headdim = k.block_type.shape
        self.BLOCK_N, self.HEADDIM = gl.constexpr(block_n), gl.constexpr(headdim)
        self.q_tiles, self.k_tiles, self.v_tiles = q_tiles, k_tiles, v_tiles
        self.q_ready, self.k_ready, self.v_ready = q_ready, k_ready, v_ready
        self.k_empty, self.v_empty = k_empty, v_empty

    @gluon.jit
    def first_row(self):
        """The first query row of this block."""
        tile = gl.program_id(0)
        if self.CAUSAL:
            tile = gl.num_programs(0) - 1 - tile  # the rows with most keys begin first
        return tile * (CONSUMERS * ROWS)

    @gluon.jit
    def tiles(self):
        """The number of key tiles that the block walks over, at least one, and the number of those that need no mask.
        With a causal mask row i sees the keys up to i + seqlen_k - seqlen_q."""
        everybody, somebody = self.seqlen_k, self.seqlen_k
        if self.CAUSAL:
            last_key = self.first_row() + self.seqlen_k - self.seqlen_q
            everybody = gl.minimum(self.seqlen_k, gl.maximum(last_key + 1, 0))
            somebody = gl.minimum(self.seqlen_k, gl.maximum(last_key + CONSUMERS * ROWS, 1))
        return (somebody + self.BLOCK_N - 1) // self.BLOCK_N, everybody // self.BLOCK_N


@gluon.jit
def _produce(call):
    """Keeps the rings full. The first wait for each empty stage is for the phase before the first, which counts as
    complete from the start."""
    head, batch = gl.program_id(1), gl.program_id(2)
    column = head // (call.nheads // call.nheads_k) * call.HEADDIM
    tiles, _ = call.tiles()
    for i in gl.static_range(CONSUMERS):
        ready = call.q_ready.index(i)
        mbarrier.expect(ready, call.q.block_type.nbytes)
        place = [batch, call.first_row() + i * ROWS, head * call.HEADDIM]
        tma.async_copy_global_to_shared(call.q, place, ready, call.q_tiles.index(i))
    for i in range(tiles):
        stage, phase = i % call.STAGES, i // call.STAGES & 1
        place = [batch, (tiles - 1 - i) * call.BLOCK_N, column]
        mbarrier.wait(call.k_empty.index(stage), phase ^ 1)
        mbarrier.expect(call.k_ready.index(stage), call.k.block_type.nbytes)
        tma.async_copy_global_to_shared(call.k, place, call.k_ready.index(stage), call.k_tiles.index(stage))
        mbarrier.wait(call.v_empty.index(stage), phase ^ 1)
        mbarrier.expect(call.v_ready.index(stage), call.v.block_type.nbytes)
        tma.async_copy_global_to_shared(call.v, place, call.v_ready.index(stage), call.v_tiles.index(stage))


@gluon.jit
def _matrix(tile):
    """(1, rows, headdim) in shared memory as (rows, headdim)."""
    return tile.reshape([tile.type.shape[1], tile.type.shape[2]])


@gluon.jit
def _start_scores(call, q_tile, i):
    """Waits for tile i of K and starts q K^T."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK_N, 16])
    stage = i % call.STAGES
    mbarrier.wait(call.k_ready.index(stage), i // call.STAGES & 1)
    zero = gl.zeros([ROWS, call.BLOCK_N], gl.float32, layout)
    k_tile = _matrix(call.k_tiles.index(stage)).permute((1, 0))
    return warpgroup_mma(_matrix(q_tile), k_tile, zero, use_acc=False, is_async=True)


@gluon.jit
def _wait_for_values(call, i):
    mbarrier.wait(call.v_ready.index(i % call.STAGES), i // call.STAGES & 1)


@gluon.jit
def _start_output(call, acc, p, i):
    """Starts acc + P V with tile i of V, which has already arrived."""
    return warpgroup_mma(p, _matrix(call.v_tiles.index(i % call.STAGES)), acc, is_async=True)


@gluon.jit
def _softmax(call, score, row_max, row_sum, row, key, MASKED: gl.constexpr):
    """One tile of the online softmax in base 2. Returns P as the left operand of a wgmma, the factor for the output
    accumulated so far, and the new maximum and sum."""
    layout: gl.constexpr = score.type.layout
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.HEADDIM, 16])
    if MASKED:
        rows = gl.expand_dims(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
        keys = gl.expand_dims(key + gl.arange(0, call.BLOCK_N, gl.SliceLayout(0, layout)), 0)
        shift = call.seqlen_k
        if call.CAUSAL:
            shift -= call.seqlen_q
        score = gl.where(keys <= gl.minimum(rows + shift, call.seqlen_k - 1), score, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(score, 1) * call.scale_log2)
    minuend = new_max
    if MASKED:  # a row may have seen no key yet
        minuend = gl.where(new_max == -float("inf"), 0.0, new_max)
    p = gl.exp2(score * call.scale_log2 - gl.expand_dims(minuend, 1))
    decay = gl.exp2(row_max - minuend)
    row_sum = row_sum * decay + gl.sum(p, 1)
    p = gl.convert_layout(p.to(call.q.dtype), gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2))
    return p, gl.convert_layout(decay, gl.SliceLayout(1, out_layout)), new_max, row_sum


@gluon.jit
def _walk(call, q_tile, acc, p, row_max, row_sum, row, begin, end, tiles, MASKED: gl.constexpr):
    """Steps `begin` to `end` of the walk. The scores of a tile are computed while `p`, P of the previous tile, is
    multiplied with V."""
    for i in range(begin, end):
        score = _start_scores(call, q_tile, i)
        running = _start_output(call, acc, p, i - 1)
        score = warpgroup_mma_wait(1, deps=(score,))  # for all products except the last one started
        mbarrier.arrive(call.k_empty.index(i % call.STAGES), count=1)
        key = (tiles - 1 - i) * call.BLOCK_N
        next_p, decay, row_max, row_sum = _softmax(call, score, row_max, row_sum, row, key, MASKED)
        # This wait stands between the softmax and the wait for the product. The assembler moves the latter up where it
        # can, which would end the overlap, but not across the branch of this wait.
        _wait_for_values(call, i)
        acc, p = warpgroup_mma_wait(0, deps=(running, p))  # the product reads the registers of p until here
        mbarrier.arrive(call.v_empty.index((i - 1) % call.STAGES), count=1)
        acc = acc * gl.expand_dims(decay, 1)
        p = next_p
    return acc, p, row_max, row_sum


@gluon.jit
def _consume(call, CONSUMER: gl.constexpr):
    """The rows of one consumer warpgroup, from the first score to the stored output."""
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK_N, 16]))
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.HEADDIM, 16])
    head, batch = gl.program_id(1), gl.program_id(2)
    row = call.first_row() + CONSUMER * ROWS
    tiles, plain = call.tiles()
    masked = gl.maximum(tiles - plain, 1)
    q_tile = call.q_tiles.index(CONSUMER)

    mbarrier.wait(call.q_ready.index(CONSUMER), 0)
    score = warpgroup_mma_wait(0, deps=(_start_scores(call, q_tile, 0),))
    mbarrier.arrive(call.k_empty.index(0), count=1)
    acc = gl.zeros([ROWS, call.HEADDIM], gl.float32, out_layout)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, row_layout)
    row_sum = gl.zeros([ROWS], gl.float32, row_layout)
    p, _, row_max, row_sum = _softmax(call, score, row_max, row_sum, row, (tiles - 1) * call.BLOCK_N, True)
    _wait_for_values(call, 0)
    acc, p, row_max, row_sum = _walk(call, q_tile, acc, p, row_max, row_sum, row, 1, masked, tiles, True)
    acc, p, row_max, row_sum = _walk(call, q_tile, acc, p, row_max, row_sum, row, masked, tiles, tiles, False)
    acc, p = warpgroup_mma_wait(0, deps=(_start_output(call, acc, p, tiles - 1), p))

    row_sum = gl.where(row_sum == 0, 1.0, row_sum)  # a row that sees no key gives zeros, and -inf as its lse
    rows = row + gl.arange(0, ROWS, row_layout)
    lse = call.lse + (batch.to(gl.int64) * call.nheads + head) * call.seqlen_q
    gl.store(lse + rows, (row_max + gl.log2(row_sum)) * 0.6931471805599453, mask=rows < call.seqlen_q)
    acc = acc / gl.expand_dims(gl.convert_layout(row_sum, gl.SliceLayout(1, out_layout)), 1)
    _matrix(q_tile).store(acc.to(call.q.dtype))  # nothing reads Q any more
    fence_async_shared()
    tma.async_copy_shared_to_global(call.out, [batch, row, head * call.HEADDIM], q_tile)
    tma.store_wait(0)


@gluon.jit
def _consume_first(call):
    _consume(call, 0)


@gluon.jit
def _consume_second(call):
    _consume(call, 1)


@gluon.jit(do_not_specialize=SIZES)
def gluon_forward(
    q, k, v, out, lse, nheads, nheads_k, seqlen_q, seqlen_k, scale_log2, CAUSAL: gl.constexpr, STAGES: gl.constexpr
):
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS] + q.block_type.shape, q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_type.shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_type.shape, v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    call = Call(q, k, v, out, lse, nheads, nheads_k, seqlen_q, seqlen_k, scale_log2, CAUSAL, STAGES,
                q_tiles, k_tiles, v_tiles, q_ready, k_ready, v_ready, k_empty, v_empty)  # fmt: skip
    # The first role runs in the warps of the launch, and gets the registers that the other roles leave.
    gl.warp_specialize(
        [(_consume_first, (call,)), (_consume_second, (call,)), (_produce, (call,))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _describe(array, rows: int) -> TensorDescriptor:
    """A descriptor of shape (batch, seqlen, heads * headdim), in tiles of `rows` rows of one head."""
    batch, seqlen, heads, headdim = array.shape
    tile = [1, rows, headdim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, getattr(gl, str(array.dtype).removeprefix("torch.")))
    width = heads * headdim
    return TensorDescriptor(array, [batch, seqlen, width], [seqlen * width, width, 1], tile, layout)


def forward(q, k, v, causal: bool):
    """out like q, and lse (batch, nheads, seqlen_q) in float32."""
    batch, seqlen_q, nheads, headdim = q.shape
    _, seqlen_k, nheads_k, _ = k.shape
    out = torch.empty_like(q)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    if not (q.numel() and k.numel()):
        return out.zero_(), lse.fill_(-math.inf)
    rows, keys, stages = ROWS.value, 128, 256 // headdim
    grid = (triton.cdiv(seqlen_q, CONSUMERS.value * rows), nheads, batch)
    arrays = (_describe(q, rows), _describe(k, keys), _describe(v, keys), _describe(out, rows), lse)
    sizes = (nheads, nheads_k, seqlen_q, seqlen_k, headdim**-0.5 * LOG2_E)
    gluon_forward[grid](*arrays, *sizes, CAUSAL=causal, STAGES=stages, num_warps=4, maxnreg=MAX_REGISTERS)
    return out, lse
