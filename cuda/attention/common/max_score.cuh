// max_score.cuh: how the kernels of the forward pass come to max_score, the greatest score of each head of each sequence. Before a kernel
// runs, max_score.cu sets every number to -inf. Then every warp, or row, raises the number of its head. A maximum does not depend on the
// order, so the result is bitwise the same every time.
#pragma once

#include <cmath>

#include "attention/common/online_softmax.cuh"
#include "attention/common/params.h"

namespace fa {

// *to = max(*to, score) for all threads of the GPU. Floats without a sign bit are ordered like signed integers, those with one the other
// way round, like unsigned ones; each of the two leaves a greater number of the other kind alone. A NaN changes nothing.
__device__ __forceinline__ void raise_to(float* to, float score) {
    if (!(score > -INFINITY)) return;
    if (__float_as_int(score) >= 0) atomicMax(reinterpret_cast<int*>(to), __float_as_int(score));
    else atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(score));
}

// All lanes of a warp: raises max_score of a head to the greatest of their scores, in natural units.
__device__ __forceinline__ void raise_max_score(const AttentionParams& p, int b, int head, float score) {
    score = reduce_max<32>(score);
    if (threadIdx.x % 32 == 0) raise_to(p.max_score + int64_t(b) * p.nheads + head, score + 0.0f);  // one zero, not two
}

}  // namespace fa
