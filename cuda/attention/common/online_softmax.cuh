// online_softmax.cuh: the running softmax of one row, and the reductions over the threads that share the row.
#pragma once

#include <cmath>

#include "common/constants.h"

namespace fa {

// Maximum or sum over `kWidth` neighbouring lanes (a power of two); each of these lanes gets the result.
template <int kWidth>
__device__ __forceinline__ float reduce_max(float x) {
#pragma unroll
    for (int lane = kWidth / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lane));
    return x;
}
template <int kWidth>
__device__ __forceinline__ float reduce_sum(float x) {
#pragma unroll
    for (int lane = kWidth / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
    return x;
}

// e^x for x <= 0 through the hardware's 2^x: 2 ulp, e^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp_nonpositive(float x) { return exp2f(x * kLog2e); }

// One row as one of its threads sees it: `max` is the maximum of the whole row, `sum` this thread's share of the row's sum.
struct SoftmaxRow {
    float max = -INFINITY;
    float sum = 0;

    // S, this thread's scores of a new tile, becomes P = exp(S - new maximum); returns what earlier sums must be multiplied by.
    template <int kCount, typename Reduce>
    __device__ float update(float (&S)[kCount], const Reduce& reduce_row_max) {
        float new_max = max;
#pragma unroll
        for (int x = 0; x < kCount; ++x) new_max = fmaxf(new_max, S[x]);
        new_max = reduce_row_max(new_max);
        const float base = new_max == -INFINITY ? 0.0f : new_max;  // nothing visible yet: -inf - -inf would be NaN
        const float scale = exp_nonpositive(max - base);
        max = new_max;
        sum *= scale;
#pragma unroll
        for (int x = 0; x < kCount; ++x) sum += S[x] = exp_nonpositive(S[x] - base);
        return scale;
    }
};

}  // namespace fa
