// delta.cu: delta_i = dout_i . out_i - dlse_i in float32, which the backward subtracts from dP. Laid out like lse. One warp a row; bound by
// one read of out and dout.
#include "attention/common/online_softmax.cuh"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kWarp = 32, kThreads = 256;

struct DeltaParams {
    BackwardParams backward;
    float* delta;
};

// A varlen call is one batch entry of total_q rows. Nobody reads the delta of a row that belongs to no sequence, or that has lse = -inf.
int64_t rows_of(const AttentionParams& p) { return p.cu_seqlens_q ? p.total_q : int64_t(p.batch) * p.seqlen_q; }

template <typename T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaParams params) {
    const BackwardParams& b = params.backward;
    const AttentionParams& p = b.forward;
    const int lane = threadIdx.x % kWarp, rows = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
    const int64_t index = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    const int64_t head = index % p.nheads, i = index / p.nheads % rows, batch = index / p.nheads / rows;
    if (batch >= (p.cu_seqlens_q ? 1 : p.batch)) return;
    const int64_t own = p.cu_seqlens_q ? 0 : batch;  // varlen ignores the batch strides
    const T* out = static_cast<const T*>(p.out.data) + own * p.out.batch + i * p.out.row + head * p.out.head;
    const T* dout = static_cast<const T*>(b.dout.data) + own * b.dout.batch + i * b.dout.row + head * b.dout.head;
    float sum = 0;
    for (int d = lane; d < p.headdim_v; d += kWarp) sum = fmaf(to_float(dout[d]), to_float(out[d]), sum);
    sum = reduce_sum<kWarp>(sum);
    if (lane > 0) return;
    const int64_t place = (batch * p.nheads + head) * rows + i;
    params.delta[place] = b.dlse ? sum - b.dlse[place] : sum;
}

}  // namespace

int64_t backward_delta_count(const AttentionParams& p) { return rows_of(p) * p.nheads; }

int64_t backward_delta_blocks(const AttentionParams& p) {
    constexpr int kRows = kThreads / kWarp;
    return (backward_delta_count(p) + kRows - 1) / kRows;
}

cudaError_t backward_delta(const BackwardParams& b, float* delta, cudaStream_t stream) {
    const int64_t blocks = backward_delta_blocks(b.forward);
    if (blocks == 0) return cudaSuccess;
    return with_dtype(b.forward.dtype, [&](auto zero) {
        return launch_kernel(delta_kernel<decltype(zero)>, unsigned(blocks), kThreads, 0, stream, DeltaParams{b, delta});
    });
}

}  // namespace fa
