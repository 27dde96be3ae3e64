// decode_combine.cu: the results of a row's pieces become its result, lse = log(sum exp(lse_i)), out = sum exp(lse_i - lse) out_i. One
// block a row; rows whose keys are one piece have theirs already. Bound by the latency of three dependent reads: it is launched while
// the decode kernel runs, finds its pieces in the meantime, and reads all of a row's pieces at once.
#include "attention/decode.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <cfloat>

namespace fa {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kWarps = 4, kThreads = 32 * kWarps;

template <int kParts>  // of 128 columns
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ DecodeParams d) {
    constexpr int kAtOnce = kParts == 1 ? 4 : 2;  // pieces a warp reads at a time
    const AttentionParams& p = d.attention;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = p.batch * p.seqlen_q * p.nheads;
    __shared__ float max_of[kWarps], sum_of[kWarps];
    __shared__ float4 acc_of[kWarps][32 * kParts];
    const Cut cut(d);
    const bool all_whole = cut.tiles && !cut.of_unit;
    int x = blockIdx.x, head, i, b, r;
    UnitPieces pieces;
    const auto find = [&] {
        head = x % p.nheads, i = x / p.nheads % p.seqlen_q, b = x / p.nheads / p.seqlen_q, r = i * p.group + head % p.group;
        pieces = pieces_of(d, cut, b, head / p.group * d.row_tiles + r / d.rows);
    };
    if (!all_whole) find();
    grid_dependency_wait();  // by every block: the end of this kernel is then also the end of those before it
    if (all_whole) return;
#pragma unroll 1
    while (true) {
        if (const int count = pieces.count; count != 1) {
            float max = -FLT_MAX, sum = 0;
            float4 acc[kParts] = {};
            for (int first = warp; first < count; first += kWarps * kAtOnce) {
                float lse[kAtOnce];
                float4 part_of[kAtOnce][kParts];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const int piece = first + kWarps * j;
                    const int64_t row = pieces.slot(min(piece, count - 1)) * d.rows + r % d.rows;
                    lse[j] = piece < count ? d.partial_lse[row] : -INFINITY;
#pragma unroll
                    for (int part = 0; part < kParts; ++part) {
                        const int column = 128 * part + 4 * lane;
                        part_of[j][part] = piece < count && column < p.headdim_v
                                               ? *reinterpret_cast<const float4*>(d.partial + row * p.headdim_v + column)
                                               : float4{};
                    }
                }
                float next = max;
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) next = fmaxf(next, lse[j]);
                const float factor = exp2_approx(max - next);
                max = next, sum *= factor;
#pragma unroll
                for (int part = 0; part < kParts; ++part)
                    acc[part].x *= factor, acc[part].y *= factor, acc[part].z *= factor, acc[part].w *= factor;
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const float weight = exp2_approx(lse[j] - max);
                    sum += weight;
#pragma unroll
                    for (int part = 0; part < kParts; ++part) {
                        acc[part].x += weight * part_of[j][part].x, acc[part].y += weight * part_of[j][part].y;
                        acc[part].z += weight * part_of[j][part].z, acc[part].w += weight * part_of[j][part].w;
                    }
                }
            }
#pragma unroll
            for (int part = 0; part < kParts; ++part) acc_of[warp][32 * part + lane] = acc[part];
            if (lane == 0) max_of[warp] = max, sum_of[warp] = sum;
            __syncthreads();
            float weight[kWarps], top = -FLT_MAX, total = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) top = fmaxf(top, max_of[w]);
#pragma unroll
            for (int w = 0; w < kWarps; ++w) weight[w] = exp2_approx(max_of[w] - top), total += weight[w] * sum_of[w];
            float inverse = total == 0 ? 0 : 1 / total;
            if (const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY; sink != -INFINITY) {
                const float next = fmaxf(top, sink), factor = exp2_approx(top - next);
                total = total * factor + exp2_approx(sink - next), top = next, inverse = factor / total;
            }
            if (p.lse && threadIdx.x == 0)
                p.lse[(int64_t(b) * p.nheads + head) * p.seqlen_q + i] = total == 0 ? -INFINITY : (top + log2f(total)) * kLn2;
            const int64_t out = b * p.out.batch + i * p.out.row + head * p.out.head;
            for (int column = threadIdx.x; column < p.headdim_v; column += kThreads) {
                float y = 0;
#pragma unroll
                for (int w = 0; w < kWarps; ++w) y += weight[w] * reinterpret_cast<const float*>(acc_of[w])[column];
                y *= inverse;
                if (p.dtype == DType::kFloat32) static_cast<float*>(p.out.data)[out + column] = y;
                else if (p.dtype == DType::kFloat16) static_cast<__half*>(p.out.data)[out + column] = __float2half_rn(y);
                else static_cast<__nv_bfloat16*>(p.out.data)[out + column] = __float2bfloat16_rn(y);
            }
            __syncthreads();
        }
        x += gridDim.x;
        if (x >= rows) return;
        find();
    }
}

}  // namespace

cudaError_t decode_combine(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream) {
    const AttentionParams& p = d.attention;
    const int64_t rows = int64_t(p.batch) * p.seqlen_q * p.nheads,
                  most = 2 * device.multiprocessors;  // so many wait beside the decode kernel
    const unsigned blocks = unsigned(rows < most ? rows : most);
    return launch_kernel(p.headdim_v <= 128 ? combine_kernel<1> : combine_kernel<2>, blocks, kThreads, 0, stream, d, device.compute >= 90);
}

}  // namespace fa
