// rmsnorm.cu: out = x / sqrt(mean(x^2) + eps) * weight, with the residual added to x first. Each block has one row. The row stays in
// registers until its sum of squares is known; any rest that does not fit is read twice. Bound by memory; with few rows by latency.
#include "device/launch.h"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

namespace fa {
namespace {

constexpr int kMaxThreads = 512, kHeld = 4;  // kHeld: steps of a thread along its row that stay in registers

// kWidth: elements per load, 1 or 4. 4 requires that every row starts at a multiple of four elements and has a multiple of four elements.
template <int kWidth>
__global__ void __launch_bounds__(kMaxThreads, 2) rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
    __shared__ float sums[kMaxThreads / 32];
    launch_dependents();
    grid_dependency_wait();
    const int64_t row = blockIdx.x, x_row = row * p.x.row, residual_row = row * p.residual.row, out_row = row * p.out.row;
    const int step = kWidth * blockDim.x, first = kWidth * threadIdx.x;

    const auto load = [&](int d) {
        float4 x;
        if constexpr (kWidth == 4) x = load_4(p.x.data, x_row + d, p.dtype);
        else x = make_float4(load_element(p.x.data, x_row + d, p.dtype), 0, 0, 0);
        return x;
    };
    const auto add_residual = [&](int d, float4 x) {
        if constexpr (kWidth == 4) {
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
        if constexpr (kWidth == 4) {
            const float4 w = load_4(p.weight, d, p.weight_dtype);
            store_4(p.out.data, out_row + d, p.out_dtype, norm_4(x, scale, w));
        } else {
            store_element(p.out.data, out_row + d, p.out_dtype, x.x * scale * load_element(p.weight, d, p.weight_dtype));
        }
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (const int d = first + i * step; d < p.dim) write(d, held[i]);
    for (int d = first + kHeld * step; d < p.dim; d += step) write(d, load(d));  // each thread reads what it has written itself
}

}  // namespace

int64_t rms_norm_blocks(const RmsNormParams& p) { return p.rows; }

cudaError_t rms_norm(const RmsNormParams& p, const DeviceInfo&, cudaStream_t stream) {
    const bool fours = p.dim % 4 == 0 && by_fours(p.x.data, p.x.row, p.dtype) && by_fours(p.out.data, p.out.row, p.out_dtype) &&
                       by_fours(p.weight, 0, p.weight_dtype) && by_fours(p.residual.data, p.residual.row, p.residual_dtype);
    // With few rows a thread does one load, so that a row has many threads; with many rows kHeld loads, which are in flight together.
    const int64_t steps = fours ? p.dim / 4 : p.dim, each = p.rows > 256 ? kHeld : 1;
    const int64_t wanted = ((steps + each - 1) / each + 31) / 32 * 32;
    return launch_kernel(fours ? rms_norm_kernel<4> : rms_norm_kernel<1>, unsigned(p.rows),
                         unsigned(wanted < kMaxThreads ? wanted : kMaxThreads), 0, stream, p, p.programmatic);
}

}  // namespace fa
