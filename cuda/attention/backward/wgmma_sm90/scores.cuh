// wgmma_sm90/scores.cuh: the options of a score in the Hopper backward, on a thread's fragment of the transposed S (layout:
// wgmma_sm90/fragments.cuh). The arithmetic is that of transform_score in mask.h.
#pragma once

#include "attention/backward/wgmma_sm90/dropout.cuh"
#include "attention/backward/wgmma_sm90/fragments.cuh"
#include "attention/common/general_scores.cuh"
#include "common/constants.h"

namespace fa {

// Draws the dropout bits for a warpgroup's 64 keys and the tile's queries, in the layout of kept_bits.h.
template <int kQueries>
__device__ __forceinline__ void draw_dropout(const AttentionParams& p, const BackwardWork& w, uint8_t (*keep)[kQueries], int key0,
                                             int query0, int head) {
    const DropoutOrigin o = dropout_origin(p, w.batch);
    const DropoutTile tile = {o.row + uint32_t(query0), o.head + uint32_t(head), o.sequence, o.calls + dropout_call(uint32_t(key0))};
    draw_kept<kQueries, false>(p, tile, 0, reinterpret_cast<uint16_t*>(keep));
}

// Turns S = q k^T into P after dropout, and into the factor of dP - delta in dS: P before dropout times d score / d (scaled product). Both
// are packed as A operands and handed to take(i, factor, P), sixteen queries at a time. `large`: the bases of the tile's large rows.
// `keep`: the warpgroup's bits from draw_dropout. key0: the warpgroup's first key.
template <typename T, int kBlockM, typename Take>
__device__ __forceinline__ void general_probabilities(const AttentionParams& p, const BackwardWork& w, const float (&S)[kBlockM / 2],
                                                      const float* statistics, const float2* large, const uint8_t (*keep)[kBlockM],
                                                      int key0, int query0, int head, const Take& take) {
    const int lane = opaque(int(threadIdx.x % 32)), warp = threadIdx.x % 128 / 32, quad = lane % 4, g = lane / 4;
    const int key = key0 + warp * 16 + g;
    const float inverse_cap = p.softcap != 0 ? 1.0f / p.softcap : 0.0f;
    const float alibi = p.alibi_slopes ? p.alibi_slopes[w.batch * p.alibi_batch + head] : 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
        float value[8], slope[8];
        const int query = query0 + 16 * i + 2 * quad;  // of element 0
        const auto query_of = [&](int e) { return query + e / 4 * 8 + e % 2; };
        const auto key_of = [&](int e) { return key + e / 2 % 2 * 8; };
#pragma unroll
        for (int e = 0; e < 8; ++e) value[e] = __fmul_rn(S[8 * i + e], p.scale), slope[e] = 1.0f;
        if (p.softcap != 0) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float t = tanh_fast(value[e] * inverse_cap);
                value[e] = p.softcap * t, slope[e] = 1.0f - t * t;
            }
        }
        if (p.alibi_slopes) {
#pragma unroll
            for (int e = 0; e < 8; ++e) value[e] -= alibi * fabsf(float(query_of(e) + w.shift - key_of(e)));
        }
        const auto inside = [&](int e) { return query_of(e) < w.seqlen_q && key_of(e) < w.seqlen_k; };
        if (p.bias.data) {
            const int64_t base = w.batch * p.bias.batch + head * p.bias.head;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (inside(e)) {
                    const float bias = load_as_float(p.bias.data, base + query_of(e) * p.bias.row + key_of(e), p.bias_dtype);
                    value[e] = bias == -INFINITY ? bias : value[e] + bias;  // hidden, even where the product is NaN
                }
        }
        if (p.mask.data) {
            const uint8_t* attend = static_cast<const uint8_t*>(p.mask.data) + w.batch * p.mask.batch + head * p.mask.head;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (inside(e) && !attend[query_of(e) * p.mask.row + key_of(e)]) value[e] = -INFINITY;
        }
        const float4 lse = statistic(statistics, quad, i);
        for_each_large(lse, large, 16 * i + 4 * quad, [&](int e, float2 base) { value[e] = large_score(value[e], base); });
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int distance = key_of(e) - query_of(e);
            if (key_of(e) >= w.seqlen_k || distance > w.right || distance < w.left) value[e] = -INFINITY;
            const float own = e < 4 ? (e % 2 ? lse.y : lse.x) : (e % 2 ? lse.w : lse.z);
            value[e] = exp2_approx(fmaf(value[e], kLog2e, -own));
        }
        uint32_t factor[4], P[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            factor[x] = pack_16<T>(value[2 * x] * slope[2 * x], value[2 * x + 1] * slope[2 * x + 1]);
            if (p.dropout_threshold)
                drop_pair(reinterpret_cast<const uint16_t*>(keep), 16 * i + x / 2 * 8 + 2 * quad, 16 * warp + x % 2 * 8 + g, value[2 * x],
                          value[2 * x + 1]);
            P[x] = pack_16<T>(value[2 * x], value[2 * x + 1]);
        }
        take(i, factor, P);
    }
}

// dP, the gradient after dropout, becomes the gradient of the probabilities before dropout.
template <int kBlockM>
__device__ __forceinline__ void drop_gradients(const uint8_t (*keep)[kBlockM], float scale, float (&dP)[kBlockM / 2]) {
    const int lane = opaque(int(threadIdx.x % 32)), warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 2) {
        dP[i] *= scale, dP[i + 1] *= scale;
        drop_pair(reinterpret_cast<const uint16_t*>(keep), i / 4 * 8 + lane % 4 * 2, 16 * warp + i / 2 % 2 * 8 + lane / 4, dP[i],
                  dP[i + 1]);
    }
}

}  // namespace fa
