// 26_cuda_merge.cu: the second kernel of decode. It merges what blocks have left over pieces of the keys: out of each piece, already
// divided by its own sum, and its lse. The slow lines have a thread for each number of the output, which reads every lse twice. The
// exercise and its judge are in 26_cuda_merge.py.
#include <math_constants.h>

#include "cuda_tools.cuh"

constexpr int kDim = 128;

__device__ __forceinline__ float warp_max(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// outs (pieces, rows, kDim), lses (pieces, rows) -> out (rows, kDim), lse (rows). Pieces <= 32. A piece without keys has lse = -inf, and
// its out was never written. A row without any has out = 0 and lse = -inf.
__global__ void merge(const float* outs, const float* lses, float* out, float* lse, int pieces, int rows) {
#ifdef SLOW
    const int row = blockIdx.x, d = threadIdx.x;
    float top = -CUDART_INF_F, sum = 0, total = 0;
    for (int p = 0; p < pieces; ++p) top = fmaxf(top, lses[p * rows + row]);
    for (int p = 0; p < pieces; ++p) {
        const float one = lses[p * rows + row];
        if (one == -CUDART_INF_F) continue;
        sum += expf(one - top), total += expf(one - top) * outs[((size_t)p * rows + row) * kDim + d];
    }
    out[(size_t)row * kDim + d] = sum > 0 ? total / sum : 0;
    if (d == 0) lse[row] = sum > 0 ? top + logf(sum) : -CUDART_INF_F;
#else
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;  // a warp for each row: keep these two lines
    if (row >= rows) return;
    (void)lane, (void)outs, (void)lses, (void)out, (void)lse, (void)pieces, (void)warp_max, (void)warp_sum;  // yours: kNotWritten
#endif
}

static void launch(const Arguments& a) {
    const int pieces = a.sizes[0], rows = a.sizes[1];
#ifdef SLOW
    const int blocks = rows;
#else
    const int blocks = (rows + 3) / 4;
#endif
    merge<<<blocks, 128>>>((const float*)a.in[0], (const float*)a.in[1], (float*)a.out[0], (float*)a.out[1], pieces, rows);
}
