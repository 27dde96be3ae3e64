// rmsnorm.cu: out = x / sqrt(mean(x^2) + eps) * weight, with the residual added to x first. One block a row, which waits in
// registers for its sum; of a very long one the rest is read again. Bound by memory; by latency when there are few rows.
#include "device/ptx.cuh"
#include "ops/elements.cuh"
#include "ops/kernels.h"

namespace fa {
namespace {

constexpr int kMaxThreads = 512, kHeld = 4;  // steps of a row that stay in registers

// kFours: every row starts at a multiple of four elements and has a multiple of four of them.
template <bool kFours>
__global__ void __launch_bounds__(kMaxThreads, 2) rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
    __shared__ float sums[kMaxThreads / 32];
    launch_dependents();
    grid_dependency_wait();
    const int64_t row = blockIdx.x, x_row = row * p.x.row, residual_row = row * p.residual.row, out_row = row * p.out.row;
    constexpr int kStep = kFours ? 4 : 1;
    const int step = kStep * blockDim.x, first = kStep * threadIdx.x;

    const auto load = [&](int d) {
        float4 x;
        if constexpr (kFours) x = load_4(p.x.data, x_row + d, p.dtype);
        else x = make_float4(load_element(p.x.data, x_row + d, p.dtype), 0, 0, 0);
        return x;
    };
    const auto add_residual = [&](int d, float4 x) {
        if constexpr (kFours) {
            const float4 r = load_4(p.residual.data, residual_row + d, p.residual_dtype);
            x = make_float4(round_to(x.x + r.x, p.dtype), round_to(x.y + r.y, p.dtype), round_to(x.z + r.z, p.dtype),
                            round_to(x.w + r.w, p.dtype));
            store_4(p.x.data, x_row + d, p.dtype, x);
        } else {
            x.x = round_to(x.x + load_element(p.residual.data, residual_row + d, p.residual_dtype), p.dtype);
            store_element(p.x.data, x_row + d, p.dtype, x.x);
        }
        return x;
    };
    float4 held[kHeld];
    float sum = 0.0f;
    const auto meet = [&](int d) {
        float4 x = load(d);
        if (p.residual.data) x = add_residual(d, x);
        sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
        return x;
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (const int d = first + i * step; d < p.dim) held[i] = meet(d);
    for (int d = first + kHeld * step; d < p.dim; d += step) meet(d);

    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
    const float scale = 1.0f / sqrtf(total / p.dim + p.eps);

    const auto write = [&](int d, float4 x) {
        if constexpr (kFours) {
            const float4 w = load_4(p.weight, d, p.weight_dtype);
            store_4(p.out.data, out_row + d, p.out_dtype,
                    make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w));
        } else {
            store_element(p.out.data, out_row + d, p.out_dtype, x.x * scale * load_element(p.weight, d, p.weight_dtype));
        }
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (const int d = first + i * step; d < p.dim) write(d, held[i]);
    for (int d = first + kHeld * step; d < p.dim; d += step) write(d, load(d));  // each thread meets its own numbers again
}

}  // namespace

int64_t rms_norm_blocks(const RmsNormParams& p) { return p.rows; }

cudaError_t rms_norm(const RmsNormParams& p, cudaStream_t stream) {
    const bool fours = p.dim % 4 == 0 && by_fours(p.x.data, p.x.row, p.dtype) && by_fours(p.out.data, p.out.row, p.out_dtype) &&
                       by_fours(p.weight, 0, p.weight_dtype) && by_fours(p.residual.data, p.residual.row, p.residual_dtype);
    // Few rows: as many threads as there is work for. Many: each thread with a handful of loads on their way.
    const int64_t steps = fours ? p.dim / 4 : p.dim, each = p.rows > 256 ? kHeld : 1;
    const int64_t wanted = ((steps + each - 1) / each + 31) / 32 * 32;
    return launch_kernel(fours ? rms_norm_kernel<true> : rms_norm_kernel<false>, unsigned(p.rows),
                         unsigned(wanted < kMaxThreads ? wanted : kMaxThreads), 0, stream, p, p.programmatic);
}

}  // namespace fa
