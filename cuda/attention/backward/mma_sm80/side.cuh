// mma_sm80/side.cuh: the kernels around the main kernel of mma_sm80/kernel.cuh. Before it: delta, lse, and zeros for the sums of dQ. After
// it: dQ from these sums or, with `deterministic`, dQ computed from scratch. The first two are bound by memory.
#pragma once

#include "attention/backward/common/empty_rows.cuh"
#include "attention/backward/common/mma_sm80_parts.cuh"

namespace fa {
namespace {

// ---- before: delta and lse of block_m rows of a head, zeros for the sums of their dQ ----

constexpr int kSideThreads = 256;

// Called by the whole block: finds the large rows of its tile (large_rows.cuh).
template <typename T, int kBlockM>
__device__ __noinline__ void prepare_large_rows(const MmaBackwardParams& params) {
    const AttentionParams& p = params.backward.forward;
    const int tile = blockIdx.x % params.tiles_q, head = blockIdx.x / params.tiles_q % p.nheads, b = blockIdx.x / params.tiles_q / p.nheads;
    const int row0 = tile * kBlockM;
    const Sequence s = sequence_of(p, b);
    const int64_t place = workspace_tile(params, kBlockM, b, head, tile);
    float* const rows = params.workspace.rows + place * 2 * kBlockM;
    float2* const bases = reinterpret_cast<float2*>(params.workspace.large) + place * kBlockM;
    if (threadIdx.x == 0) *params.workspace.some_large = kSomeLarge;
    for (int first = threadIdx.x / 32 * 16; first < kBlockM && row0 + first < s.seqlen_q; first += kSideThreads / 2)
        find_large_rows<T>(p, s, b, head, row0 + first, params.natural, LseCovers::kPerhapsMore, [=](int i, const RowBase& base) {
            rows[i - row0] = kLargeRow;
            bases[i - row0] = make_float2(base.max, base.rest);
        });
}

constexpr int kBeforeBlocks = 5;  // blocks per multiprocessor, even if the rare large rows could use more registers
template <typename T, int kBlockM, int kD, int kDv>
__global__ void __launch_bounds__(kSideThreads, kBeforeBlocks) before_kernel(const __grid_constant__ MmaBackwardParams params) {
    constexpr int kLanes = kDv <= 64 ? 8 : kDv <= 128 ? 16 : 32, kRowsAtOnce = kSideThreads / kLanes;  // eight columns per lane
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
    const float* dlse = params.backward.dlse ? params.backward.dlse + lse_offset(p, s, head) : nullptr;
    float* rows = params.workspace.rows + place * 2 * kBlockM;
    const int column = threadIdx.x % kLanes * 8;
    const bool aligned = params.aligned_out && params.aligned_dout;
    bool large = false;
#pragma unroll 1  // unrolling gains nothing: the branches of a pass keep its loads from overlapping those of the next
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
            const bool empty = own == -INFINITY;  // P = 0, so P (dP - delta) must be 0, too, whatever dlse holds
            if (!empty && dlse) sum -= dlse[i];
            rows[r] = row_statistic(own);
            large = large || is_large(own);
            rows[kBlockM + r] = empty ? 0.0f : sum;
        }
    }
    if (__syncthreads_or(large)) prepare_large_rows<T, kBlockM>(params);  // rare
}

// ---- after: dQ = scale x the sums of a tile, read in the order in which the warps of the main kernel added them ----

template <typename T, int kD, int kDv, MmaSm kSm>
constexpr bool tile_is_taken(size_t tile_memory);  // kernel.cuh

template <typename T, int kD, int kDv, MmaSm kSm>
__global__ void __launch_bounds__(kBackwardTileOf<kD, kDv, kSm>.warps * 32) after_kernel(const __grid_constant__ MmaBackwardParams params) {
#if defined(__CUDA_ARCH__)
    if constexpr (!is_compiled(kTarget, tile_is_taken<T, kD, kDv, kSm>)) {
        __trap();
        return;
    }
#endif
    constexpr BackwardTile kTile = kBackwardTileOf<kD, kDv, kSm>;
    constexpr int kBlockM = kTile.block_m, kRowsDq = kTile.warps_m_dq, kColumnsDq = kTile.warps / kRowsDq;
    constexpr int kMmasDq = kBlockM / kRowsDq / 16, kTilesDq = kD / kColumnsDq / 8;
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int tile = blockIdx.x % params.tiles_q, head = blockIdx.x / params.tiles_q % p.nheads, b = blockIdx.x / params.tiles_q / p.nheads;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.workspace.some_large = 0;
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
    const int row0 = tile * kBlockM + warp / kColumnsDq * (16 * kMmasDq);
    clear_empty_rows(dQ, p, s, head, row0, lane);
    T* dq = static_cast<T*>(backward.dq.data) + gradients_of(backward, b).dq + head * backward.dq.head;
    store_rows<T, kColumnsDq>(dQ, p.scale, dq, backward.dq.row, row0, s.seqlen_q, warp % kColumnsDq, p.headdim, params.aligned_dq,
                              backward.accumulate, lane);
}

// ---- deterministic: only dQ. A block owns 64 queries, a warp 16 whole rows; dS stays in registers ----

constexpr int kDqRows = 64, kDqThreads = 128;

template <typename T, int kD, int kDv>
struct DqSmem {
    static constexpr int kKeys = kD <= 128 ? 64 : 32, kStages = kD <= 128 ? 2 : 1;
    alignas(128) T q[kDqRows * kD];
    alignas(128) T dout[kDqRows * kDv];
    alignas(128) T k[kStages][kKeys * kD];
    alignas(128) T v[kStages][kKeys * kDv];
    int used[kKeys];  // with a mask or bias: whether some row of this block has a nonzero dS for this key
};

template <typename T, int kD, int kDv, Scores kScores>
__global__ void __launch_bounds__(kDqThreads, kD <= 128 ? 2 : 1) dq_kernel(const __grid_constant__ MmaBackwardParams params) {
    using Shared = DqSmem<T, kD, kDv>;
    constexpr bool kGeneral = kScores == Scores::kGeneral;
    constexpr int kKeys = Shared::kKeys, kStages = Shared::kStages, kTilesN = kKeys / 8;
    using TileQ = SharedTile<T, kD>;
    using TileV = SharedTile<T, kDv>;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<Shared*>(shared);
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int tile =
        params.tiles_dq - 1 - blockIdx.x % params.tiles_dq;  // under a causal mask the last rows see the most keys, so they start first
    const int head = blockIdx.x / params.tiles_dq % p.nheads, b = blockIdx.x / params.tiles_dq / p.nheads, row0 = tile * kDqRows;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.workspace.some_large = 0;
    const Sequence s = sequence_of(p, b);
    if (row0 >= s.seqlen_q) return;
    const GradientSequence g = gradients_of(backward, b);
    const int first_key = window_range(p, s, row0).begin,
              end_key = max(first_key, window_range(p, s, min(row0 + kDqRows, s.seqlen_q) - 1).end);
    const int first_tile = first_key / kKeys, end_tile = (end_key + kKeys - 1) / kKeys;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = row0 + 16 * warp;
    const uint32_t q_a = shared_address(smem.q) + TileQ::offset(16 * warp + lane % 16, lane / 16);
    const uint32_t dout_a = shared_address(smem.dout) + TileV::offset(16 * warp + lane % 16, lane / 16);
    const uint32_t k_b = shared_address(smem.k) + TileQ::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_b = shared_address(smem.v) + TileV::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t k_columns = shared_address(smem.k) + TileQ::offset(lane % 16, lane / 16);

    const T* k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head;
    const T* v = static_cast<const T*>(p.v.data) + s.v + head / p.group * p.v.head;
    const auto load = [&](int t, int stage) {
        load_tile<kKeys, kD, kDqThreads, true>(smem.k[stage], k + t * kKeys * p.k.row, p.k.row, first_key - t * kKeys, end_key - t * kKeys,
                                               p.headdim, params.aligned_k);
        load_tile<kKeys, kDv, kDqThreads, true>(smem.v[stage], v + t * kKeys * p.v.row, p.v.row, first_key - t * kKeys, end_key - t * kKeys,
                                                p.headdim_v, params.aligned_v);
    };
    float lse[1][2], delta[1][2];
    if (first_tile < end_tile) {
        const T* q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head + row0 * p.q.row;
        const T* dout = static_cast<const T*>(backward.dout.data) + g.dout + head * backward.dout.head + row0 * backward.dout.row;
        load_tile<kDqRows, kD, kDqThreads, true>(smem.q, q, p.q.row, 0, s.seqlen_q - row0, p.headdim, params.aligned_q);
        load_tile<kDqRows, kDv, kDqThreads, true>(smem.dout, dout, backward.dout.row, 0, s.seqlen_q - row0, p.headdim_v,
                                                  params.aligned_dout);
        load(first_tile, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(warp_row + mma_row(lane, 2 * half), s.seqlen_q - 1);
            const int64_t place = workspace_tile(params, params.block_m, b, head, row / params.block_m);
            const float* from = params.workspace.rows + place * 2 * params.block_m;
            lse[0][half] = from[row % params.block_m], delta[0][half] = from[params.block_m + row % params.block_m];
        }
    }
    const auto large_of = [&] {  // RowBase of the thread's first row; in a warp without rows, that of some other row
        const int row = min(warp_row, (s.seqlen_q - 1) / 16 * 16), own_tile = row / params.block_m;
        return reinterpret_cast<const float2*>(params.workspace.large) +
               workspace_tile(params, params.block_m, b, head, own_tile) * params.block_m + row % params.block_m + opaque(lane) / 4;
    };
    float dQ[1][kD / 8][4];
    clear(dQ);
#pragma unroll 1
    for (int t = first_tile; t < end_tile; ++t) {
        const int stage = kStages == 2 ? (t - first_tile) & 1 : 0, key0 = t * kKeys;
        cp_async_wait_all();
        __syncthreads();  // K and V of this tile are here; nobody reads the previous tile any more
        if (kStages == 2 && t + 1 < end_tile) load(t + 1, stage ^ 1);
        const uint32_t to_k = stage * uint32_t(sizeof smem.k[0]), to_v = stage * uint32_t(sizeof smem.v[0]);
        float S[1][kTilesN][4], dP[1][kTilesN][4];
        clear(S), clear(dP);
        multiply_rows<T, TileQ, TileQ, kD / 16>(S, q_a, k_b + to_k, Nothing{});
        multiply_rows<T, TileV, TileV, kDv / 16>(dP, dout_a, v_b + to_v, Nothing{});
        const bool cut = warp_row + 16 > s.seqlen_q || key0 + kKeys > window_range(p, s, warp_row).end ||
                         key0 < window_range(p, s, min(warp_row + 16, s.seqlen_q) - 1).begin;
        if (kGeneral) {
            const int here = opaque(lane);
            const FragmentPlace at{b, head, warp_row + mma_row(here, 0), key0 + mma_column(here, 0), s.seqlen_q, s.seqlen_k, s.shift};
            general_gradients<T>(p, at, here % 4, lse[0], large_of(), delta[0], flat(S[0]), flat(dP[0]));
        } else {
            adjust_large(lse[0], large_of(), flat(S[0]), large_score);
#pragma unroll
            for (int i = 0; i < 4 * kTilesN; ++i) {
                const int half = i / 2 % 2;
                const float P = exp2_approx(fmaf(flat(S[0])[i], params.scale_log2, -lse[0][half]));
                flat(dP[0])[i] = P * (flat(dP[0])[i] - delta[0][half]);
            }
        }
        if (cut) hide(dP, p, sequence_of(p, opaque(b)), warp_row, key0, lane);
        if (kGeneral && p.may_hide_keys()) {
            // A key without a nonzero dS in this block may hold NaN in K, and 0 x NaN is NaN: its K is zeroed.
            if (threadIdx.x < kKeys) smem.used[threadIdx.x] = 0;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4 * kTilesN; ++i)
                if (flat(dP[0])[i] != 0) smem.used[8 * (i / 4) + mma_column(lane, i)] = 1;
            __syncthreads();
            for (int x = opaque(threadIdx.x); x < kKeys * TileQ::kPieces; x += kDqThreads)
                if (!smem.used[x / TileQ::kPieces]) reinterpret_cast<uint4*>(smem.k[stage])[x] = make_uint4(0, 0, 0, 0);
            __syncthreads();
        }
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            uint32_t A[4];
            fragment_of<T>(A, &dP[0][2 * step]);
#pragma unroll
            for (int n = 0; n < kD / 8; n += 2) {
                uint32_t B[2][2];
                ldmatrix_x4_trans(B, TileQ::advance(k_columns + to_k, n / 2) + 16 * step * TileQ::kPitch);
                mma<T>(dQ[0][n], A, B[0][0], B[0][1]);
                mma<T>(dQ[0][n + 1], A, B[1][0], B[1][1]);
            }
        }
        if (kStages == 1) {
            __syncthreads();  // nobody reads K and V any more
            if (t + 1 < end_tile) load(t + 1, 0);
        }
    }
    clear_empty_rows(dQ, p, sequence_of(p, opaque(b)), head, warp_row, lane);
    T* dq = static_cast<T*>(backward.dq.data) + g.dq + head * backward.dq.head;
    store_rows<T, 1>(dQ, p.scale, dq, backward.dq.row, warp_row, s.seqlen_q, 0, p.headdim, params.aligned_dq, backward.accumulate, lane);
}

}  // namespace
}  // namespace fa
