// round_x.cu: normalises x, rounds it to the compute dtype and pads its rows to whole tiles, for products that copy x to shared memory
// unchanged. Bound by latency: a block writes a piece of one row, and reads the whole row if it needs the norm.
#include "device/launch.h"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/w4/common/product.h"
#include "transformer/w4/round_x.h"

namespace fa {
namespace {

constexpr int kThreads = 512, kKept = 2;  // a thread writes kKept groups of 4 elements

struct Round {
    W4LinearParams p;
    void* to;
    int32_t quads, pieces;  // groups of 4 columns per row; blocks per row
    bool fours;             // load_4 can read x and the norm's weight
};

__global__ void __launch_bounds__(kThreads, 1) round_x_kernel(const __grid_constant__ Round round) {
    __shared__ float sums[kThreads / 32];
    const W4LinearParams& p = round.p;
    const int64_t row = blockIdx.x / round.pieces;
    const int first = blockIdx.x % round.pieces * (kThreads * kKept) + threadIdx.x;
    launch_dependents();

    const auto load_quad = [&](const void* data, int64_t begin, DType dtype, int quad) {
        return load_up_to_4(data, begin, dtype, 4 * quad, p.in_features, round.fours);
    };
    float4 x[kKept], g[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i)
        if (p.norm_weight) g[i] = load_quad(p.norm_weight, 0, p.norm_dtype, first + i * kThreads);
    grid_dependency_wait();
#pragma unroll
    for (int i = 0; i < kKept; ++i) x[i] = load_quad(p.x.data, row * p.x.row, p.dtype, first + i * kThreads);

    if (p.norm_weight) {
        float sum = 0.0f;
#pragma unroll 4
        for (int quad = threadIdx.x; quad < round.quads; quad += kThreads) {
            const float4 y = load_quad(p.x.data, row * p.x.row, p.dtype, quad);
            sum += sum_of_squares(y);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
        for (int warp = 0; warp < kThreads / 32; ++warp) sum += sums[warp];
        const float scale = rsqrtf(sum / float(p.in_features) + p.eps);
#pragma unroll
        for (int i = 0; i < kKept; ++i) x[i] = norm_4(x[i], scale, g[i]);
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i)
        if (const int quad = first + i * kThreads; quad < round.quads)
            store_4(round.to, 4 * (row * round.quads + quad), p.compute_dtype, x[i]);
}

}  // namespace

cudaError_t round_x(const W4LinearParams& p, void* to, cudaStream_t stream) {
    Round round{p, to, int32_t(rounded_columns(p.in_features) / 4), 0, false};
    round.pieces = (round.quads + kThreads * kKept - 1) / (kThreads * kKept);
    round.fours = w4::reads_by_fours(p);
    return launch_kernel(round_x_kernel, unsigned(p.rows) * unsigned(round.pieces), kThreads, 0, stream, round, p.programmatic);
}

}  // namespace fa
