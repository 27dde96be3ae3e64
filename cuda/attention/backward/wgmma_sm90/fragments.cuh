// wgmma_sm90/fragments.cuh: a thread's fragment of the transposed S in the Hopper backward, from scores to dS. Element i is key + 8 (i / 2
// % 2), query + 8 (i / 4) + i % 2.
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/large_rows.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

namespace fa {

// Sets pairs beyond the right edge, and all pairs of keys past the end, to -inf. `key` and `query` belong to element 0.
template <int kCount>
__device__ __forceinline__ void mask_fragment(float (&S)[kCount], const BackwardWork& w, int key, int query) {
    const int first0 = key >= w.seqlen_k ? 2 * kCount : key - w.right - query;
    const int first1 = key + 8 >= w.seqlen_k ? 2 * kCount : key + 8 - w.right - query;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 < (i / 2 % 2 ? first1 : first0)) S[i] = -INFINITY;
}

// lse or delta of queries 16 i + 2 quad + {0, 1, 8, 9}, from shared memory in quad_order.
__device__ __forceinline__ float4 statistic(const float* statistics, int quad, int i) {
    return load_shared_16(shared_address(statistics) + quad * 16 + i * 64);
}

// Applies adjust(element, RowBase) to the large rows among 16 queries. `place` is quad_order of the thread's first query. `element` is one
// of the eight of the fragment.
template <typename Adjust>
__device__ __forceinline__ void for_each_large(const float4& lse, const float2* large, int place, const Adjust& adjust) {
    const float own[4] = {lse.x, lse.y, lse.z, lse.w};
    if (!__any_sync(~0u, is_large_row(lse.x) || is_large_row(lse.y) || is_large_row(lse.z) || is_large_row(lse.w))) return;
#pragma unroll
    for (int x = 0; x < 4; ++x) {  // query 8 (x / 2) + x % 2
        if (!is_large_row(own[x])) continue;
        const float2 base = large[place + x];
#pragma unroll
        for (int key = 0; key < 2; ++key) adjust(x / 2 * 4 + 2 * key + x % 2, base);
    }
    __syncwarp();
}
// Replaces the scores of large rows in S; their bases are at `large`.
template <int kCount>
__device__ __forceinline__ void adjust_products(float (&S)[kCount], const float* lse_of, const float2* large, int quad) {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i)
        for_each_large(statistic(lse_of, quad, i), large, 16 * i + 4 * quad,
                       [&](int e, float2 base) { S[8 * i + e] = large_score(S[8 * i + e], base); });
}

// S becomes P = 2^(scale_log2 S - lse), packed as A operand. The first kAhead statistics of lse are already in `ahead`.
template <typename T, int kCount, int kAhead>
__device__ __forceinline__ void probabilities(const float (&S)[kCount], uint32_t (&P)[kCount / 2], float scale_log2,
                                              const float4 (&ahead)[kAhead], const float* lse_of, int quad) {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
        const float4 lse = i < kAhead ? ahead[i] : statistic(lse_of, quad, i);
#pragma unroll
        for (int x = 0; x < 4; ++x)
            P[4 * i + x] = pack_16<T>(exp2_approx(fmaf(S[8 * i + 2 * x], scale_log2, x < 2 ? -lse.x : -lse.z)),
                                      exp2_approx(fmaf(S[8 * i + 2 * x + 1], scale_log2, x < 2 ? -lse.y : -lse.w)));
    }
}

// dS = P (dP - delta) for queries 16 i .. 16 i + 15, packed as A operand.
template <typename T>
__device__ __forceinline__ void score_gradients(uint32_t (&dS)[4], const uint32_t* P, const float* dP, const float4& delta) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const float2 p = unpack_16<T>(P[x]);
        dS[x] = pack_16<T>(p.x * (dP[2 * x] - (x < 2 ? delta.x : delta.z)), p.y * (dP[2 * x + 1] - (x < 2 ? delta.y : delta.w)));
    }
}

// The byte offset to which a lane's stmatrix writes queries 16 i .. 16 i + 15 of key `row`, in a swizzled tile of kRows keys.
template <int kRows>
__device__ __forceinline__ uint32_t matrix_offset(int row, int lane, int i) {
    return i / 4 * kRows * kChunkRowBytes + row * kChunkRowBytes + ((2 * (i % 4) + lane / 16 ^ row % 8) << 4);
}

}  // namespace fa
