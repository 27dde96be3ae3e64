// mma_sm80_side.cuh: the kernels around the main kernel of mma_sm80.cuh. Before it: delta, lse, and zeros for the sums of dQ. After it: dQ
// from these sums. Memory bounds both.
#pragma once

#include "attention/backward/mma_sm80_parts.cuh"

namespace fa {
namespace {

// ---- before: delta and lse of block_m rows of a head, zeros for the sums of their dQ ----

constexpr int kSideThreads = 256;

template <typename T, int kBlockM, int kD, int kDv>
__global__ void __launch_bounds__(kSideThreads) before_kernel(const __grid_constant__ MmaBackwardParams params) {
    constexpr int kLanes = kDv <= 64 ? 8 : kDv <= 128 ? 16 : 32, kRowsAtOnce = kSideThreads / kLanes;  // eight columns for each lane
    const AttentionParams& p = params.backward.forward;
    const int tile = blockIdx.x % params.tiles_q, head = blockIdx.x / params.tiles_q % p.nheads, b = blockIdx.x / params.tiles_q / p.nheads;
    const int row0 = tile * kBlockM;
    const Sequence s = sequence_of(p, b);
    if (row0 >= s.seqlen_q) return;
    const int64_t place = workspace_tile(params, kBlockM, b, head, tile);
    if (!params.backward.deterministic) {
        float4* sums = reinterpret_cast<float4*>(params.workspace.dq + place * kBlockM * kD);
        for (int x = threadIdx.x; x < kBlockM * kD / 4; x += kSideThreads) sums[x] = float4{};
    }
    const T* out = static_cast<const T*>(p.out.data) + s.out + head * p.out.head;
    const T* dout =
        static_cast<const T*>(params.backward.dout.data) + gradients_of(params.backward, b).dout + head * params.backward.dout.head;
    const float* lse = p.lse + lse_offset(p, s, head);
    float* rows = params.workspace.rows + place * 2 * kBlockM;
    const int column = threadIdx.x % kLanes * 8;
    const bool aligned = params.aligned_out && params.aligned_dout;
#pragma unroll 1  // the branches of a pass keep its loads from those of the next
    for (int pass = 0; pass < (kBlockM + kRowsAtOnce - 1) / kRowsAtOnce; ++pass) {
        const int r = pass * kRowsAtOnce + threadIdx.x / kLanes, i = row0 + r;
        const T *x = out + i * p.out.row + column, *y = dout + i * params.backward.dout.row + column;
        float sum = 0;
        if (r < kBlockM && i < s.seqlen_q && column < p.headdim_v) {
            if (aligned) {
                alignas(16) T a[8], c[8];
                *reinterpret_cast<uint4*>(a) = *reinterpret_cast<const uint4*>(x);
                *reinterpret_cast<uint4*>(c) = *reinterpret_cast<const uint4*>(y);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum += to_float(a[e]) * to_float(c[e]);
            } else {
                for (int e = 0; e < 8 && column + e < p.headdim_v; ++e) sum += to_float(x[e]) * to_float(y[e]);
            }
        }
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(kFullWarp, sum, lane);
        if (r < kBlockM && column == 0) {
            const float own = i < s.seqlen_q ? lse[i] : -INFINITY;
            rows[r] = own == -INFINITY ? INFINITY : own * kLog2e;
            rows[kBlockM + r] = sum;
        }
    }
}

// ---- after: dQ = scale x the sums of a tile, read as the warps of the main kernel wrote them ----

template <typename T, int kD, int kDv, MmaSm kSm>
__global__ void __launch_bounds__(kBackwardTileOf<kD, kDv, kSm>.warps * 32) after_kernel(const __grid_constant__ MmaBackwardParams params) {
    if (never_launched_here<kD, kDv, kSm>()) return;
    constexpr BackwardTile kTile = kBackwardTileOf<kD, kDv, kSm>;
    constexpr int kBlockM = kTile.block_m, kRowsDq = kTile.warps_m_dq, kColumnsDq = kTile.warps / kRowsDq;
    constexpr int kMmasDq = kBlockM / kRowsDq / 16, kTilesDq = kD / kColumnsDq / 8;
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int tile = blockIdx.x % params.tiles_q, head = blockIdx.x / params.tiles_q % p.nheads, b = blockIdx.x / params.tiles_q / p.nheads;
    const Sequence s = sequence_of(p, b);
    if (tile * kBlockM >= s.seqlen_q) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* sums =
        params.workspace.dq + workspace_tile(params, kBlockM, b, head, tile) * (kBlockM * kD) + warp * (kMmasDq * kTilesDq * 128);
    float dQ[kMmasDq][kTilesDq][4];
#pragma unroll
    for (int m = 0; m < kMmasDq; ++m)
#pragma unroll
        for (int n = 0; n < kTilesDq; ++n) load_fragment(dQ[m][n], sums + (m * kTilesDq + n) * 128, lane);
    T* dq = static_cast<T*>(backward.dq.data) + gradients_of(backward, b).dq + head * backward.dq.head;
    store_rows<T, kColumnsDq>(dQ, p.scale, dq, backward.dq.row, tile * kBlockM + warp / kColumnsDq * (16 * kMmasDq), s.seqlen_q,
                              warp % kColumnsDq, p.headdim, params.aligned_dq, backward.accumulate, lane);
}

}  // namespace
}  // namespace fa
