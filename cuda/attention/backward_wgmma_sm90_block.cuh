// backward_wgmma_sm90_block.cuh: what the two kernels of the Hopper backward share: which keys a block owns and which query tiles see them,
// the thread that loads, what must not leak, and how gradients are stored.
#pragma once

#include <atomic>
#include <cmath>

#include "attention/backward_wgmma_sm90_rows.h"
#include "attention/kernels.h"
#include "attention/mask.h"
#include "attention/params.h"
#include "attention/tiles_backward.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"

namespace fa {

// A block's keys and everything about its sequence, worked out by its first thread.
struct alignas(16) BackwardWork {
    int valid;
    int key0;  // first key of the block
    int head_k, batch;
    int seqlen_q, seqlen_k, shift;
    int q_row, k_row;    // varlen: the sequence's first row, else 0
    int first_tile;      // of the sequence, in QueryTiles
    int left, right;     // row i sees keys i + left .. i + right of 0 .. seqlen_k - 1
    int first_m, end_m;  // query tiles that see any of the keys
    uint32_t it0;        // query tiles that the block has walked before, for other keys
    int start_m;         // the tile that it walks to first; the others follow in ascending order and around the end
    int mask_end;        // those before it have rows that do not see all of them, keys past the end among them
};

struct BackwardSchedule {
    QueryTiles tiles;
    int n_blocks;       // key blocks of a sequence (dense)
    int section_heads;  // with by_section: key heads whose first blocks come before all second ones
    bool by_section;
    bool in_order;                              // deterministic: blocks take turns at every query tile
    int blocks;                                 // of 128 keys; the grid takes them in turn
    int q_loads, k_loads, v_loads, dout_loads;  // boxes that make a tile
};

// Named barriers 1 and 2: the threads of main warpgroup 0 and 1.
__device__ __forceinline__ void main_warpgroup_sync(int wg) { bar_sync(1 + wg, 128); }

// The first lane's value in all lanes that still run; the compiler learns that it is the same, too.
template <typename X>
__device__ __forceinline__ X uniform(X x) {
    return __shfl_sync(~0u, x, 0);
}

// The query tile that a block walks to after tile m.
FA_HOST_DEVICE int next_tile(int m, int first_m, int end_m) { return m + 1 == end_m ? first_m : m + 1; }

// The tile of iteration `it` of that walk.
FA_HOST_DEVICE int tile_of_iteration(const BackwardWork& w, int it) {
    return w.first_m + (w.start_m - w.first_m + it) % (w.end_m - w.first_m);
}

// The block's keys and the query tiles that see any of them. False when it has no keys.
//
// Blocks of a head that run side by side should be at different tiles, because they add to the same sums. Under a causal mask every block
// starts at its first tile, which is another for each of them; else the starts are spread. Taking turns (Turn) wants the same order at
// every tile, and blocks that are waited for must have started before: without a right edge all start at the first tile and the lowest
// keys come first; with one the highest keys do, whose first tile no other block has reached yet. The heads of a section run side by side
// then: blocks that follow each other through the tiles end one after the other, and the next section's begin in the same order. Head after
// head, several would begin at once and wait for each other again.
template <int kBlockM, int kBlockN>
FA_HOST_DEVICE bool find_key_block(const AttentionParams& p, const BackwardSchedule& schedule, int index, BackwardWork& w) {
    if (schedule.in_order && p.window_right >= 0) index = schedule.blocks - 1 - index;
    if (p.cu_seqlens_k) {
        const int slot = index / p.nheads_k;
        w.head_k = index - slot * p.nheads_k;
        // Sequence b owns slots cu[b] / N + b .. cu[b + 1] / N + b: enough wherever it starts, and no prefix sum is needed.
        const auto first_slot = [&](int b) { return clamp_to(p.cu_seqlens_k[b], 0, p.total_k) / kBlockN + b; };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_slot(middle) <= slot) low = middle;
            else high = middle - 1;
        }
        w.batch = low;
        w.key0 = (slot - first_slot(low)) * kBlockN;
        w.q_row = clamp_to(p.cu_seqlens_q[low], 0, p.total_q), w.k_row = clamp_to(p.cu_seqlens_k[low], 0, p.total_k);
        w.first_tile = w.q_row / kBlockM + low;
    } else {
        int sequence_head, n;
        if (schedule.by_section) {
            const int section = index / (schedule.section_heads * schedule.n_blocks), first = section * schedule.section_heads;
            const int i = index - first * schedule.n_blocks, heads = min(schedule.section_heads, p.batch * p.nheads_k - first);
            n = i / heads, sequence_head = first + i - n * heads;
        } else {
            sequence_head = index / schedule.n_blocks, n = index - sequence_head * schedule.n_blocks;
        }
        w.batch = sequence_head / p.nheads_k, w.head_k = sequence_head - w.batch * p.nheads_k;
        w.key0 = n * kBlockN;
        w.q_row = w.k_row = w.first_tile = 0;
    }
    const Sequence s = sequence_of(p, w.batch);
    w.seqlen_q = s.seqlen_q, w.seqlen_k = s.seqlen_k, w.shift = s.shift;
    const VisibleBand band = visible_band(p, s);
    w.left = band.left, w.right = band.right;
    const Range tiles = query_tiles_of(band, w.key0, kBlockM, kBlockN);
    w.first_m = w.start_m = tiles.begin, w.end_m = tiles.end;
    if (!schedule.in_order && p.window_right < 0)
        w.start_m += int(int64_t(tiles.end - tiles.begin) * w.key0 / (w.seqlen_k > 0 ? w.seqlen_k : 1));
    // Tiles before this one hold rows that do not see every key of the block.
    const int hidden_rows = min(w.key0 + kBlockN, w.seqlen_k) - 1 - w.right;
    w.mask_end = w.key0 + kBlockN > w.seqlen_k ? w.end_m : hidden_rows > 0 ? (hidden_rows + kBlockM - 1) / kBlockM : 0;
    return w.key0 < w.seqlen_k;
}

// How many query tiles the block walks, over the heads of the group.
FA_HOST_DEVICE int count_tiles(const AttentionParams& p, const BackwardWork& w) { return (w.end_m - w.first_m) * p.group; }

// What the threads of a block have in common: the keys that it takes, two slots in turn. empty: every party is through with it.
struct WorkList {
    BackwardWork work[2];
    uint64_t full[2], empty[2];
    uint64_t asked;  // all query tiles of the work are on their way: time to take the next
};
// Calls visit(work, n) for the n-th keys that the block takes, until there are no more.
template <typename Visit>
__device__ __forceinline__ void for_each_work(const WorkList& list, const Visit& visit) {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        mbarrier_wait(shared_address(&list.full[n & 1]), n >> 1 & 1);
        const BackwardWork& w = list.work[n & 1];
        if (!uniform(w.valid)) return;
        visit(w, n);
    }
}
__device__ __forceinline__ void release_work(const WorkList& list, uint32_t n) { mbarrier_arrive(shared_address(&list.empty[n & 1])); }

// Is every one of the eight values a number?
template <typename T>
__device__ __forceinline__ bool finite_16(const uint4& x) {
    constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7C00u : 0x7F80u;
    bool finite = true;
    for (const uint32_t pair : {x.x, x.y, x.z, x.w})
        finite = finite && (pair & kExponent) != kExponent && (pair >> 16 & kExponent) != kExponent;
    return finite;
}

// Do the boolean mask and the bias leave the pair visible?
__device__ __forceinline__ bool pair_is_visible(const AttentionParams& p, int batch, int head, int query, int key) {
    if (p.bias.data &&
        load_as_float(p.bias.data, batch * p.bias.batch + head * p.bias.head + query * p.bias.row + key, p.bias_dtype) == -INFINITY)
        return false;
    return !p.mask.data || static_cast<const uint8_t*>(p.mask.data)[batch * p.mask.batch + head * p.mask.head + query * p.mask.row + key];
}

// Of the first query tile of head `head`, in QueryTiles.
__device__ __forceinline__ int64_t first_query_tile(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w, int head) {
    return int64_t((p.cu_seqlens_q ? 0 : w.batch) * p.nheads + head) * tiles.tiles + w.first_tile;
}

// One thread: `rows` rows from `row` on, to `tile`, in as many boxes as the map needs, from chunk of columns `first` on.
__device__ __forceinline__ void load_tile(const CUtensorMap& map, int loads, int first, const void* tile, uint32_t rows, uint32_t barrier,
                                          int row, int head, int batch, uint64_t policy) {
#pragma unroll 1
    for (int c = 0; c < loads; ++c)
        tma_load(shared_address(tile) + c * rows * kChunkRowBytes, &map, barrier, (first + c) * kChunkColumns, row, 0, head, batch, policy);
}
// One thread: calls visit(it, row, head, tile) for the block's query tiles in order, it0 the first: their row and head in Q and dout and
// their place in QueryTiles.
template <typename Visit>
__device__ __forceinline__ void for_each_query_tile(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w, uint32_t it0,
                                                    const Visit& visit) {
    uint32_t it = it0;
    const int q_row = w.q_row, first_m = w.first_m, end_m = w.end_m, start_m = w.start_m;  // shared memory is slow while products read it
    for (int head = w.head_k * p.group, end = head + p.group; head < end; ++head) {
        const int64_t first_tile = first_query_tile(p, tiles, w, head);
        for (int m = start_m, left = end_m - first_m; left > 0; --left, m = next_tile(m, first_m, end_m), ++it)
            visit(it, q_row + m * tiles.block_m, head, first_tile + m);
    }
}
// One of them to its slot: a tile of Q or dout with its lse or delta.
template <typename T, int kStages, int kCount, int kBlockM>
__device__ __forceinline__ void load_query_tile(const CUtensorMap& map, int loads, T (&tiles)[kStages][kCount], const float* rows,
                                                float (&statistics)[kStages][kBlockM], uint64_t (&full)[kStages],
                                                uint64_t (&empty)[kStages], uint32_t it, int row, int head, int batch, int64_t tile) {
    const uint32_t slot = it % kStages, barrier = shared_address(&full[slot]);
    mbarrier_wait(shared_address(&empty[slot]), it / kStages & 1 ^ 1);
    mbarrier_arrive_expect_tx(barrier, sizeof tiles[0] + sizeof statistics[0]);
    load_tile(map, loads, 0, tiles[slot], kBlockM, barrier, row, head, batch, kEvictLast);
    bulk_load(shared_address(statistics[slot]), rows + tile * kBlockM, sizeof statistics[0], barrier);
}
template <typename T, int kStages, int kCount, int kBlockM>
__device__ __forceinline__ void load_query_tiles(const AttentionParams& p, const BackwardSchedule& schedule, const BackwardWork& w,
                                                 const CUtensorMap& map, int loads, T (&tiles)[kStages][kCount], const float* rows,
                                                 float (&statistics)[kStages][kBlockM], uint64_t (&full)[kStages],
                                                 uint64_t (&empty)[kStages]) {
    const int batch = p.cu_seqlens_q ? 0 : w.batch;
    for_each_query_tile(p, schedule.tiles, w, 0, [&](uint32_t it, int row, int head, int64_t tile) {
        load_query_tile(map, loads, tiles, rows, statistics, full, empty, it, row, head, batch, tile);
    });
}
// ---- what must not leak: P and dS of such rows are 0, but 0 x NaN is NaN. A warpgroup each, all of it ----

// The query tile of a varlen sequence that reaches past its end, into rows of the next one; -1: none.
FA_HOST_DEVICE int ragged_tile(const AttentionParams& p, const BackwardWork& w, int block_m) {
    return p.cu_seqlens_q && w.seqlen_q % block_m ? w.seqlen_q / block_m : -1;
}
// Zeroes those rows of Q or dout. Both main warpgroups may write the same zeros.
template <int kRows, typename T, int kCount>
__device__ __forceinline__ void zero_rows_past_end(const BackwardWork& w, T (&tile)[kCount], int wg) {
#pragma unroll 1
    for (int i = opaque(int(threadIdx.x % 128)); i < kCount / 8; i += 128)
        if (i / 8 % kRows >= w.seqlen_q % kRows) reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    bar_sync(opaque(int(threadIdx.x)) / 128, 128);  // main_warpgroup_sync, from no register of the loop around
}

// Of the 64 keys from row0 on in a tile of K or V, those that no query of the sequence sees: past its end, cut off by causal or a window,
// hidden by a mask or a bias in every row. Past the end of a dense tensor the copy engine wrote zeros.
template <bool kGeneral, int kBlockN, typename T, int kCount>
__device__ __forceinline__ void zero_hidden_keys(const AttentionParams& p, const BackwardWork& w, T (&tile)[kCount], int row0, int wg) {
    constexpr int kPieces = kCount / kBlockN / 8;  // of eight columns
    const int begin = clamp_to(w.left, 0, w.seqlen_k), end = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
    const bool outside = w.key0 < begin || (w.key0 + kBlockN > end && (p.cu_seqlens_k || end < w.seqlen_k));
    const bool may_hide = kGeneral && (p.bias.data || p.mask.data);
    if (!outside && !may_hide) return;
    // Two neighbouring threads share a row.
    const int t = opaque(int(threadIdx.x % 128)), row = row0 + t / 2, key = w.key0 + row;
    uint4* pieces = reinterpret_cast<uint4*>(tile);
    bool hidden = key < begin || key >= end;
    if constexpr (kGeneral) {
        const uint32_t pair = 3u << t % 32 / 2 * 2;
        bool finite = true;
        if (may_hide && !hidden)
            for (int i = t % 2; i < kPieces; i += 2) finite = finite && finite_16<T>(pieces[swizzled_offset(kBlockN, row, i) / 16]);
        if (!__all_sync(pair, finite)) {  // only then it matters, and looking through the whole column is slow
            bool seen = false;
            for (int i = t % 2; i < w.seqlen_q && !seen; i += 2)
                for (int head = w.head_k * p.group; head < (w.head_k + 1) * p.group && !seen; ++head)
                    seen = key >= i + w.left && key <= i + w.right && pair_is_visible(p, w.batch, head, i, key);
            hidden = !__any_sync(pair, seen);
        }
    }
    if (hidden)
        for (int i = t % 2; i < kPieces; i += 2) pieces[swizzled_offset(kBlockN, row, i) / 16] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    __syncwarp();
    bar_sync(opaque(int(threadIdx.x)) / 128, 128);  // main_warpgroup_sync, from no register of the loop around
}

// ---- fragments of the transposed S: element i is key + 8 (i / 2 % 2), query + 8 (i / 4) + i % 2 ----

// Hides the pairs beyond the right edge, and all pairs of keys past the end. `key` and `query` are those of element 0.
template <int kCount>
__device__ __forceinline__ void mask_fragment(float (&S)[kCount], const BackwardWork& w, int key, int query) {
    const int first0 = key >= w.seqlen_k ? 2 * kCount : key - w.right - query;
    const int first1 = key + 8 >= w.seqlen_k ? 2 * kCount : key + 8 - w.right - query;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 < (i / 2 % 2 ? first1 : first0)) S[i] = -INFINITY;
}

// lse or delta of queries 16 i + 2 quad, + 1, + 8, + 9.
__device__ __forceinline__ float4 statistic(const float* statistics, int quad, int i) {
    return load_shared_16(shared_address(statistics) + quad * 16 + i * 64);
}

// S becomes P = 2^(c S - lse), packed as A operand. The first `kAhead` of lse have been read before.
template <typename T, int kCount, int kAhead>
__device__ __forceinline__ void probabilities(const float (&S)[kCount], uint32_t (&P)[kCount / 2], float c, const float4 (&ahead)[kAhead],
                                              const float* lse_of, int quad) {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
        const float4 lse = i < kAhead ? ahead[i] : statistic(lse_of, quad, i);
#pragma unroll
        for (int x = 0; x < 4; ++x)
            P[4 * i + x] = pack_16<T>(exp2_approx(fmaf(S[8 * i + 2 * x], c, x < 2 ? -lse.x : -lse.z)),
                                      exp2_approx(fmaf(S[8 * i + 2 * x + 1], c, x < 2 ? -lse.y : -lse.w)));
    }
}

// dS = P (dP - delta) of queries 16 i .. 16 i + 15, packed as A operand.
template <typename T>
__device__ __forceinline__ void score_gradients(uint32_t (&dS)[4], const uint32_t* P, const float* dP, const float4& delta) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const float2 p = unpack_16<T>(P[x]);
        dS[x] = pack_16<T>(p.x * (dP[2 * x] - (x < 2 ? delta.x : delta.z)), p.y * (dP[2 * x + 1] - (x < 2 ? delta.y : delta.w)));
    }
}

// Where a lane's stmatrix puts queries 16 i .. 16 i + 15 of row `row` of a tile of kRows keys.
template <int kRows>
__device__ __forceinline__ uint32_t matrix_offset(int row, int lane, int i) {
    return i / 4 * kRows * kChunkRowBytes + row * kChunkRowBytes + ((2 * (i % 4) + lane / 16 ^ row % 8) << 4);
}

// d, of keys `key` and key + 8, times factor -> rows of dK or dV. The quad transposes its pairs, so that every lane owns 16 contiguous
// bytes, column group 4 x + quad.
template <typename T, int kCount>
__device__ __forceinline__ void store_gradient(const float (&d)[kCount], const TensorView& view, int64_t offset, int columns, float factor,
                                               bool accumulate, int key, int seqlen_k) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        T* row = static_cast<T*>(view.data) + offset + (key + 8 * r) * view.row;
#pragma unroll
        for (int x = 0; x < kCount / 16; ++x) {
            const int column = 8 * (4 * x + quad);
            const bool inside = key + 8 * r < seqlen_k && column < columns;
            uint32_t pairs[4] = {};
            if (accumulate) {
                if (inside) reinterpret_cast<uint4&>(pairs) = *reinterpret_cast<const uint4*>(row + column);
                transpose_quad(pairs, quad);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* pair = d + 4 * (4 * x + j) + 2 * r;
                float low = pair[0] * factor, high = pair[1] * factor;
                if (accumulate) {
                    const float2 old = unpack_16<T>(pairs[j]);
                    low += old.x, high += old.y;
                }
                pairs[j] = pack_16<T>(low, high);
            }
            transpose_quad(pairs, quad);
            if (inside) *reinterpret_cast<uint4*>(row + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}
// Zeros to the block's rows of dK or dV, which no query sees: both main warpgroups.
template <typename T, int kBlockN>
__device__ __forceinline__ void store_zeros(const TensorView& view, int columns, const BackwardParams& b, const BackwardWork& w) {
    if (b.accumulate) return;
    const int64_t batch = b.forward.cu_seqlens_k ? 0 : w.batch * view.batch;
    T* rows = static_cast<T*>(view.data) + batch + int64_t(w.k_row + w.key0) * view.row + w.head_k * view.head;
    const int pieces = columns / 8, count = min(kBlockN, w.seqlen_k - w.key0) * pieces;
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < count; i += 256)
        *reinterpret_cast<uint4*>(rows + i / pieces * view.row + i % pieces * 8) = make_uint4(0, 0, 0, 0);
}
template <typename T, int kCount>
__device__ __forceinline__ void store_dk(const float (&dk)[kCount], const BackwardParams& b, const BackwardWork& w, int key) {
    const int64_t offset = (b.forward.cu_seqlens_k ? 0 : w.batch * b.dk.batch) + w.k_row * b.dk.row + w.head_k * b.dk.head;
    store_gradient<T>(dk, b.dk, offset, b.forward.headdim, b.forward.scale, b.accumulate, key, w.seqlen_k);
}
template <typename T, bool kGeneral, int kCount>
__device__ __forceinline__ void store_dv(const float (&dv)[kCount], const BackwardParams& b, const BackwardWork& w, int key) {
    const int64_t offset = (b.forward.cu_seqlens_k ? 0 : w.batch * b.dv.batch) + w.k_row * b.dv.row + w.head_k * b.dv.head;
    const float factor = kGeneral && b.forward.dropout_threshold ? b.forward.dropout_scale : 1.0f;
    store_gradient<T>(dv, b.dv, offset, b.forward.headdim_v, factor, b.accumulate, key, w.seqlen_k);
}

// ---- host: the kernel before, `kernel` of plan kId, the kernel after ----

using BackwardKernelPointer = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap, BackwardParams, BackwardSchedule);

template <typename T, BackwardPlanId kId>
cudaError_t launch_backward_block(BackwardKernelPointer function, int shared_bytes, const BackwardParams& b, int device,
                                  int multiprocessors, cudaStream_t stream) {
    constexpr BackwardPlan kPlan = backward_plan(kId);
    const AttentionParams& p = b.forward;
    const bool varlen = p.cu_seqlens_q;

    BackwardSchedule schedule{};
    schedule.tiles = query_tiles(b, kPlan);
    place_query_tiles(&schedule.tiles, align_up(p.workspace, 128));
    schedule.n_blocks = (p.seqlen_k + kPlan.block_n - 1) / kPlan.block_n;
    schedule.section_heads = int(backward_section_heads(p));
    schedule.in_order = b.deterministic;
    schedule.by_section = p.window_right >= 0 || schedule.in_order;
    schedule.blocks = int(backward_blocks(p, kPlan));

    CUtensorMap map_q, map_k, map_v, map_dout;
    const auto encode = [&](const char* name, const TensorView& x, int columns, int64_t rows, int heads, int box_rows, int padded,
                            CUtensorMap* map, int* loads, bool by_chunk = false) {
        return encode_tiles({name, x.data, std::is_same_v<T, __half>, columns, rows, heads, varlen ? 1 : p.batch, 2 * x.row, 2 * x.head,
                             2 * x.batch, box_rows, padded, by_chunk},
                            map, loads);
    };
    const int64_t rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
    if (cudaError_t error = encode("q", p.q, p.headdim, rows_q, p.nheads, kPlan.block_m, kPlan.columns(), &map_q, &schedule.q_loads))
        return error;
    if (cudaError_t error =
            encode("k", p.k, p.headdim, rows_k, p.nheads_k, kPlan.block_n, kPlan.columns(), &map_k, &schedule.k_loads, kPlan.blocks() > 1))
        return error;
    if (cudaError_t error = encode("v", p.v, p.headdim_v, rows_k, p.nheads_k, kPlan.block_n, kPlan.columns_v(), &map_v, &schedule.v_loads))
        return error;
    if (cudaError_t error =
            encode("dout", b.dout, p.headdim_v, rows_q, p.nheads, kPlan.block_m, kPlan.columns_v(), &map_dout, &schedule.dout_loads))
        return error;

    const void* kernel = reinterpret_cast<const void*>(function);
    static std::atomic<uint64_t> opted_in{0};  // devices on which this kernel may use its shared memory: asking again would be harmless
    if (!(opted_in.load(std::memory_order_relaxed) >> device & 1)) {
        if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
            return cudaGetLastError(), error;
        opted_in.fetch_or(uint64_t(1) << device, std::memory_order_relaxed);
    }
    int grid = schedule.blocks * kPlan.blocks();
    if (kPlan.blocks() == 1 && grid > multiprocessors) grid = multiprocessors;  // they take the rest in turn
    if (cudaError_t error = backward_rows_before(b, schedule.tiles, stream)) return error;
    void* arguments[] = {&map_q, &map_k, &map_v, &map_dout, const_cast<BackwardParams*>(&b), &schedule};
    if (cudaError_t error = cudaLaunchKernel(kernel, dim3(unsigned(grid)), dim3(512), arguments, shared_bytes, stream))
        return cudaGetLastError(), error;
    return backward_rows_after(b, schedule.tiles, stream);
}

}  // namespace fa
