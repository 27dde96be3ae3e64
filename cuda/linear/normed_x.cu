// normed_x.cu: x normed and rounded to what products are made in, for a kernel that has x brought by the copy engine. One block a row,
// eight neighbours a thread. Bound by memory.
#include "device/ptx.cuh"
#include "linear/normed_x.h"
#include "ops/elements.cuh"

namespace fa {
namespace {

constexpr int kMaxThreads = 256, kHeld = 2;  // pieces of eight that stay in a thread's registers while the row's sum is made

struct NormedX {
    W4LinearParams p;
    void* to;
    bool eights;  // x and the norm's weight can be read by eights
};

__global__ void __launch_bounds__(kMaxThreads) normed_x_kernel(const __grid_constant__ NormedX normed) {
    __shared__ float sums[kMaxThreads / 32];
    const W4LinearParams& p = normed.p;
    launch_dependents();
    grid_dependency_wait();
    const int64_t row = blockIdx.x;
    const int first = 8 * threadIdx.x, step = 8 * blockDim.x;

    const auto load_8 = [&](const void* data, int64_t at, DType dtype, int k, float(&x)[8]) {
        if (normed.eights && dtype != DType::kFloat32) {
            const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(static_cast<const __half*>(data) + at + k));
            const auto widen = [&](uint2 half) { return dtype == DType::kFloat16 ? widen_4<__half>(half) : widen_4<__nv_bfloat16>(half); };
            reinterpret_cast<float4&>(x[0]) = widen(make_uint2(bits.x, bits.y)),
            reinterpret_cast<float4&>(x[4]) = widen(make_uint2(bits.z, bits.w));
        } else if (normed.eights) {
            reinterpret_cast<float4&>(x[0]) = load_4(data, at + k, dtype),
            reinterpret_cast<float4&>(x[4]) = load_4(data, at + k + 4, dtype);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = k + i < p.in_features ? load_element(data, at + k + i, dtype) : 0.0f;
        }
    };
    const auto load_x = [&](int k, float(&x)[8]) { load_8(p.x.data, row * p.x.row, p.dtype, k, x); };

    alignas(16) float held[kHeld][8] = {};
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
        if (first + j * step < p.in_features) load_x(first + j * step, held[j]);
    float scale = 1.0f;
    if (p.norm_weight) {
        float sum = 0.0f;
        const auto add_squares = [&](const float(&x)[8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
        };
#pragma unroll
        for (int j = 0; j < kHeld; ++j) add_squares(held[j]);
        for (int k = first + kHeld * step; k < p.in_features; k += step) {
            alignas(16) float x[8];
            load_x(k, x);
            add_squares(x);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
        for (int w = 0; w < int(blockDim.x) / 32; ++w) sum += sums[w];
        scale = rsqrtf(sum / float(p.in_features) + p.eps);
    }

    const auto finish = [&](int k, float(&x)[8]) {
        if (p.norm_weight) {
            alignas(16) float weight[8];
            load_8(p.norm_weight, 0, p.norm_dtype, k, weight);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] *= scale * weight[i];
        }
        const auto narrow = [&](const float* four) {
            const float4 y = *reinterpret_cast<const float4*>(four);
            return p.compute_dtype == DType::kFloat16 ? narrow_4<__half>(y) : narrow_4<__nv_bfloat16>(y);
        };
        const uint2 low = narrow(x), high = narrow(x + 4);  // the last of a row may have places that nobody reads
        reinterpret_cast<uint4*>(static_cast<__half*>(normed.to) + row * normed_row(p.in_features) + k)[0] =
            make_uint4(low.x, low.y, high.x, high.y);
    };
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
        if (first + j * step < p.in_features) finish(first + j * step, held[j]);
    for (int k = first + kHeld * step; k < p.in_features; k += step) {
        alignas(16) float x[8];
        load_x(k, x);
        finish(k, x);
    }
}

bool by_eights(const void* data, int64_t row_stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * element_bytes(dtype) % 16 == 0;
}

}  // namespace

cudaError_t normed_x(const W4LinearParams& p, void* to, cudaStream_t stream) {
    NormedX normed{p, to, false};
    normed.eights = p.in_features % 8 == 0 && by_eights(p.x.data, p.rows > 1 ? p.x.row : 0, p.dtype) &&
                    (!p.norm_weight || by_eights(p.norm_weight, 0, p.norm_dtype));
    const int64_t warps = (normed_row(p.in_features) / 8 + 31) / 32;
    return launch_kernel(normed_x_kernel, unsigned(p.rows), unsigned(warps * 32 < kMaxThreads ? warps * 32 : kMaxThreads), 0, stream,
                         normed, {p.programmatic});
}

}  // namespace fa
