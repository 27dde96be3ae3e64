// merge.cu: merges two attention results over disjoint keys into the result over their union. One warp per row; bound by memory.
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kThreads = 128, kWarp = 32;

template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
    const int64_t row = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;  // (b, head, i) flattened like lse
    const int lane = threadIdx.x % kWarp, i = int(row % p.seqlen), head = int(row / p.seqlen % p.nheads);
    const int64_t b = row / p.seqlen / p.nheads;
    if (b >= p.batch) return;

    const float lse_a = p.lse_a[row], lse_b = p.lse_b[row], max = fmaxf(lse_a, lse_b);
    const bool empty = max == -INFINITY;
    const float exp_a = empty ? 0.0f : expf(lse_a - max), exp_b = empty ? 0.0f : expf(lse_b - max), sum = exp_a + exp_b;
    const float weight_a = empty ? 0.0f : exp_a / sum, weight_b = empty ? 0.0f : exp_b / sum;

    const auto at = [&](const TensorView& t) { return static_cast<T*>(t.data) + b * t.batch + i * t.row + head * t.head; };
    const T *a = at(p.out_a), *c = at(p.out_b);
    T* out = at(p.out);
    for (int d = lane; d < p.headdim_v; d += kWarp) {
        float value = 0;
        if (lse_a != -INFINITY) value = weight_a * to_float(a[d]);  // an empty side may hold anything, NaN included
        if (lse_b != -INFINITY) value = fmaf(weight_b, to_float(c[d]), value);
        out[d] = from_float<T>(value);
    }
    __syncwarp();  // `lse` may alias lse_a or lse_b: all lanes have read before one writes
    if (lane == 0) p.lse[row] = empty ? -INFINITY : max + logf(sum);
}

}  // namespace

cudaError_t merge(const MergeParams& p, const DeviceInfo&, cudaStream_t stream) {
    const int64_t rows = int64_t(p.batch) * p.nheads * p.seqlen, rows_per_block = kThreads / kWarp;
    return with_dtype(p.dtype, [&](auto zero) {
        return launch_kernel(merge_kernel<decltype(zero)>, unsigned((rows + rows_per_block - 1) / rows_per_block), kThreads, 0, stream, p);
    });
}

}  // namespace fa
