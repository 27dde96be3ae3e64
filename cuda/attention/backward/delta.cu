// delta.cu: delta_i = dout_i . out_i - dlse_i in float32, which the backward pass subtracts from dP. Laid out like lse. One warp per row;
// bound by one read of out and dout. Where wanted, also the RowBase that P subtracts: 0 and lse, or that of a large row (large_rows.cuh).
#include "attention/common/large_rows.cuh"
#include "attention/common/online_softmax.cuh"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kWarp = 32, kThreads = 256;
constexpr float kMostOfParts = 0x1p99f;  // larger numbers of dS have no float16 parts (float16_parts.cuh), infinite ones none at all
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 750 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1200)
constexpr int kFullSm = 1024;  // a multiprocessor of these targets holds 1024 or 1536 threads
#else
constexpr int kFullSm = 2048;
#endif

struct DeltaParams {
    BackwardParams backward;
    float* delta;
    float2* bases;    // nullptr = not wanted
    int* some_large;  // nullptr = not wanted. Set if some row is large, or its delta beyond kMostOfParts or NaN
};

// A varlen call is treated as one batch entry of total_q rows. Nobody reads the delta of a row that belongs to no sequence, or that has lse
// = -inf.
int64_t rows_of(const AttentionParams& p) { return p.cu_seqlens_q ? p.total_q : int64_t(p.batch) * p.seqlen_q; }

// Row i of a batch entry; varlen: row i of all rows.
template <typename T>
__device__ __noinline__ RowBase base_of_large_row(const AttentionParams& p, int batch, int head, int i, RowBase ordinary) {
    if (p.cu_seqlens_q) {
        const auto first_row = [&](int b) { return clamp_to(p.cu_seqlens_q[b], 0, p.total_q); };
        int high = p.batch - 1;
        while (batch < high) {
            const int middle = (batch + high + 1) / 2;
            if (first_row(middle) <= i) batch = middle;
            else high = middle - 1;
        }
        i -= first_row(batch);
    }
    const Sequence s = sequence_of(p, batch);
    if (i < 0 || i >= s.seqlen_q) return ordinary;  // the row belongs to no sequence
    const ScoreForm form = p.general_scores() ? ScoreForm::kOptions : ScoreForm::kProduct;
    return large_row<T>(p, s, batch, head, i, form, LseCovers::kPerhapsMore);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kFullSm / kThreads) delta_kernel(const __grid_constant__ DeltaParams params) {
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
    const int64_t place = (batch * p.nheads + head) * rows + i;
    if (b.dlse) sum -= b.dlse[place];
    if (params.bases) {
        RowBase base{0.0f, p.lse[place]};
        const bool large = is_large(base.rest);
        if (large) base = base_of_large_row<T>(p, int(batch), int(head), int(i), base);
        if (params.some_large && (large || (!(fabsf(sum) < kMostOfParts) && base.rest != -INFINITY))) *params.some_large = 1;
        if (lane == 0) params.bases[place] = make_float2(base.max, base.rest);
    }
    if (lane == 0) params.delta[place] = sum;
}

}  // namespace

int64_t backward_delta_count(const AttentionParams& p) { return rows_of(p) * p.nheads; }

int64_t backward_delta_blocks(const AttentionParams& p) {
    constexpr int kRows = kThreads / kWarp;
    return (backward_delta_count(p) + kRows - 1) / kRows;
}

cudaError_t backward_delta(const BackwardParams& b, float* delta, float2* bases, cudaStream_t stream, int* some_large) {
    const int64_t blocks = backward_delta_blocks(b.forward);
    if (blocks == 0) return cudaSuccess;
    return with_dtype(b.forward.dtype, [&](auto zero) {
        return launch_kernel(delta_kernel<decltype(zero)>, unsigned(blocks), kThreads, 0, stream, DeltaParams{b, delta, bases, some_large});
    });
}

}  // namespace fa
