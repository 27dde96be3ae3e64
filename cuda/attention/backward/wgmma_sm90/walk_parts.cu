// wgmma_sm90/walk_parts.cu: adds the dK and dV of the parts of each walk (walk_parts.h).
#include <type_traits>

#include "attention/backward/wgmma_sm90/walk_parts.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kThreads = 256;

struct PartsParams {
    BackwardParams b;
    PartSums sums;
};

// 8 columns of a row: the sum of the parts from `from` on, which are `part` apart, times `factor`.
template <typename T>
__device__ __forceinline__ void add_columns(const float* from, int64_t part, int count, float factor, T* row, bool accumulate) {
    constexpr int kAtOnce = 4;  // parts that are on their way together: short calls wait for memory, not for its rate
    float sum[8] = {};
#pragma unroll 1
    for (int i = 0; i < count; i += kAtOnce, from += kAtOnce * part) {
        float4 low[kAtOnce], high[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            low[j] = high[j] = make_float4(0, 0, 0, 0);
            if (i + j < count) {
                low[j] = reinterpret_cast<const float4*>(from + j * part)[0];
                high[j] = reinterpret_cast<const float4*>(from + j * part)[1];
            }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            sum[0] += low[j].x, sum[1] += low[j].y, sum[2] += low[j].z, sum[3] += low[j].w;
            sum[4] += high[j].x, sum[5] += high[j].y, sum[6] += high[j].z, sum[7] += high[j].w;
        }
    }
    uint4* const place = reinterpret_cast<uint4*>(row);
    const uint4 old = accumulate ? *place : make_uint4(0, 0, 0, 0);
    uint32_t pairs[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 before = unpack_16<T>(pairs[j]);
        const float low = sum[2 * j] * factor, high = sum[2 * j + 1] * factor;
        pairs[j] = accumulate ? pack_16<T>(before.x + low, before.y + high) : pack_16<T>(low, high);
    }
    *place = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// A block has kAddedKeys keys of one key head of a sequence; the blocks of dV follow those of dK. Rows of no sequence are not touched.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ PartsParams params) {
    const AttentionParams& p = params.b.forward;
    const PartSums& sums = params.sums;
    const int count = sums.parts.count();
    const int blocks = gridDim.x / 2, chunks = addition_chunks(p);
    const bool of_v = blockIdx.x >= blocks;
    const int index = of_v ? blockIdx.x - blocks : blockIdx.x, sequence_head = index / chunks,
              key0 = (index - sequence_head * chunks) * kAddedKeys;
    const int batch = sequence_head / p.nheads_k, head = sequence_head - batch * p.nheads_k;

    const TensorView& view = of_v ? params.b.dv : params.b.dk;
    const int stride = of_v ? sums.columns_v : sums.columns, pieces = (of_v ? p.headdim_v : p.headdim) / 8;
    const int64_t part = sums.rows * stride, first = p.cu_seqlens_q ? first_key_row(p, batch) : int64_t(batch) * p.seqlen_k;
    const float* const from = (of_v ? sums.dv : sums.dk) + head * count * part + (first + key0) * stride;
    const GradientSequence sequence = gradients_of(params.b, batch);
    T* const to = static_cast<T*>(view.data) + (of_v ? sequence.dv : sequence.dk) + key0 * view.row + head * view.head;
    const float factor = !of_v ? p.scale : p.dropout_threshold ? p.dropout_scale : 1.0f;
    const int all = min(sequence_of(p, batch).seqlen_k - key0, kAddedKeys) * pieces;
    for (int i = threadIdx.x; i < all; i += kThreads) {
        const int r = i / pieces, column = i % pieces * 8;
        add_columns(from + r * stride + column, part, count, factor, to + r * view.row + column, params.b.accumulate);
    }
}

}  // namespace

cudaError_t add_parts(const BackwardParams& b, const PartSums& sums, cudaStream_t stream) {
    const AttentionParams& p = b.forward;
    const PartsParams params{b, sums};
    const auto kernel = p.dtype == DType::kFloat16 ? add_parts_kernel<__half> : add_parts_kernel<__nv_bfloat16>;
    return launch_kernel(kernel, unsigned(addition_blocks(p)), kThreads, 0, stream, params);
}

}  // namespace fa
