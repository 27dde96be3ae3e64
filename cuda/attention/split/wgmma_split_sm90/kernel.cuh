// wgmma_split_sm90/kernel.cuh: attention of too few rows to fill the GPU: few heads, or a few queries over a cache.   fp16 and bf16.
//
// New against wgmma_sm90: the query heads that share a key head are rows of one matrix, and the keys are split, so that every block has its
// share of a long line of key tiles. New against decode_split_sm80: wgmma and the copy engine, and any number of rows.
//
//     line     units: key heads of sequences, times groups of rows     0000000000111111111122222222222333333
//     pieces   one per team of blocks                                  000000011111112222222333333344444445
//     team     block y of a team has row block y of the unit
//
// A block is a block of wgmma_sm90, with a producer and one to three consumer warpgroups that run the loop of wgmma_sm90. Only the items
// differ: an item has some of the keys, and its rows are packed (wgmma_split_sm90/plan.h). If a unit lies in several pieces, each piece
// leaves a normalised O and its lse in the workspace, and decode/combine.cu merges them in the order of the keys.
//
// Up to 64 rows per key head the kernel is bound by memory; from about 128 rows on by the tensor cores.
#pragma once

#include <numeric>

#include "attention/forward/wgmma_sm90/kernel.cuh"
#include "attention/split/wgmma_split_sm90/plan.h"

namespace fa {

// Packed rows from row0 on of key head head / group, against some of its keys. seqlen_q, left and right count queries.
struct SplitWork : ForwardWork {
    int group, rows;               // of the key head: query heads, and packed rows
    int slab_rows;                 // packed rows of a warpgroup
    float *partial, *partial_lse;  // of the block's first row; nullptr: the item has all keys
    const uint64_t* tree;          // the tree's bits of query 0 of the sequence; read where tree_begin < seqlen_k
    int64_t tree_row;              // stride between queries
    int tree_begin;                // the first key of the tree; seqlen_k without a tree
    uint64_t tree_seen;            // the tree's keys that some row of the block sees

    __device__ __forceinline__ int row_of(int wg, int place) const { return row0 + wg * slab_rows + place; }  // place: in the slab
};

template <>
struct WgmmaItem<split_id(SplitTile::kD64Rows64)> {
    using Type = SplitWork;
};
template <>
struct WgmmaItem<split_id(SplitTile::kD64Rows128)> {
    using Type = SplitWork;
};
template <>
struct WgmmaItem<split_id(SplitTile::kD128Rows64)> {
    using Type = SplitWork;
};
template <>
struct WgmmaItem<split_id(SplitTile::kD128Rows128)> {
    using Type = SplitWork;
};
template <>
struct WgmmaItem<split_id(SplitTile::kD128Rows192)> {
    using Type = SplitWork;
};
template <>
struct WgmmaItem<split_id(SplitTile::kD256Rows64)> {
    using Type = SplitWork;
};
template <>
struct WgmmaItem<split_id(SplitTile::kD256Rows128)> {
    using Type = SplitWork;
};

struct SplitParams {
    DecodeParams decode;
    WgmmaSchedule loads;  // its list is not used
    int slab_rows;
};

// ---- the functions of an item that consume() calls ----

// Padding rows act like queries past the last; their results are dropped.
template <WgmmaPlanId kId>
__device__ __forceinline__ MaskedTiles masked_tiles(const SplitWork& w, int wg) {
    return {clamp_to(min(w.row_of(wg, 0) / w.group + w.right + 1, w.tree_begin), 0, w.seqlen_k) / kWgmmaPlan<kId>.block_n, 0};
}
// Sets the scores of tree keys that the thread's row r must not see to -inf. The thread's first key is number `first` of the tree, which
// may be negative. Keys past the sequence are hidden already.
template <int kScores>
__device__ __forceinline__ void mask_tree(float (&S)[kScores], int r, uint64_t bits, int first) {
    static_assert(kScores <= 64, "128 keys of a tile");
    // Bits of the hidden keys, from the thread's first key on.
    const uint64_t hidden = ~bits;
    uint64_t low = 0, high = 0;
    if (first >= 0) low = first < 64 ? hidden >> first : 0;
    else if (first > -64) low = hidden << -first, high = hidden >> (64 + first);
    else high = first > -128 ? hidden << (-64 - first) : 0;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if ((i < 8 ? low : high) >> (8 * i % 64 + e) & 1) S[4 * i + 2 * r + e] = -INFINITY;
}
template <WgmmaPlanId kId, int kScores>
__device__ __forceinline__ void mask_scores(float (&S)[kScores], const SplitWork& w, const MaskedTiles& masked, int n, const Consumer& me) {
    if (n < masked.right_tile) return;
    const Consumer at = me.rare();
    const int row = w.row_of(at.wg, at.row() - 64 * at.wg), key = n * kWgmmaPlan<kId>.block_n + 2 * at.quad();
    mask_right(S, min(row / w.group + w.right, w.seqlen_k - 1) - key, min((row + 8) / w.group + w.right, w.seqlen_k - 1) - key);
    if (w.tree_begin < w.seqlen_k) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            mask_tree(S, r, __ldg(w.tree + min((row + 8 * r) / w.group, w.seqlen_q - 1) * w.tree_row), key - w.tree_begin);
    }
}

// As in wgmma_sm90, and also keys of the tree that no row of this block sees. Rows of other blocks may see them; they have their own copy.
template <int kBlockN, typename T, int kStages, int kCount>
__device__ __forceinline__ void zero_values_outside(const AttentionParams& p, const SplitWork& w, int n, T (&tiles)[kStages][kCount],
                                                    const Ring<kStages>& v, int wg) {
    const int end = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k), tree = min(w.tree_begin, end), key0 = n * kBlockN;
    if (key0 + kBlockN <= tree || (!p.cache.entries && end == w.seqlen_k)) return;
    v.wait_full();
    zero_values<kBlockN>(tiles[v.slot], [&](int j) {
        const int bit = key0 + j - w.tree_begin;
        return key0 + j >= end || (bit >= 0 && !(w.tree_seen >> bit & 1));
    });
    bar_sync(kWarpgroup + wg, 128);
}

// out and lse, or this piece's partial results, for the thread's two rows.
template <typename T, WgmmaPlanId kId, int kOutputs>
__device__ __forceinline__ void finish_rows(const AttentionParams& p, const SplitWork& w, const float (&O)[kOutputs],
                                            const RowStatistics& rows, const Consumer& me) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int place = me.row() - 64 * me.wg + 8 * r, row = w.row_of(me.wg, place);
        const bool exists = place < w.slab_rows && row < w.rows;
        const float row_sum = quad_sum(rows.row_sum[r]);
        const int query = row / w.group, head = w.head + row - query * w.group;
        const RowEnd end = finish_row<ScoreUnit::kLog2>(rows.row_max[r], row_sum, w.partial ? -INFINITY : sink_of(p.sinks, head));
        if (w.partial) {
            float* to = w.partial + int64_t(row - w.row0) * p.headdim_v + 2 * me.quad();
            if (!exists) continue;
            if (me.quad() == 0) w.partial_lse[row - w.row0] = end.lse;
#pragma unroll
            for (int x = 0; x < kOutputs / 4; ++x) {
                const float* pair = O + 4 * x + 2 * r;
                if (8 * x < p.headdim_v) *reinterpret_cast<float2*>(to + 8 * x) = make_float2(end.output(pair[0]), end.output(pair[1]));
            }
            continue;
        }
        if (p.lse && me.quad() == 0 && exists) p.lse[(int64_t(w.batch) * p.nheads + head) * p.seqlen_q + query] = end.lse * kLn2;
        T* out = static_cast<T*>(p.out.data) + w.batch * p.out.batch + query * p.out.row + head * p.out.head;
        store_row(out, O, r, end.inverse, end.empty, exists, p.headdim_v, me.quad());
    }
}

// ---- producer ----

// The work item for the keys of a segment that this block's rows see. At least one tile, so that rows without keys need no code path.
template <WgmmaPlanId kId>
__device__ __forceinline__ void set_work(const SplitParams& params, const Segment& at, int row0, uint64_t tree_seen, SplitWork& w) {
    constexpr int kBlockM = kWgmmaPlan<kId>.warpgroups, kBlockN = kWgmmaPlan<kId>.block_n;
    const DecodeParams& d = params.decode;
    const AttentionParams& p = d.attention;
    const SequenceKeys keys = sequence_keys(d, at.b);
    w.state = WorkState::kRows;
    w.row0 = row0, w.batch = at.b, w.head = at.unit / d.shape.row_tiles * p.group;
    w.seqlen_q = p.seqlen_q, w.seqlen_k = keys.count, w.q_row = w.k_row = 0, w.shift = keys.shift;
    w.right = p.window_right < 0 ? keys.count : clamp64(int64_t(keys.shift) + p.window_right, -p.seqlen_q, keys.count);
    w.left = -p.seqlen_q;
    w.group = p.group, w.rows = p.seqlen_q * p.group, w.slab_rows = params.slab_rows;
    const int last_row = min(row0 + kBlockM * params.slab_rows, w.rows) - 1;
    const int end = clamp_to(last_row / p.group + w.right + 1, 0, w.seqlen_k);
    w.first_tile = keys.first_tile + at.begin;
    w.last_tile = max(w.first_tile, min(keys.first_tile + at.end, (end + kBlockN - 1) / kBlockN) - 1);
    w.tree = p.tree.rows + at.b * p.tree.batch, w.tree_row = p.tree.row, w.tree_seen = tree_seen;
    w.tree_begin = keys.count - p.tree.keys;
    w.partial = nullptr;
    if (at.slot >= 0) {
        const int64_t row = int64_t(at.slot) * d.shape.rows + blockIdx.y * (kBlockM * params.slab_rows);
        w.partial = d.partial + row * p.headdim_v, w.partial_lse = d.partial_lse + row;
    }
}

// The tree's keys that the block's rows, from row0 on, see. Called by whole warps.
template <WgmmaPlanId kId>
__device__ __forceinline__ uint64_t tree_seen_by(const SplitParams& params, int b, int row0) {
    const AttentionParams& p = params.decode.attention;
    const int end = min((row0 + kWgmmaPlan<kId>.warpgroups * params.slab_rows - 1) / p.group, p.seqlen_q - 1);
    uint64_t seen = 0;
    for (int i = row0 / p.group + threadIdx.x % 32; i <= end; i += 32) seen |= __ldg(p.tree.rows + b * p.tree.batch + i * p.tree.row);
    return uint64_t(__reduce_or_sync(~0u, unsigned(seen >> 32))) << 32 | __reduce_or_sync(~0u, unsigned(seen));
}

// Loads the packed rows of Q, by one thread. A box holds the query heads of a key head, or some of them, for consecutive queries.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void load_packed_q(const CUtensorMap& map, const SplitParams& params, const SplitWork& w,
                                              WgmmaSmem<T, kId>& smem, uint32_t barrier) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kChunks = kPlan.columns() / kChunkColumns;
    mbarrier_arrive_expect_tx(barrier, kPlan.warpgroups * kChunks * params.slab_rows * kChunkRowBytes);
#pragma unroll 1
    for (int slab = 0; slab < kPlan.warpgroups; ++slab) {
        const int row = w.row_of(slab, 0), query = row / w.group;
#pragma unroll 1
        for (int c = 0; c < params.loads.q_loads; ++c)
            tma_load(shared_address(smem.q[slab]) + c * 64 * kChunkRowBytes, &map, barrier, c * kChunkColumns, w.head + row % w.group,
                     query, 0, w.batch, kEvictFirst);
    }
}

// Called by one warp, whose first lane copies, or by the whole warpgroup. Every warp walks through all segments.
template <typename T, WgmmaPlanId kId, typename Tiles>
__device__ __forceinline__ void produce_pieces(const CUtensorMap& map_q, const SplitParams& params, WgmmaSmem<T, kId>& smem,
                                               Segments& segments, Tiles tiles) {
    constexpr bool kWarpgroup = Tiles::kWalkedBy == WalkedBy::kWarpgroup;
    const DecodeParams& d = params.decode;
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    uint32_t item = 0, tile = 0;
    Segment at;
    while (segments.next(d, at)) {
        const int row0 = at.unit % d.shape.row_tiles * d.shape.rows + blockIdx.y * (kWgmmaPlan<kId>.warpgroups * params.slab_rows);
        if (row0 >= d.attention.seqlen_q * d.attention.group) continue;
        SplitWork& w = smem.work[work.slot];
        const uint64_t tree_seen = d.attention.tree.rows ? tree_seen_by<kId>(params, at.b, row0) : 0;
        work.wait_empty();
        if (threadIdx.x == 0) {
            set_work<kId>(params, at, row0, tree_seen, w);
            mbarrier_arrive(work.full_barrier());
        }
        if (kWarpgroup) bar_sync(kProducer, 128);  // all have read the item; no warp is more than one item ahead
        if (kWarpgroup || threadIdx.x == 0)
            load_item<T, kId>(w, smem, tiles, tile, [&] {
                const Ring<1> q(smem.q_full, smem.q_empty, item);
                q.wait_empty();
                if (kWarpgroup) bar_sync(kProducer, 128);  // no warp may still wait for this phase when Q arrives
                if (threadIdx.x == 0) load_packed_q(map_q, params, w, smem, q.full_barrier());
                if (kWarpgroup) __syncwarp();
            });
        __syncwarp();
        ++item, work.next();
    }
    work.wait_empty();
    if (threadIdx.x == 0) {
        smem.work[work.slot].state = WorkState::kEnd;
        mbarrier_arrive(work.full_barrier());
    }
}

// ---- the block ----

// Zeroes the rows of Q's slabs that no box fills, so that their scores, which nobody uses, are finite.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void clear_slab_ends(WgmmaSmem<T, kId>& smem, int slab_rows) {
    uint4* pieces = reinterpret_cast<uint4*>(smem.q);
    for (int i = threadIdx.x; i < int(sizeof smem.q) / 16; i += blockDim.x)
        if (i / 8 % 64 >= slab_rows) pieces[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
}

template <typename T, SplitTile kTile, KeyLoads kLoads>
__global__ void __launch_bounds__(128 * (split_plan(kTile).warpgroups + 1), 1)
    split_wgmma_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                       const __grid_constant__ CUtensorMap map_v, const __grid_constant__ SplitParams params) {
    constexpr WgmmaPlanId kId = split_id(kTile);
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    using Smem = WgmmaSmem<T, kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    static_assert(!kPlan.general && !kPlan.pages(), "the scores of plain and causal calls, keys in tiles or in boxes");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    launch_dependents();

    const AttentionParams& p = params.decode.attention;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    Segments segments;
    if (warpgroup == 0) {
        if (threadIdx.x == 0) {
            prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
            init_barriers(smem, false);
        }
        __syncwarp();
        segments = Segments(params.decode);
    }
    if (params.slab_rows < 64) clear_slab_ends(smem, params.slab_rows);
    __syncthreads();

    if (warpgroup == 0) {
        if constexpr (kPlan.moves_registers()) setmaxnreg_dec<kPlan.producer_registers()>();
        if constexpr (kLoads == KeyLoads::kPageBoxes)
            produce_pieces(map_q, params, smem, segments, WarpgroupBoxes<T, kId>(map_k, map_v, p, params.loads, smem));
        else if (threadIdx.x < 32) produce_pieces(map_q, params, smem, segments, ThreadTiles<T, kId>(map_k, map_v, p, params.loads, smem));
        return;
    }
    if constexpr (kPlan.moves_registers()) setmaxnreg_inc<kPlan.consumer_registers()>();
    consume(p, smem, Consumer{warpgroup - 1, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)});
}

// ---- launch ----

template <typename T, SplitTile kTile>
cudaError_t launch_split(const DecodeParams& d, const SplitShape& shape, unsigned teams, cudaStream_t stream) {
    constexpr WgmmaPlan kPlan = split_plan(kTile);
    const AttentionParams& p = d.attention;
    const bool paged = p.cache.block_table;
    SplitParams params{};
    params.decode = d, params.slab_rows = shape.slab_rows;
    WgmmaSchedule& loads = params.loads;
    if (paged) loads.page_boxes = std::gcd(p.cache.page_size, kPlan.block_n);
    const int box_heads = p.group < shape.slab_rows ? p.group : shape.slab_rows;
    const int64_t batch_k = p.cache.entries ? p.cache.entries : p.batch, rows_k = paged ? p.cache.page_size : p.seqlen_k;
    const auto tiles = [&](const char* name, const TensorView& x, int columns, int64_t batch, int64_t rows, int heads, int box_rows,
                           int padded, bool by_chunk) {
        return TensorTiles{
            name,   x.data,  std::is_same_v<T, __half>, columns, rows, heads, batch, 2 * x.row, 2 * x.head, 2 * x.batch, box_rows,
            padded, by_chunk};
    };
    CUtensorMap map_q, map_k, map_v;
    TensorTiles q =
        tiles("q", p.q, p.headdim, p.batch, p.seqlen_q, p.nheads, shape.slab_rows / box_heads, kPlan.columns(), shape.slab_rows < 64);
    q.box_heads = box_heads;
    if (cudaError_t error = encode_tiles(q, &map_q, &loads.q_loads)) return error;
    const int box_rows = paged ? loads.page_boxes : kPlan.block_n;
    if (cudaError_t error =
            encode_tiles(tiles("k", p.k, p.headdim, batch_k, rows_k, p.nheads_k, box_rows, kPlan.columns(), paged), &map_k, &loads.k_loads))
        return error;
    if (cudaError_t error = encode_tiles(tiles("v", p.v, p.headdim_v, batch_k, rows_k, p.nheads_k, box_rows, kPlan.columns_v(), paged),
                                         &map_v, &loads.v_loads))
        return error;
    LaunchOptions options;
    options.blocks_y = unsigned(shape.team);
    return launch_kernel(paged ? split_wgmma_kernel<T, kTile, KeyLoads::kPageBoxes> : split_wgmma_kernel<T, kTile, KeyLoads::kTilesOrRows>,
                         teams, 128 * (kPlan.warpgroups + 1), sizeof(WgmmaSmem<T, split_id(kTile)>), stream, options, map_q, map_k, map_v,
                         params);
}

template <SplitTile kTile>
cudaError_t launch_split(const DecodeParams& d, const SplitShape& shape, unsigned teams, cudaStream_t stream) {
    return d.attention.dtype == DType::kFloat16 ? launch_split<__half, kTile>(d, shape, teams, stream)
                                                : launch_split<__nv_bfloat16, kTile>(d, shape, teams, stream);
}

}  // namespace fa
