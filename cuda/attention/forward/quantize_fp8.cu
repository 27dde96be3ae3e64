// quantize_fp8.cu: fp32, fp16 or bf16 to e4m3 with one factor per head. One warp per row; bound by memory: x is read twice.
//
// Three launches: the first collects the largest magnitude of every head in descale (as bits, which order like positive floats), the second
// scales and rounds the rows, the third turns descale into the factor.
#include <cuda_fp8.h>

#include "attention/common/quantize_fp8.h"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRowsPerBlock = 64;

// kWrite: the second pass, which rounds and stores; otherwise the first, which finds the largest magnitude.
template <typename T, bool kWrite>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ QuantizeParams p) {
    __shared__ float rows[kWarps][kMaxQuantizedHeadDim];
    __shared__ uint32_t signs[kMaxQuantizedHeadDim / 32];
    const int chunks = (p.seqlen + kRowsPerBlock - 1) / kRowsPerBlock, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t head_index = blockIdx.x / chunks;  // (batch, head) flattened like descale
    const int b = int(head_index / p.nheads), head = int(head_index % p.nheads), row0 = int(blockIdx.x % chunks) * kRowsPerBlock;
    const T* x = static_cast<const T*>(p.x.data) + b * p.x.batch + head * p.x.head;
    if (p.hadamard) {
        if (threadIdx.x < kMaxQuantizedHeadDim / 128) {
            const Philox4 words = sign_words(p, threadIdx.x);
            for (int i = 0; i < 4; ++i) signs[4 * threadIdx.x + i] = words.word[i];
        }
        __syncthreads();
    }
    const float scale = kWrite ? quantize_scale(p.descale[head_index]) : 0.0f;
    float* row = rows[warp];
    float largest = 0.0f;
    for (int i = row0 + warp; i < min(row0 + kRowsPerBlock, p.seqlen); i += kWarps) {
        for (int d = lane; d < p.headdim; d += 32) {
            const float value = to_float(x[i * p.x.row + d]);
            row[d] = p.hadamard && (signs[d / 32] >> d % 32 & 1) ? -value : value;
        }
        __syncwarp();
        if (p.hadamard) {
            for (int step = 1; step < p.headdim; step *= 2) {
                for (int pair = lane; pair < p.headdim / 2; pair += 32) {
                    const int low = pair / step * 2 * step + pair % step;
                    const float a = row[low], c = row[low + step];
                    row[low] = a + c, row[low + step] = a - c;
                }
                __syncwarp();
            }
        }
        for (int d = lane; d < p.headdim; d += 32) {
            const float value = p.hadamard ? row[d] * p.norm : row[d];
            if (kWrite)
                static_cast<uint8_t*>(p.out.data)[b * p.out.batch + i * p.out.row + head * p.out.head + d] =
                    __nv_cvt_float_to_fp8(value * scale, __NV_SATFINITE, __NV_E4M3);
            else largest = fmaxf(largest, fabsf(value));  // ignores NaN
        }
        __syncwarp();
    }
    if (!kWrite) {
        for (int offset = 16; offset; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
        if (lane == 0) atomicMax(reinterpret_cast<unsigned*>(p.descale + head_index), __float_as_uint(largest));
    }
}

__global__ void descale_kernel(const __grid_constant__ QuantizeParams p) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < int64_t(p.batch) * p.nheads) p.descale[i] = quantize_descale(p.descale[i]);
}

}  // namespace

int64_t quantize_fp8_blocks(const QuantizeParams& p) {
    return (int64_t(p.seqlen) + kRowsPerBlock - 1) / kRowsPerBlock * p.batch * p.nheads;
}

cudaError_t quantize_fp8(const QuantizeParams& p, const DeviceInfo&, cudaStream_t stream) {
    const int64_t heads = int64_t(p.batch) * p.nheads, blocks = quantize_fp8_blocks(p);
    if (const cudaError_t error = cudaMemsetAsync(p.descale, 0, sizeof(float) * size_t(heads), stream)) return cudaGetLastError(), error;
    if (blocks > 0) {
        const cudaError_t error = with_dtype(p.dtype, [&](auto zero) {
            using T = decltype(zero);
            if (const cudaError_t first = launch_kernel(quantize_kernel<T, false>, unsigned(blocks), kThreads, 0, stream, p)) return first;
            return launch_kernel(quantize_kernel<T, true>, unsigned(blocks), kThreads, 0, stream, p);
        });
        if (error) return error;
    }
    return launch_kernel(descale_kernel, unsigned((heads + kThreads - 1) / kThreads), kThreads, 0, stream, p);
}

}  // namespace fa
