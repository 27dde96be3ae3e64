// score_fragment.cuh: one thread's fragment of a tile of S, from scores to P, for the wgmma kernels. With lane = 4 g + quad, element i is
// row g + 8 (i / 2 % 2) of the warp's sixteen rows and key 8 (i / 4) + 2 quad + i % 2 of the tile. A thread has elements of two rows, so
// maxima and sums are arrays of two.
#pragma once

#include <cmath>

#include "common/constants.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {

// Sets keys above `last0` (row g) and `last1` (row g + 8) to -inf. Keys count from the thread's element 0.
template <int kCount>
__device__ __forceinline__ void mask_right(float (&S)[kCount], int last0, int last1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 > (i / 2 % 2 ? last1 : last0)) S[i] = -INFINITY;
}
// The same for keys below `first0` and `first1`.
template <int kCount>
__device__ __forceinline__ void mask_left(float (&S)[kCount], int first0, int first1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 < (i / 2 % 2 ? first1 : first0)) S[i] = -INFINITY;
}

// The maximum of each row over the tile; all four lanes of the quad get it.
template <int kCount>
__device__ __forceinline__ void tile_maximum(const float (&S)[kCount], float (&tile_max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float a = S[2 * r], b = S[2 * r + 1];  // two independent chains
#pragma unroll
        for (int i = 4; i < kCount; i += 4) a = fmaxf(a, S[i + 2 * r]), b = fmaxf(b, S[i + 2 * r + 1]);
        tile_max[r] = quad_max(fmaxf(a, b));
    }
}

// How a score becomes an exponent of 2: P = 2^((scale S - row_max) unit). Raw products have log2 e folded into `scale`, so this is one
// multiply-add. Scores in natural units have it in `unit`: a mask written as a bias of -FLT_MAX is a finite score, but would overflow if
// multiplied by log2 e.
struct Exponent {
    float scale, unit;
};
__device__ __forceinline__ Exponent exponent_of_products(float scale_log2) { return {scale_log2, 1.0f}; }
__device__ __forceinline__ Exponent exponent_of_natural() { return {1.0f, kLog2e}; }

// The lazy maximum: row_max follows tile_max only when some row of the warp has risen by more than `rise`. Then row_sum is rescaled,
// o_scale is the factor for O, and the result is true. Otherwise no exponential of the tile exceeds 2^(rise unit).
__device__ __forceinline__ bool raise_maximum(const float (&tile_max)[2], float rise, float (&row_max)[2], float (&row_sum)[2],
                                              float (&o_scale)[2], float unit = 1.0f) {
    const bool moved = __any_sync(~0u, tile_max[0] - row_max[0] > rise || tile_max[1] - row_max[1] > rise);
    if (moved) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = fmaxf(row_max[r], tile_max[r]);
            o_scale[r] = raised == -INFINITY ? 1.0f : exp2_approx((row_max[r] - raised) * unit);
            row_max[r] = raised, row_sum[r] *= o_scale[r];
        }
    }
    return moved;
}

// S becomes P; `sum` is the thread's share of the tile's row sums. A row that has seen no key subtracts 0 instead of -inf.
// The sums take P before it is rounded to 16 bits. Summing the rounded P would give a row that one key decides exactly that key's V, even
// under a speculative maximum, but costs 3 .. 14 %.
template <int kCount>
__device__ __forceinline__ void exponentials(float (&S)[kCount], const Exponent& exponent, const float (&row_max)[2], float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float base = row_max[r] == -INFINITY ? 0.0f : row_max[r];
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4) {
            S[i] = exp2_approx(fmaf(S[i], exponent.scale, -base) * exponent.unit);
            S[i + 1] = exp2_approx(fmaf(S[i + 1], exponent.scale, -base) * exponent.unit);
            a += S[i], b += S[i + 1];
        }
        sum[r] = a + b;
    }
}
template <int kCount>
__device__ __forceinline__ void exponentials(float (&S)[kCount], float scale_log2, const float (&row_max)[2], float (&sum)[2]) {
    exponentials(S, exponent_of_products(scale_log2), row_max, sum);
}

}  // namespace fa
