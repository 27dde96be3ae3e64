// wgmma_sm90/consume.cuh: the steps of a consumer of wgmma_sm90 on one tile: products, scores, softmax, and zeroing of hidden rows of V.
//
// Code on rare paths reads the work item again and takes the lane through opaque(), so that its operands are not carried through the main
// loop.
#pragma once

#include <type_traits>

#include "attention/common/epilogue.cuh"
#include "attention/common/general_scores.cuh"
#include "attention/common/max_score.cuh"
#include "attention/common/output_fragment.cuh"
#include "attention/common/score_fragment.cuh"
#include "attention/forward/common/consumer.cuh"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "common/constants.h"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/wgmma.cuh"

namespace fa {

// ---- products ----

// S = Q K^T, with Q from registers or from shared memory, depending on the plan.
template <typename T, WgmmaPlanId kId, int kScores, int kQ>
__device__ __forceinline__ void multiply_qk(float (&S)[kScores], const uint32_t (&q_fragment)[kQ], uint64_t desc_q, uint64_t desc_k) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPlan.headdim / 16; ++i) {
        if constexpr (kPlan.q_in_registers) wgmma_rs<T, kBlockN, 0>(S, q_fragment + 4 * i, desc_k + descriptor_k_step(i, kBlockN), i != 0);
        else wgmma_ss<T, kBlockN>(S, desc_q + descriptor_k_step(i, 64), desc_k + descriptor_k_step(i, kBlockN), i != 0);
    }
    wgmma_commit();
}

// O += P V
template <typename T, int kOutputs, int kProbabilities>
__device__ __forceinline__ void multiply_pv(float (&O)[kOutputs], const uint32_t (&P)[kProbabilities], uint64_t desc_v) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProbabilities / 4; ++i) wgmma_rs<T, 2 * kOutputs, 1>(O, P + 4 * i, desc_v + descriptor_row_step(i), 1);
    wgmma_commit();
}

// Computes S of this warp again, with mma.sync: it is rare, and no other warp has to take part. `slab`, `k_tile`: shared addresses.
template <typename T, WgmmaPlanId kId, int kScores, int kQ>
__device__ __forceinline__ void recompute_scores(float (&S)[kScores], const uint32_t (&q_fragment)[kQ], uint32_t slab, uint32_t k_tile,
                                                 const Consumer& me) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n;
    constexpr int kUnroll = kPlan.q_in_registers ? kPlan.headdim / 32 : 1;  // Q's registers cannot be indexed at run time
    const int ln = opaque(me.lane), row = opaque(me.warp) * 16 + ln % 16;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) S[i] = 0.0f;
#pragma unroll(kUnroll)
    for (int kk = 0; kk < kPlan.headdim / 32; ++kk) {
        uint32_t a[2][4], b[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if constexpr (kPlan.q_in_registers) {
#pragma unroll
                for (int x = 0; x < 4; ++x) a[h][x] = q_fragment[4 * (2 * kk + h) + x];
            } else {
                ldmatrix_x4(a[h], slab + swizzled_offset(64, row, 2 * (2 * kk + h) + ln / 16));
            }
        }
#pragma unroll
        for (int i = 0; i < kBlockN / 8; ++i) {
            ldmatrix_x4(b, k_tile + swizzled_offset(kBlockN, 8 * i + ln % 8, 4 * kk + ln / 8));
            float(&d)[4] = reinterpret_cast<float(&)[4]>(S[4 * i]);
            mma<T>(d, a[0], b[0], b[1]);
            mma<T>(d, a[1], b[2], b[3]);
        }
    }
}

// P as the A operand of P V: pairs of neighbouring accumulators, rounded to T.
template <typename T, int kScores>
__device__ __forceinline__ void pack_probabilities(uint32_t (&P)[kScores / 2], const float (&S)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) P[i] = pack_16<T>(S[2 * i], S[2 * i + 1]);
}

// ---- scores ----

// The tiles of an item that a warpgroup must mask: the right edge in tiles >= right_tile, the left edge in tiles < left_tile.
struct MaskedTiles {
    int right_tile, left_tile;
};
template <WgmmaPlanId kId>
__device__ __forceinline__ MaskedTiles masked_tiles(const ForwardWork& w, int wg) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    MaskedTiles tiles;
    // Plans with options find the maximum of masked tiles. So they count the tile of the first row's last key to them, even if all rows see
    // all of it: the row may have seen no key before.
    tiles.right_tile = clamp_to(w.row0 + wg * 64 + w.right + (kPlan.options ? 0 : 1), 0, w.seqlen_k) / kPlan.block_n;
    tiles.left_tile = 0;
    if (kPlan.general || kPlan.options)
        tiles.left_tile = (clamp_to(w.row0 + wg * 64 + 63 + w.left, 0, w.seqlen_k) + kPlan.block_n - 1) / kPlan.block_n;
    return tiles;
}
// Sets the scores of tile n that lie outside the window of their row to -inf.
template <WgmmaPlanId kId, int kScores>
__device__ __forceinline__ void mask_scores(float (&S)[kScores], const ForwardWork& w, const MaskedTiles& masked, int n,
                                            const Consumer& me) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr bool kLeftEdge = kPlan.general || kPlan.options;
    if (n < masked.right_tile && (!kLeftEdge || n >= masked.left_tile)) return;
    const Consumer at = me.rare();
    const int row = w.row0 + at.row(), key = n * kPlan.block_n + 2 * at.quad();
    if (n >= masked.right_tile) mask_right(S, min(row + w.right, w.seqlen_k - 1) - key, min(row + 8 + w.right, w.seqlen_k - 1) - key);
    if (kLeftEdge && n < masked.left_tile) mask_left(S, row + w.left - key, row + 8 + w.left - key);
}

template <WgmmaPlanId kId>
__device__ __forceinline__ FragmentPlace place_of(const ForwardWork& w, int n, const Consumer& me) {
    const Consumer at = me.rare();
    return {w.batch, w.head, w.row0 + at.row(), n * kWgmmaPlan<kId>.block_n + 2 * at.quad(), w.seqlen_q, w.seqlen_k, w.shift};
}

// ---- softmax; the arithmetic is in score_fragment.cuh ----

// Softmax state of this thread's two query rows.
struct RowStatistics {
    float row_max[2];   // of scale S (see Exponent): subtracted in the exponentials
    float row_sum[2];   // this thread's share
    float o_scale[2];   // after a step that returned true: the factor for O
    float greatest[2];  // for max_score, in lazy plans: the row's greatest S
};

// The first tile of an item: S becomes P.
template <WgmmaPlanId kId, int kScores>
__device__ __forceinline__ void softmax_first(float (&S)[kScores], const Exponent& exponent, RowStatistics& rows) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    float tile_max[2], sum[2];
    tile_maximum(S, tile_max);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.row_max[r] = tile_max[r] * exponent.scale, rows.row_sum[r] = 0.0f;
    exponentials(S, exponent, rows.row_max, sum);
    rows.row_sum[0] += sum[0], rows.row_sum[1] += sum[1];
    if (!kPlan.speculative()) rows.greatest[0] = tile_max[0], rows.greatest[1] = tile_max[1];
}

// A later tile, under the lazy maximum: S becomes P. Returns whether O must be multiplied by o_scale.
template <WgmmaPlanId kId, int kScores>
__device__ __forceinline__ bool softmax_lazy(float (&S)[kScores], const Exponent& exponent, RowStatistics& rows) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr float kRise = 8.0f;  // P stays below 2^8: safe in fp16, too
    float tile_max[2], sum[2];
    tile_maximum(S, tile_max);
    if (!kPlan.speculative()) {
#pragma unroll
        for (int r = 0; r < 2; ++r) rows.greatest[r] = fmaxf(rows.greatest[r], tile_max[r]);
    }
    tile_max[0] *= exponent.scale, tile_max[1] *= exponent.scale;
    const float rise = exponent.unit == 1.0f ? kRise : kRise * kLn2;
    const bool moved = raise_maximum(tile_max, rise, rows.row_max, rows.row_sum, rows.o_scale, exponent.unit);
    exponentials(S, exponent, rows.row_max, sum);
    rows.row_sum[0] += sum[0], rows.row_sum[1] += sum[1];
    return moved;
}

// Plans with options: the option that the exponentials of a tile apply themselves. Its operations then hide under those of the
// exponentials' unit.
enum class InExponent { kNothing, kCap, kSlope, kMask };

// Adds the sums of a tile whose exponentials were taken under the current maximum. Returns false when P or its sums come close to overflow
// or are NaN, or when a row has no maximum yet.
template <typename T>
__device__ __forceinline__ bool accept_sums(const float (&sum)[2], RowStatistics& rows) {
    constexpr float kLimit = std::is_same_v<T, __half> ? 0x1p15f : 0x1p60f;  // P fits fp16 (65504); fp32 sums stay far from 2^127
    if (!__all_sync(~0u, sum[0] < kLimit && sum[1] < kLimit && rows.row_max[0] > -INFINITY && rows.row_max[1] > -INFINITY)) return false;
    rows.row_sum[0] += sum[0], rows.row_sum[1] += sum[1];
    return true;
}

// A later tile, under the current maximum. Returns false when accept_sums does: S is then lost and must be computed again.
// `after_exponentials` runs before the test.
template <typename T, WgmmaPlanId kId, int kScores, typename After>
__device__ __forceinline__ bool softmax_speculative(float (&S)[kScores], const Exponent& exponent, RowStatistics& rows,
                                                    const After& after_exponentials) {
    float sum[2];
    exponentials(S, exponent, rows.row_max, sum);
    after_exponentials();
    return accept_sums<T>(sum, rows);
}

// ---- hidden rows of V have P = 0, but 0 x NaN is NaN: they are zeroed in shared memory before the product ----

// Zeroes the rows j of a tile of V for which hidden(j). Several warpgroups may zero the same tile: they write the same zeros.
template <int kBlockN, typename T, int kCount, typename Hidden>
__device__ __forceinline__ void zero_values(T (&tile)[kCount], const Hidden& hidden) {
    uint4* pieces = reinterpret_cast<uint4*>(tile);
    for (int i = opaque(threadIdx.x % 128); i < kCount / 8; i += 128)
        if (hidden(i / 8 % kBlockN)) pieces[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
}
// Zeroes keys that the window hides from all rows of the sequence. Past the end of a dense tensor the copy engine has written zeros, but in
// a varlen call the next sequence follows, and a cache may hold anything.
template <int kBlockN, typename T, int kStages, int kCount>
__device__ __forceinline__ void zero_values_outside(const AttentionParams& p, const ForwardWork& w, int n, T (&tiles)[kStages][kCount],
                                                    const Ring<kStages>& v, int wg) {
    const int begin = clamp_to(w.left, 0, w.seqlen_k), end = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
    const bool hidden_end = (n + 1) * kBlockN > end && (p.cu_seqlens_q || p.cache.entries || end < w.seqlen_k);
    if (!hidden_end && n * kBlockN >= begin) return;
    v.wait_full();
    zero_values<kBlockN>(tiles[v.slot], [&](int j) { return n * kBlockN + j < begin || n * kBlockN + j >= end; });
    bar_sync(kWarpgroup + wg, 128);
}

// General plans: a boolean mask or a bias may hide a key from all rows of the block. Each warp marks the keys of a tile that it sees in
// seen[slot].
template <int kScores>
__device__ __forceinline__ void mark_seen(const float (&S)[kScores], const FragmentPlace& at, uint8_t* seen, const Consumer& me) {
    seen += 2 * me.rare().quad();
#pragma unroll
    for (int i = 0; i < kScores; ++i)
        if (S[i] != -INFINITY && at.row + i / 2 % 2 * 8 < at.seqlen_q) seen[i / 4 * 8 + i % 2] = 1;
}
// Zeroes the keys of a tile of V that no warp has marked, and clears the other slot for the next tile. Called by all consumers.
template <int kBlockN, int kWarpgroups, typename T, int kCount>
__device__ __forceinline__ void zero_values_unseen(T (&tile)[kCount], uint8_t (&seen)[2][kBlockN], int& seen_slot) {
    bar_sync(kConsumers, 128 * kWarpgroups);  // seen[] is complete
    zero_values<kBlockN>(tile, [&](int j) { return !seen[seen_slot][j]; });
    seen_slot ^= 1;
    if (threadIdx.x - 128 < kBlockN) seen[seen_slot][threadIdx.x - 128] = 0;
    bar_sync(kConsumers, 128 * kWarpgroups);
}

// ---- the end of an item ----

template <int kOutputs>
__device__ __forceinline__ void rescale_output(float (&O)[kOutputs], const float (&o_scale)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) O[i] *= o_scale[i / 2 % 2];
}

// Raises max_score to the greatest score of the warp's rows.
template <WgmmaPlanId kId>
__device__ __forceinline__ void raise_max_score(const AttentionParams& p, const ForwardWork& w, const RowStatistics& rows,
                                                const Consumer& me) {
    const float unit = kWgmmaPlan<kId>.general && wgmma_scores_are_natural(p) ? 1.0f : p.scale;
    float score = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (w.row0 + me.row() + 8 * r >= w.seqlen_q) continue;
        score = fmaxf(score, rows.greatest[r] * unit);
    }
    grid_dependency_wait();  // on clear_max_score
    raise_max_score(p, w.batch, w.head, score);
}

// out = O / row_sum and lse, for the thread's two rows.
template <typename T, WgmmaPlanId kId, int kOutputs>
__device__ __forceinline__ void finish_rows(const AttentionParams& p, const ForwardWork& w, const float (&O)[kOutputs],
                                            const RowStatistics& rows, const Consumer& me) {
    const int row0 = w.row0 + me.row();
    const bool varlen = p.cu_seqlens_q;
    const int64_t lse_row = (int64_t(varlen ? 0 : w.batch) * p.nheads + w.head) * (varlen ? p.total_q : p.seqlen_q) + w.q_row;
    T* out = static_cast<T*>(p.out.data) + (varlen ? 0 : w.batch * p.out.batch) + w.q_row * p.out.row + w.head * p.out.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row0 + 8 * r;
        const float row_sum = quad_sum(rows.row_sum[r]);
        const bool natural = kWgmmaPlan<kId>.bias || (kWgmmaPlan<kId>.general && wgmma_scores_are_natural(p));
        const float sink = sink_of(p.sinks, w.head);
        const RowEnd end = natural ? finish_row<ScoreUnit::kNatural>(rows.row_max[r], row_sum, sink)
                                   : finish_row<ScoreUnit::kLog2>(rows.row_max[r], row_sum, sink);
        if (p.lse && me.quad() == 0 && i < w.seqlen_q) p.lse[lse_row + i] = natural ? end.lse : end.lse * kLn2;
        const bool drops = kWgmmaPlan<kId>.dropout || (kWgmmaPlan<kId>.general && p.dropout_threshold);
        const float inverse = drops ? end.inverse * p.dropout_scale : end.inverse;
        store_row(out + i * p.out.row, O, r, inverse, end.empty, i < w.seqlen_q, p.headdim_v, me.quad());
    }
}

}  // namespace fa
