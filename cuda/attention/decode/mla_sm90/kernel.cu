// mla_sm90/kernel.cu: attention over a cache whose values are part of its keys: headdim 576, headdim_v 512, v the first 512 columns of k.
// That is multi-head latent attention with the up-projections absorbed into q and out.   out = softmax(q k^T * softmax_scale) k[:, :512]
// Values of the same shape in separate memory are served, too, in tiles of 32 keys (MlaValues::kOwn).
//
// New against wgmma_sm90: one load of a tile serves as K and as V. The query heads that share keys are rows of one matrix: row r is head r
// % group of query r / group. And the keys of a sequence are divided into shares for several blocks where rows alone would not fill the
// GPU. A block has 64 rows and one share of the keys, in tiles of 64:
//
//     scores   S = Q K^T of tile i + 1, most of Q in registers        | softmax -> P, o_scale in shared memory | ...
//     left                    O[:, :256] = o_scale O + P V of tile i  | columns 0 .. 255 of tile i + 3 into its place
//     right                   O[:, 256:] = o_scale O + P V of tile i  | columns 256 .. 511 of tile i + 3 into its place
//
// None of the three warpgroups only loads: each half of O loads the memory that only it frees, and `left` also loads the keys' last 64
// columns. P of tile i is published only when the scores of tile i + 1 are nearly done. So one softmax runs next to each P V, and the
// tensor cores always have work. Where memory is the bound and tile i + 1 has not arrived, P of tile i is published at once, so that the
// place of tile i becomes free for a load. Two blocks that read the same keys form a cluster: each loads half of the first 512 columns of a
// tile for both.
//
// Bound by memory below about 64 rows, else by the products. A block of less than 64 rows multiplies zeros. When the keys are divided,
// every share writes its own normalised O and lse, and a second kernel merges them (mla_sm90/merge.cuh).
#include <numeric>

#include "attention/common/epilogue.cuh"
#include "attention/common/mask.h"
#include "attention/common/output_fragment.cuh"
#include "attention/common/score_fragment.cuh"
#include "attention/decode/mla_sm90/merge.cuh"
#include "attention/decode/mla_sm90/plan.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "common/divisor.h"
#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "device/ring.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kD = 576, kDv = kMlaColumns, kRows = 64;
constexpr int kChunks = kD / kChunkColumns, kHalfChunks = kDv / 2 / kChunkColumns;
constexpr int kSteps = kD / 16, kRegisterSteps = 31;  // steps of 16 columns of Q K^T; steps whose Q fits in registers
constexpr int kSlots = 3;                             // tiles of V in shared memory
constexpr int kThreads = 3 * 128;

enum class MlaValues { kInKeys, kOwn };

struct MlaParams {
    CUtensorMap map_k, map_v;
    AttentionParams attention;
    int rows, row_blocks;   // rows = seqlen_q x group; blocks of 64 rows
    int splits;             // shares of a sequence's keys
    bool invariant;         // the number of shares follows from the sequence's own keys; superfluous shares are empty
    float scale_log2;       // softmax_scale * log2(e)
    int blocks;             // blocks of a cluster: 2 if row_blocks is even, else 1
    Divisor page, group;    // divide by the page size; by the query heads per key head
    int page_rows;          // rows of a box: a common divisor of the page and the tile
    int pages;              // boxes of page_rows rows in a tile
    int boxes_k, boxes_v;   // boxes that a block loads: of the keys of a tile; of half of its values
    float *partial, *lses;  // (batch, nheads_k, splits, rows, headdim_v) and (batch, nheads_k, splits, rows)
};

// The work of a block: 64 rows of a key head, against one share of the keys that some row of its cluster sees. Kept in shared memory
// because registers are scarce.
struct MlaWork {
    int b, head_k, split, row0;
    Sequence s;
    KeyRange top, bottom;  // the keys that the first and the last row of the cluster see
    int first, count;      // first tile; number of tiles
};

// v: the first 512 columns of the keys, or the separate values. k: the columns of the keys that are not in v.
// At first, the last slots of v hold the columns of Q that go to registers.
template <typename T, MlaValues kValues>
struct alignas(1024) MlaSmem {
    static constexpr bool kOwn = kValues == MlaValues::kOwn;
    static constexpr int kKeys = mla_keys(kOwn), kKeySlots = kOwn ? 2 : 1;
    static constexpr int kFirstChunk = kOwn ? 0 : kDv / kChunkColumns;  // of k
    static constexpr int kFreeSlots = kSlots - kRows / kKeys;           // slots of v that do not hold Q at first
    T v[kSlots][kKeys * kDv];
    T k[kKeySlots][kKeys * (kChunks - kFirstChunk) * kChunkColumns];
    T p[2][kRows * kChunkColumns];  // of 64 columns; kKeys are used
    T q[kRows * kChunkColumns];     // the last chunk of Q
    T q_step[kRows * 16];           // the k16 step before that chunk, in the 32-byte swizzle
    float o_scale[2][kRows];        // the factor for O; at the end, 1 / row sum
    MlaWork work;
    uint64_t v_full[2][kSlots], v_empty[2][kSlots], k_full[kKeySlots], k_empty[kKeySlots], p_full[2], p_empty[2];
};
static_assert(sizeof(MlaSmem<__half, MlaValues::kInKeys>) <= 227 * 1024 && sizeof(MlaSmem<__half, MlaValues::kOwn>) <= 227 * 1024,
              "one Hopper block can address 227 KiB");

enum MlaBarrier : int {
    kQueries = 1,  // Q is in shared memory
    kScores = 2    // only the scores warpgroup
};

template <int kKeys>
__device__ __forceinline__ MlaWork mla_work(const MlaParams& params, int block) {
    const AttentionParams& p = params.attention;
    const int rows = block % params.row_blocks, rest = block / params.row_blocks;  // neighbouring blocks read the same keys
    const int heads = rest / params.splits, begin_row = rows / params.blocks * params.blocks * kRows;
    MlaWork w;
    w.b = heads / p.nheads_k, w.head_k = heads % p.nheads_k, w.split = rest % params.splits, w.row0 = rows * kRows;
    w.s = sequence_of(p, w.b);
    w.top = window_range(p, w.s, params.group.divide(begin_row));
    w.bottom = window_range(p, w.s, params.group.divide(min(begin_row + params.blocks * kRows, params.rows) - 1));
    const int begin = w.top.begin, end = w.bottom.end;
    const int tiles = end > begin ? (end - 1) / kKeys - begin / kKeys + 1 : 0,
              share = params.invariant ? mla_invariant_share(tiles) : (tiles + params.splits - 1) / params.splits;
    w.first = begin / kKeys + w.split * share, w.count = max(0, min(share, tiles - w.split * share));
    return w;
}

// Starts the copies of Q to shared memory, by all threads: one row per warp, in pieces of 16 bytes. Rows that do not exist are zeros.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void load_queries(const MlaParams& params, const MlaWork& w, MlaSmem<T, kValues>& smem) {
    constexpr int kPieces = kD / 8, kStepPiece = kRegisterSteps * 2, kLastPiece = kDv / 8;
    const AttentionParams& p = params.attention;
    const T* q = static_cast<const T*>(p.q.data) + w.s.q + int64_t(w.head_k) * p.group * p.q.head;
    const int row0 = w.row0, lane = threadIdx.x % 32;
    const uint32_t first = shared_address(smem.v[smem.kFreeSlots]), step = shared_address(smem.q_step), last = shared_address(smem.q);
#pragma unroll 2
    for (int r = threadIdx.x / 32; r < kRows; r += kThreads / 32) {
        const int row = row0 + r, query = params.group.divide(row);
        const bool exists = row < params.rows;
        const T* from = exists ? q + query * p.q.row + (row - query * p.group) * p.q.head : q;
#pragma unroll
        for (int i = 0; i < (kPieces + 31) / 32; ++i) {
            const int piece = 32 * i + lane;
            if (piece >= kPieces) break;
            const uint32_t to = piece < kStepPiece   ? first + swizzled_offset(kRows, r, piece)
                                : piece < kLastPiece ? step + narrow_swizzled_offset(r, piece - kStepPiece)
                                                     : last + swizzled_offset(kRows, r, piece - kLastPiece);
            cp_async_16(to, from + piece * 8, exists ? 16 : 0);
        }
    }
}

// ---- copies, by the output warpgroups ----

// The place of a row of a sequence in the cache. Pages past the sequence arrive as zeros.
struct MlaPlace {
    int row, page;
};
__device__ __forceinline__ MlaPlace mla_place(const MlaParams& params, const MlaWork& w, int row) {
    const CacheView& cache = params.attention.cache;
    if (!cache.block_table) return {row, cache_entry(cache, w.b)};
    const int index = params.page.divide(row);
    return {row - index * cache.page_size, row < w.s.seqlen_k ? cache_page(cache, w.b, index) : cache.entries};
}

// A thread has at most one box of a tile of k, and one of its half of v. A warp takes about 90 cycles to issue a box, so consecutive boxes
// go to different warps.
struct MlaBox {
    int row, chunk;  // of the tile; row < 0: no box
};
__device__ __forceinline__ MlaBox mla_box(const MlaParams& params, int boxes, int first_chunk, int warp, int lane) {
    const int box = lane * 4 + warp, chunk = box / params.pages;
    return {box < boxes ? (box - chunk * params.pages) * params.page_rows : -1, first_chunk + chunk};
}

// The copies of one thread of an output warpgroup. The warpgroup loads its half of v; with two blocks, each block loads a part of it for
// both. The left half also loads k. Tiles count from the first of the share.
template <typename T, MlaValues kValues>
struct MlaLoader {
    using Smem = MlaSmem<T, kValues>;
    static constexpr uint32_t kChunkBytes = Smem::kKeys * kChunkRowBytes;
    const MlaParams& params;
    const MlaWork& w;
    Smem& smem;
    int half, warp, lane;
    MlaBox v, k;
    MlaPlace next_v, next_k;  // place in the tile that is loaded next

    __device__ __forceinline__ MlaLoader(const MlaParams& params, const MlaWork& w, Smem& smem, int half, int warp, int lane)
        : params(params), w(w), smem(smem), half(half), warp(warp), lane(lane) {
        v = mla_box(params, params.boxes_v, half * kHalfChunks + int(cluster_rank()) * (kHalfChunks / params.blocks), warp, lane);
        k = mla_box(params, half == 0 ? params.boxes_k : 0, Smem::kFirstChunk, warp, lane);
        next_v = find_values(0), next_k = find_keys(0);
    }

    __device__ __forceinline__ MlaPlace find(int i, MlaBox box) const {
        if (box.row < 0 || i >= w.count) return {0, 0};
        return mla_place(params, w, (w.first + i) * Smem::kKeys + box.row);
    }
    __device__ __forceinline__ MlaPlace find_values(int i) const { return find(i, v); }
    __device__ __forceinline__ MlaPlace find_keys(int i) const { return find(i, k); }

    __device__ __forceinline__ void load_values(int i) const {  // at next_v
        if (warp >= params.boxes_v || i >= w.count) return;
        const uint32_t slot = i % kSlots, full = shared_address(smem.v_full[half] + slot);
        if (i >= Smem::kFreeSlots) mbarrier_wait(shared_address(smem.v_empty[half] + slot), (i - Smem::kFreeSlots) / kSlots & 1);
        if (warp == 0 && lane == 0) mbarrier_arrive_expect_tx(full, kHalfChunks * kChunkBytes);
        if (v.row >= 0) {
            const uint32_t to = shared_address(smem.v[slot]) + v.chunk * kChunkBytes + v.row * kChunkRowBytes;
            if (params.blocks > 1) tma_load_multicast(to, &params.map_v, full, 0, next_v.row, v.chunk, w.head_k, next_v.page, 3);
            else tma_load(to, &params.map_v, full, 0, next_v.row, v.chunk, w.head_k, next_v.page);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void load_keys(int i) {  // at next_k; then finds the place in the next tile
        if (half != 0 || warp >= params.boxes_k || i >= w.count) return;
        const Ring<Smem::kKeySlots> ring(smem.k_full, smem.k_empty, i);
        ring.wait_empty();
        if (warp == 0 && lane == 0) mbarrier_arrive_expect_tx(ring.full_barrier(), sizeof smem.k[0]);
        if (k.row >= 0) {
            const uint32_t to = shared_address(smem.k[ring.slot]) + (k.chunk - Smem::kFirstChunk) * kChunkBytes + k.row * kChunkRowBytes;
            tma_load(to, &params.map_k, ring.full_barrier(), 0, next_k.row, k.chunk, w.head_k, next_k.page);
        }
        next_k = find_keys(i + 1);
        __syncwarp();
    }
};
// A warp of O no longer needs a slot of its half: it tells all blocks that fill the slot. The scores' warps also read the slot, and may
// zero some of it, but arrive only at p_full. P of a tile is published after its scores are complete, and O waits for P. So p_full and
// v_empty together order their accesses before the next copy. Slots that held Q are released by the scores' warps themselves.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void release_values(const MlaParams& params, MlaSmem<T, kValues>& smem, int half, int slot, int lane) {
    const uint32_t empty = shared_address(smem.v_empty[half] + slot);
#pragma unroll 1
    for (int rank = 0; rank < params.blocks; ++rank)
        if (arrives(lane)) mbarrier_arrive_cluster(cluster_address(empty, rank));
}

// Whether a half of tile i has not arrived yet, in calls that memory bounds. The answer may differ between warps.
template <typename T, MlaValues kValues>
__device__ __forceinline__ bool memory_is_late(const MlaParams& params, MlaSmem<T, kValues>& smem, int half, int i) {
    const Ring<kSlots> ring(smem.v_full[half], smem.v_empty[half], i);
    return params.row_blocks == 1 && __any_sync(~0u, !mbarrier_test(ring.full_barrier(), ring.phase));
}

// ---- the scores warpgroup ----

// S (+)= steps kBegin .. kEnd - 1 of Q K^T. desc_v, desc_k: descriptors of the keys' columns that lie in v and in k.
template <typename T, MlaValues kValues, int kBegin, int kEnd>
__device__ __forceinline__ void multiply_qk(float (&S)[MlaSmem<T, kValues>::kKeys / 2], const uint32_t (&Q)[kRegisterSteps][4],
                                            uint64_t desc_q_step, uint64_t desc_q, uint64_t desc_v, uint64_t desc_k) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys, kFirstStep = MlaSmem<T, kValues>::kFirstChunk * kChunkColumns / 16;
    wgmma_fence();
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
        const uint64_t keys = i < kFirstStep ? desc_v + descriptor_k_step(i, kKeys) : desc_k + descriptor_k_step(i - kFirstStep, kKeys);
        if (i < kRegisterSteps) wgmma_rs<T, kKeys, 0>(S, Q[i], keys, i != 0);
        else wgmma_ss<T, kKeys>(S, i < kDv / 16 ? desc_q_step : desc_q + descriptor_k_step(i - kDv / 16, kRows), keys, 1);
    }
    wgmma_commit();
}

// Starts the scores of tile i, once it arrives. Keys that no row sees have P = 0, but 0 x NaN is NaN: their V is zeroed. At least two
// groups of products; the last one is short.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void start_scores(const MlaWork& w, MlaSmem<T, kValues>& smem, int i, const uint32_t (&Q)[kRegisterSteps][4],
                                             float (&S)[mla_keys(kValues == MlaValues::kOwn) / 2]) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys;
    const Ring<kSlots> left(smem.v_full[0], smem.v_empty[0], i), right(smem.v_full[1], smem.v_empty[1], i);
    const Ring<MlaSmem<T, kValues>::kKeySlots> keys(smem.k_full, smem.k_empty, i);
    const uint32_t v = shared_address(smem.v[left.slot]), k = shared_address(smem.k[keys.slot]);
    const int key0 = (w.first + i) * kKeys, before = w.top.begin - key0, behind = w.bottom.end - key0;
    if (before > 0 || behind < kKeys) {
        left.wait_full();
        right.wait_full();
#pragma unroll 1
        for (int x = threadIdx.x % 128; x < kKeys * kDv / 8; x += 128) {
            const int r = x / (kDv / 8);
            if (r < before || r >= behind) store_shared_16(v + swizzled_offset(kKeys, r, x % (kDv / 8)), make_uint4(0, 0, 0, 0));
        }
        fence_proxy_async();
        bar_sync(kScores, 128);
    }
    const uint64_t desc_q = wgmma_descriptor(shared_address(smem.q), 16), desc_q_step = narrow_descriptor(shared_address(smem.q_step)),
                   desc_v = wgmma_descriptor(v, 16), desc_k = wgmma_descriptor(k, 16);
    left.wait_full();
    if (kValues == MlaValues::kOwn) {
        right.wait_full();
        keys.wait_full();
        multiply_qk<T, kValues, 0, kRegisterSteps>(S, Q, desc_q_step, desc_q, desc_v, desc_k);
    } else {
        multiply_qk<T, kValues, 0, kDv / 32>(S, Q, desc_q_step, desc_q, desc_v, desc_k);
        right.wait_full();
        multiply_qk<T, kValues, kDv / 32, kRegisterSteps>(S, Q, desc_q_step, desc_q, desc_v, desc_k);
        keys.wait_full();
    }
    multiply_qk<T, kValues, kRegisterSteps, kSteps>(S, Q, desc_q_step, desc_q, desc_v, desc_k);
}
// Sets scores outside the window of their row to -inf.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&S)[kKeys / 2], const MlaParams& params, const MlaWork& w, int key0) {
    if (key0 >= w.bottom.begin && key0 + kKeys <= w.top.end) return;
    const int thread = opaque(int(threadIdx.x)), row = w.row0 + accumulator_row(thread, 0), last = w.s.seqlen_q - 1,
              at = key0 + accumulator_column(thread, 0);
    const KeyRange r0 = window_range(params.attention, w.s, min(params.group.divide(row), last));
    const KeyRange r1 = window_range(params.attention, w.s, min(params.group.divide(row + 8), last));
    mask_right(S, r0.end - 1 - at, r1.end - 1 - at);
    mask_left(S, r0.begin - at, r1.begin - at);
}

// Stores the factors of a thread's two rows for the threads that have the same rows of O.
__device__ __forceinline__ void store_factors(float (&factors)[kRows], const float (&x)[2], int lane) {
    if (lane % 4 == 0)
        for (int r = 0; r < 2; ++r) factors[accumulator_row(threadIdx.x % 128, 2 * r)] = x[r];
}
__device__ __forceinline__ float2 load_factors(const float (&factors)[kRows]) {
    const int row = accumulator_row(threadIdx.x % 128, 0);
    return {factors[row], factors[row + 8]};
}

// Computes P and o_scale of every tile; at the end, 1 / row sum (0 for a row without keys) and lse.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void compute_scores(const MlaParams& params, const MlaWork& w, MlaSmem<T, kValues>& smem, int warp, int lane) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys, kKeySlots = MlaSmem<T, kValues>::kKeySlots;
    const AttentionParams& p = params.attention;
    // The offset of the first 16 bytes that this lane addresses for ldmatrix and stmatrix, in 64 rows of 64 columns.
    const uint32_t fragment = swizzled_offset(kRows, warp * 16 + lane % 16, lane / 16);
    uint32_t Q[kRegisterSteps][4];
    const uint32_t staged = shared_address(smem.v[smem.kFreeSlots]) + fragment;
#pragma unroll
    for (int i = 0; i < kRegisterSteps; ++i) ldmatrix_x4(Q[i], (staged ^ 32 * (i % 4)) + i / 4 * kRows * kChunkRowBytes);
    fence_proxy_async();
    __syncwarp();
    for (int slot = smem.kFreeSlots; slot < min(kSlots, w.count); ++slot)
        for (int half = 0; half < 2; ++half) release_values(params, smem, half, slot, lane);

    float S[kKeys / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    const auto finish_scores = [&](int i) {  // of tile i
        wgmma_wait<0>(S);
        if (arrives(lane)) mbarrier_arrive(Ring<kKeySlots>(smem.k_full, smem.k_empty, i).empty_barrier());
    };
    const auto publish = [&](int i) {  // P of tile i
        if (arrives(lane)) mbarrier_arrive(Ring<2>(smem.p_full, smem.p_empty, i).full_barrier());
    };
    if (w.count > 0) {
        start_scores(w, smem, 0, Q, S);
        finish_scores(0);
    }
#pragma unroll 1
    for (int i = 0; i < w.count; ++i) {
        mask_scores<kKeys>(S, params, w, (w.first + i) * kKeys);
        float tile_max[2], sum[2], o_scale[2] = {1.0f, 1.0f};
        tile_maximum(S, tile_max);
        tile_max[0] *= params.scale_log2, tile_max[1] *= params.scale_log2;
        raise_maximum(tile_max, 8.0f, row_max, row_sum, o_scale);  // P stays below 2^8
        exponentials(S, params.scale_log2, row_max, sum);
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        const Ring<2> ring(smem.p_full, smem.p_empty, i);
        ring.wait_empty();
        const uint32_t to = opaque(shared_address(smem.p[ring.slot]) + fragment);
#pragma unroll
        for (int x = 0; x < kKeys / 16; ++x) {
            uint32_t P[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) P[j] = pack_16<T>(S[8 * x + 2 * j], S[8 * x + 2 * j + 1]);
            stmatrix_x4(to ^ 32 * x, P);  // each step of 16 keys is two pieces further
        }
        store_factors(smem.o_scale[ring.slot], o_scale, lane);
        fence_proxy_async();
        __syncwarp();
        if (i + 1 < w.count) {
            const bool at_once = memory_is_late(params, smem, 0, i + 1) || memory_is_late(params, smem, 1, i + 1);
            if (at_once) publish(i);
            start_scores(w, smem, i + 1, Q, S);
            wgmma_wait<1>();
            if (!at_once) publish(i);
            finish_scores(i + 1);
        } else {
            publish(i);
        }
    }
    const int64_t heads = int64_t(w.b) * p.nheads_k + w.head_k;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowEnd end = finish_row<ScoreUnit::kLog2>(row_max[r], quad_sum(row_sum[r]));
        inverse[r] = end.inverse;
        const int i = w.row0 + accumulator_row(threadIdx.x, 2 * r);
        if (lane % 4 != 0 || i >= params.rows) continue;
        const float lse = end.lse * kLn2;
        if (params.splits > 1) params.lses[(heads * params.splits + w.split) * params.rows + i] = lse;
        else if (p.lse) {
            const int query = params.group.divide(i);
            p.lse[lse_offset(p, w.s, w.head_k * p.group + params.group.remainder(i, query)) + query] = lse;
        }
    }
    const Ring<2> ring(smem.p_full, smem.p_empty, w.count);
    ring.wait_empty();
    store_factors(smem.o_scale[ring.slot], inverse, lane);
    __syncwarp();
    publish(w.count);
}

// ---- the output warpgroups: all rows, half of the columns each ----

template <int kCount>
__device__ __forceinline__ void rescale_output(float (&O)[kCount], float o_scale0, float o_scale1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) O[i] *= i / 2 % 2 ? o_scale1 : o_scale0;
}

// Computes O. inverse: 1 / row sum, 0 for a row without keys.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void attend(const MlaParams& params, const MlaWork& w, MlaSmem<T, kValues>& smem, MlaLoader<T, kValues>& loader,
                                       int half, int lane, float (&O)[kDv / 4], float (&inverse)[2]) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys;
    constexpr uint32_t kChunkBytes = kKeys * kChunkRowBytes;
    const uint64_t desc_v = wgmma_descriptor(shared_address(smem.v[0]) + half * kHalfChunks * kChunkBytes, kChunkBytes),
                   desc_p = wgmma_descriptor(shared_address(smem.p[0]), 16);
#pragma unroll 1
    for (int i = smem.kFreeSlots; i < kSlots; ++i) loader.load_values(i), loader.next_v = loader.find_values(i + 1);
    loader.load_keys(1);
#pragma unroll 1
    for (int i = 0; i < w.count; ++i) {
        const Ring<kSlots> ring(smem.v_full[half], smem.v_empty[half], i);
        Ring<2> scores(smem.p_full, smem.p_empty, i);
        scores.wait_full();
        const float2 o_scale = load_factors(smem.o_scale[scores.slot]);
        if (__any_sync(~0u, o_scale.x != 1.0f || o_scale.y != 1.0f)) rescale_output(O, o_scale.x, o_scale.y);
        ring.wait_full();
        const uint64_t at_p = desc_p + scores.slot * descriptor_step(sizeof smem.p[0]),
                       at_v = desc_v + ring.slot * descriptor_step(sizeof smem.v[0]);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < kKeys / 16; ++x)
            wgmma_ss<T, kDv / 2, 0, 1>(O, at_p + descriptor_k_step(x, kRows), at_v + descriptor_row_step(x), 1);
        wgmma_commit();
        const bool late = memory_is_late(params, smem, half, i + 1);  // keys wait for the scores of tile i + 1, which are then far off
        if (!late) loader.load_keys(i + 2);
        const MlaPlace ahead = loader.find_values(i + kSlots + 1);
        wgmma_wait<0>(O);
        scores.release(lane);
        if (i + kSlots < w.count) {
            release_values(params, smem, half, ring.slot, lane);
            loader.load_values(i + kSlots);
            loader.next_v = ahead;
        }
        if (late) loader.load_keys(i + 2);
    }
    const Ring<2> scores(smem.p_full, smem.p_empty, w.count);
    scores.wait_full();
    const float2 factors = load_factors(smem.o_scale[scores.slot]);
    inverse[0] = factors.x, inverse[1] = factors.y;
}

// Stores out, or this share's partial result.
template <typename T>
__device__ __forceinline__ void store_output(const MlaParams& params, const MlaWork& w, const float (&O)[kDv / 4],
                                             const float (&inverse)[2], int half, int warp, int lane) {
    const AttentionParams& p = params.attention;
    const int quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = w.row0 + warp * 16 + lane / 4 + 8 * r;
        const bool exists = row < params.rows, empty = inverse[r] == 0.0f;  // no visible key: stored as zeros, as 0 x V may be NaN
        if (params.splits > 1) {
            const int64_t heads = int64_t(w.b) * p.nheads_k + w.head_k;
            float* to = params.partial + ((heads * params.splits + w.split) * params.rows + row) * kDv + half * (kDv / 2) + 2 * quad;
            if (exists)
#pragma unroll
                for (int x = 0; x < kDv / 16; ++x) {
                    const float* pair = O + 4 * x + 2 * r;
                    *reinterpret_cast<float2*>(to + 8 * x) =
                        empty ? make_float2(0, 0) : make_float2(pair[0] * inverse[r], pair[1] * inverse[r]);
                }
            continue;
        }
        const int query = params.group.divide(row), head = w.head_k * p.group + params.group.remainder(row, query);
        T* to = static_cast<T*>(p.out.data) + w.s.out + query * p.out.row + head * p.out.head + half * (kDv / 2);
        store_row(to, O, r, inverse[r], empty, exists, kDv / 2, quad);
    }
}

template <typename T, MlaValues kValues>
__global__ void __launch_bounds__(kThreads, 1) decode_mla_kernel(const __grid_constant__ MlaParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using Smem = MlaSmem<T, kValues>;
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&params.map_k);
        prefetch_tensormap(&params.map_v);
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < kSlots; ++i) {
                mbarrier_init(shared_address(smem.v_full[half] + i), 1);
                mbarrier_init(shared_address(smem.v_empty[half] + i), params.blocks * 4 * kWarpArrivals);
            }
        for (int i = 0; i < Smem::kKeySlots; ++i) {
            mbarrier_init(shared_address(smem.k_full + i), 1);
            mbarrier_init(shared_address(smem.k_empty + i), 4 * kWarpArrivals);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(shared_address(smem.p_full + i), 4 * kWarpArrivals);
            mbarrier_init(shared_address(smem.p_empty + i), 2 * 4 * kWarpArrivals);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    const bool paired = params.blocks > 1;
    if (paired) cluster_arrive();
    {
        const MlaWork work = mla_work<Smem::kKeys>(params, blockIdx.x);
        if (threadIdx.x == 0) smem.work = work;
    }
    __syncthreads();
    if (paired) cluster_wait();
    launch_dependents();
    const MlaWork& work = smem.work;
    const int half = warp / 4 - 1;
    const auto join = [] {  // waits until all of Q is in shared memory
        cp_async_wait_all();
        fence_proxy_async();
        bar_sync(kQueries, kThreads);
    };
    if (half < 0) {
        load_queries(params, work, smem);
        join();
        setmaxnreg_inc<184>();
        compute_scores(params, work, smem, warp, lane);
    } else {
        MlaLoader<T, kValues> loader(params, work, smem, half, warp % 4, lane);
#pragma unroll 1
        for (int i = 0; i < Smem::kFreeSlots; ++i) {
            loader.load_values(i), loader.next_v = loader.find_values(i + 1);
            if (i == 0) loader.load_keys(0), load_queries(params, work, smem);  // the rest of the keys after these
        }
        join();
        setmaxnreg_dec<160>();
        float O[kDv / 4], inverse[2];
#pragma unroll
        for (int i = 0; i < kDv / 4; ++i) O[i] = 0.0f;
        attend(params, work, smem, loader, half, lane, O, inverse);
        store_output<T>(params, work, O, inverse, half, warp % 4, lane);
    }
    if (paired) cluster_arrive(), cluster_wait();  // the other block may still send to this one
}

MlaParams mla_params(const AttentionParams& p, int multiprocessors) {
    MlaParams params{};
    params.attention = p;
    params.rows = p.seqlen_q * p.group;
    params.scale_log2 = p.scale * kLog2e;
    params.group = divisor_of(p.group);
    params.row_blocks = (params.rows + kRows - 1) / kRows;
    params.blocks = params.row_blocks % 2 ? 1 : 2;
    params.splits = mla_splits(p, mla_keys(!mla_v_is_k(p)), int64_t(params.row_blocks) * p.nheads_k, multiprocessors);
    params.invariant = mla_is_invariant(p);
    if (params.splits > 1) {
        params.partial = static_cast<float*>(align_up(p.workspace, 16));
        params.lses = params.partial + int64_t(p.batch) * p.nheads_k * params.splits * params.rows * kDv;
    }
    return params;
}

template <typename T, MlaValues kValues>
cudaError_t launch_mla(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr int kKeys = mla_keys(kValues == MlaValues::kOwn);
    MlaParams params = mla_params(p, multiprocessors);
    using Smem = MlaSmem<T, kValues>;
    params.page_rows = p.cache.block_table ? std::gcd(p.cache.page_size, kKeys) : kKeys;
    params.pages = kKeys / params.page_rows;
    if (p.cache.block_table) params.page = divisor_of(p.cache.page_size);
    const int64_t rows = p.cache.block_table ? p.cache.page_size : p.seqlen_k;
    const auto encode = [&](const char* name, const TensorView& x, int columns, int chunks, CUtensorMap* map, int* boxes) {
        int loads = 0;
        *boxes = params.pages == 1 ? 1 : params.pages * chunks;  // whole tiles, or the pages of every chunk
        return encode_tiles({name, x.data, std::is_same_v<T, __half>, columns, rows, p.nheads_k, p.cache.entries, 2 * x.row, 2 * x.head,
                             2 * x.batch, params.page_rows, columns, false, params.pages == 1 ? chunks : 1},
                            map, &loads);
    };
    if (cudaError_t error = encode("k", p.k, kD, kChunks - Smem::kFirstChunk, &params.map_k, &params.boxes_k)) return error;
    if (cudaError_t error = encode("v", p.v, kDv, kHalfChunks / params.blocks, &params.map_v, &params.boxes_v)) return error;
    const int64_t heads = int64_t(p.batch) * p.nheads_k;
    LaunchOptions options;
    options.cluster = params.blocks > 1 ? unsigned(params.blocks) : 0;
    const cudaError_t error = launch_kernel(decode_mla_kernel<T, kValues>, unsigned(heads * params.row_blocks * params.splits), kThreads,
                                            sizeof(Smem), stream, params, options);
    if (error != cudaSuccess || params.splits == 1) return error;
    return merge_mla_shares<T>({p, params.rows, params.splits, params.invariant, params.partial, params.lses}, stream);
}

}  // namespace

cudaError_t decode_mla_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        return mla_v_is_k(p) ? launch_mla<T, MlaValues::kInKeys>(p, device.multiprocessors, stream)
                             : launch_mla<T, MlaValues::kOwn>(p, device.multiprocessors, stream);
    };
    return p.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

size_t decode_mla_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    const MlaParams params = mla_params(p, device.multiprocessors);
    if (params.splits == 1) return 0;
    return size_t(p.batch) * size_t(p.nheads_k) * size_t(params.splits) * size_t(params.rows) * (kDv + 1) * sizeof(float) + 16;
}

int64_t decode_mla_sm90_blocks(const AttentionParams& p, const DeviceInfo& device) {
    const MlaParams params = mla_params(p, device.multiprocessors);
    return int64_t(p.batch) * p.nheads_k * params.row_blocks * params.splits;
}

}  // namespace fa
