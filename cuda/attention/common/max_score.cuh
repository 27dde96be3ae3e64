// max_score.cuh: how the forward kernels compute max_score, the greatest score of each head of each sequence. Before a kernel runs,
// max_score.cu sets every entry to -inf. Then every warp, or row, raises the entry of its head. A maximum does not depend on the order, so
// the result has the same bits every time.
#pragma once

#include <cmath>

#include "attention/common/online_softmax.cuh"
#include "attention/common/params.h"

namespace fa {

// *to = max(*to, score), atomically for the whole GPU. As integers, floats with a clear sign bit are ordered as signed numbers, and floats
// with a set sign bit backwards as unsigned ones. Each of the two atomics leaves a greater number of the other sign alone. A NaN changes
// nothing.
__device__ __forceinline__ void raise_to(float* to, float score) {
    if (!(score > -INFINITY)) return;
    if (__float_as_int(score) >= 0) atomicMax(reinterpret_cast<int*>(to), __float_as_int(score));
    else atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(score));
}

// Called by all lanes of a warp: raises max_score of a head to the greatest of their scores, in natural units.
__device__ __forceinline__ void raise_max_score(const AttentionParams& p, int b, int head, float score) {
    score = reduce_max<32>(score);
    if (threadIdx.x % 32 == 0) raise_to(p.max_score + int64_t(b) * p.nheads + head, score + 0.0f);  // + 0.0f: -0 becomes +0
}

}  // namespace fa
