// mma_sm80/kernel.cuh: the gradients of attention on tensor cores, for every GPU from sm_80 on; fp16 and bf16, head dims up to 256, every
// option. New against simple.cu: all five products of a tile of S are mma.sync:
//
//     S = Q K^T      P = exp(S - lse)      dP = dO V^T      dS = P (dP - delta)      dV += P^T dO      dK += dS^T Q      dQ += dS K
//
// Three kernels run one after another:
//     before   delta = rowsum(dO * O) - dlse; lse, with +inf for rows that see nothing, so that their P is 0; the RowBase of rows with a
//              large lse (large_rows.cuh); zeros for the sums of dQ
//     main     a block owns the keys of one tile and walks over the queries of every head that reads them. dK and dV stay in registers. dQ
//              is added to float32 sums in the workspace. A tile of sums is in fragment order, so that a warp adds to neighbouring
//              addresses
//     after    dQ = scale x the sums, rounded
// With `deterministic`, no sum depends on timing: dQ is computed by a separate kernel whose blocks own queries and walk over keys. That
// kernel computes S and dP a second time.
//
// One step of the main kernel, two stages (|: block barrier). Each product is divided among the warps in its own way. P and dS pass through
// shared memory, from warps that own rows of S to warps that own rows of dK and dV. Between the barriers warps drift apart.
//
//     copy     | Q, dO of the next tile of queries  .  .  .  .  .  .  .  .  |
//     tensor   | S = Q K^T   dP = dO V^T          | dV += P^T dO   dQ = dS K   dK += dS^T Q |
//     ALU      |             exp2 exp2 exp2   dS  |                            add add add  |
//
// Shared memory (MainSmem)      K, V block_n | Q, dO stages x block_m | P, dS block_m x block_n | lse, delta stages x block_m
// Tiles are swizzled (SharedTile): ldmatrix, the copies and the stores of P and dS have no bank conflicts.
//
// A tile that the causal diagonal or a window cuts runs separate code, which skips hidden parts; all other tiles run without a branch.
// Where registers are short, S and dP are computed in parts, and dQ is multiplied after dK and added all at once.
//
// Bound by the bytes that ldmatrix reads from shared memory: tiles_mma_sm80.h chooses tiles by these bytes per mma.
#pragma once

#include "attention/backward/mma_sm80/side.cuh"
#include "attention/backward/mma_sm80/warp.cuh"
#include "device/launch.h"

namespace fa {
namespace {

// Whether some call takes this tile on GPUs whose tiles may take so many bytes.
template <typename T, int kD, int kDv, MmaSm kSm>
constexpr bool tile_is_taken(size_t tile_memory) {
    constexpr const BackwardTile &kTile = kBackwardTileOf<kD, kDv, kSm>, &k228 = kBackwardTileOf<kD, kDv, MmaSm::k228>;
    constexpr bool kHas228 = !(k228 == kBackwardTileOf<kD, kDv, MmaSm::k164>);
    const bool fits = mma_tile_fits(kTile, sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, kSm>, kD, kDv>), tile_memory);
    const bool is_sm90 = tile_memory > kMostSharedSm80;
    if (kSm == MmaSm::kShort) return is_sm90 && fits && !(kTile == k228);
    if (kSm == MmaSm::k228) return is_sm90 && fits && kHas228;
    return kSm != MmaSm::k164 || (fits && !(is_sm90 && kHas228));
}

template <typename T, int kD, int kDv, MmaSm kSm, Scores kScores>
__global__ void __launch_bounds__(kBackwardTileOf<kD, kDv, kSm>.warps * 32, kBackwardTileOf<kD, kDv, kSm>.blocks_per_sm)
    gradient_kernel(const __grid_constant__ MmaBackwardParams params) {
#if defined(__CUDA_ARCH__)
    if constexpr (!is_compiled(kTarget, tile_is_taken<T, kD, kDv, kSm>)) {
        __trap();
        return;
    }
#endif
    using Warp = MainWarp<T, kD, kDv, kSm, kScores>;
    constexpr int kBlockM = Warp::kBlockM, kBlockN = Warp::kBlockN, kColumnsKv = Warp::kColumnsKv;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<typename Warp::Smem*>(shared);
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;

    const BackwardWork work = work_of(params, blockIdx.x, kBlockN);
    const Sequence s = sequence_of(p, work.b);
    if (work.key0 >= s.seqlen_k) return;
    const KeyRange keys = keys_seen(p, s), rows = rows_seeing(p, s, work.key0, min(work.key0 + kBlockN, s.seqlen_k) - 1);
    if (threadIdx.x == 0) {
        smem.seqlen_q = s.seqlen_q, smem.seqlen_k = s.seqlen_k, smem.shift = s.shift;
        smem.work = work, smem.rows = rows, smem.whole_rows = rows_seeing_all(p, s, work.key0, work.key0 + kBlockN - 1);
        smem.first_tile = rows.begin / kBlockM, smem.last_tile = (rows.end - 1) / kBlockM;
        smem.q_rows = static_cast<const T*>(p.q.data) + s.q;
        smem.dout_rows = static_cast<const T*>(backward.dout.data) + gradients_of(backward, work.b).dout;
        const int64_t place = workspace_tile(params, kBlockM, work.b, 0, 0);
        smem.sums = params.workspace.dq + place * (kBlockM * kD), smem.stats = params.workspace.rows + place * (2 * kBlockM);
        smem.large = reinterpret_cast<const float2*>(params.workspace.large) + place * kBlockM;
        smem.some_large = *params.workspace.some_large == kSomeLarge;
    }
    if constexpr (Warp::kGeneral) {
        if (p.intervals.data && threadIdx.x < 32) Warp::find_bounds(p, smem, work, s.seqlen_k);
    }
    __syncthreads();
    Warp warp(params, smem, {work.head_k * p.group, rows.begin / kBlockM}, rows.end > rows.begin ? (work.head_k + 1) * p.group : 0);
    if constexpr (Warp::kGeneral) warp.step = warp.seen_from(warp.step);
    typename Warp::GradientK dK;
    typename Warp::GradientV dV;
    clear(dK), clear(dV);

    if (warp.step.head < warp.end_head) warp.load_first(work, s, keys);
    if (Warp::kGeneral && p.may_hide_keys() && warp.step.head < warp.end_head) warp.zero_hidden_keys(work, s, rows);
    warp.walk(dK, dV);

    const BackwardWork done = work_of(params, opaque(blockIdx.x), kBlockN);  // computed again: the loop has no registers for it
    const int thread = opaque(threadIdx.x), seqlen_k = sequence_of(p, done.b).seqlen_k;
    const int row = done.key0 + thread / 32 / kColumnsKv * (16 * Warp::kMmasKv), column = thread / 32 % kColumnsKv;
    const GradientSequence to = gradients_of(backward, done.b);
    T* dk = static_cast<T*>(backward.dk.data) + to.dk + done.head_k * backward.dk.head;
    T* dv = static_cast<T*>(backward.dv.data) + to.dv + done.head_k * backward.dv.head;
    store_rows<T, kColumnsKv>(dK, p.scale, dk, backward.dk.row, row, seqlen_k, column, p.headdim, params.aligned_dk, backward.accumulate,
                              thread % 32);
    store_rows<T, kColumnsKv>(dV, 1.0f, dv, backward.dv.row, row, seqlen_k, column, p.headdim_v, params.aligned_dv, backward.accumulate,
                              thread % 32);
}

// ---- launches ----

// The tiles in the workspace of all sequences of a head, and the bytes of the workspace.
inline int workspace_tiles(const AttentionParams& p, int block_m) {
    return p.cu_seqlens_q ? p.total_q / block_m + p.batch : (p.seqlen_q + block_m - 1) / block_m * p.batch;
}
inline size_t workspace_bytes(const BackwardParams& b, int block_m, int d) {
    return size_t(workspace_tiles(b.forward, block_m)) * b.forward.nheads * block_m * (b.deterministic ? 4 : d + 4) * sizeof(float) +
           sizeof(int) + 128;
}

// Where the parts of the workspace lie.
inline BackwardWorkspace workspace_of(const BackwardParams& b, int block_m, int d) {
    BackwardWorkspace w{};
    w.tiles = workspace_tiles(b.forward, block_m);
    const int64_t rows = int64_t(w.tiles) * b.forward.nheads * block_m;
    w.dq = static_cast<float*>(align_up(b.forward.workspace, 128));
    w.rows = w.dq + (b.deterministic ? 0 : rows * d);
    w.large = w.rows + 2 * rows;
    w.some_large = reinterpret_cast<int*>(w.large + 2 * rows);
    return w;
}

template <typename T, int kD, int kDv>
cudaError_t launch_bucket(const BackwardParams& backward, size_t tile_memory, cudaStream_t stream) {
    const AttentionParams& p = backward.forward;
    MmaBackwardParams params{};
    params.backward = backward, params.scale_log2 = backward.forward.scale * kLog2e;
    find_aligned_rows<T>(params);
    params.aligned_out = aligned_rows<T>(p, p.out, p.nheads, p.headdim_v);
    const bool aligned = params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_dout;
    const bool general = p.general_scores() || !(p.scale > 0);

    const auto run = [&](auto sm, auto scores) {
        constexpr MmaSm kSm = decltype(sm)::value;
        constexpr Scores kScores = decltype(scores)::value;
        constexpr const BackwardTile& kTile = kBackwardTileOf<kD, kDv, kSm>;
        params.tiles_q = (p.seqlen_q + kTile.block_m - 1) / kTile.block_m,
        params.tiles_k = (p.seqlen_k + kTile.block_n - 1) / kTile.block_n;
        params.workspace = workspace_of(backward, kTile.block_m, kD);
        const int64_t heads = int64_t(p.nheads_k) * p.batch;
        params.natural = kScores == Scores::kGeneral;
        const int64_t row_bytes = (kD + kDv) * int64_t(sizeof(T)) + kD * int64_t(sizeof(float));
        const int64_t section = heads_per_section(p.seqlen_q, p.group * row_bytes, 1);
        params.section = int(section < heads ? section : heads);
        const unsigned blocks_q = unsigned(params.tiles_q * p.nheads) * p.batch, blocks_k = unsigned(params.tiles_k * heads);
        cudaError_t error = cudaSuccess;
        if (blocks_q) error = launch_kernel(before_kernel<T, kTile.block_m, kD, kDv>, blocks_q, kSideThreads, 0, stream, params);
        if (error == cudaSuccess && blocks_k)
            error = launch_kernel(gradient_kernel<T, kD, kDv, kSm, kScores>, blocks_k, kTile.warps * 32,
                                  sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, kSm>, kD, kDv>), stream, params);
        if (error != cudaSuccess || !blocks_q) return error;
        if (!backward.deterministic) return launch_kernel(after_kernel<T, kD, kDv, kSm>, blocks_q, kTile.warps * 32, 0, stream, params);
        params.block_m = kTile.block_m;
        params.tiles_dq = (p.seqlen_q + kDqRows - 1) / kDqRows;
        return launch_kernel(dq_kernel<T, kD, kDv, kScores>, unsigned(params.tiles_dq * p.nheads) * p.batch, kDqThreads,
                             sizeof(DqSmem<T, kD, kDv>), stream, params);
    };
    const auto serves = [&](auto sm) { return !general && aligned && tile_is_taken<T, kD, kDv, decltype(sm)::value>(tile_memory); };
    using K228 = std::integral_constant<MmaSm, MmaSm::k228>;
    using K164 = std::integral_constant<MmaSm, MmaSm::k164>;
    using Short = std::integral_constant<MmaSm, MmaSm::kShort>;
    using Any = std::integral_constant<MmaSm, MmaSm::kAny>;
    using Plain = std::integral_constant<Scores, Scores::kPlain>;
    using General = std::integral_constant<Scores, Scores::kGeneral>;
    constexpr const BackwardTile &k228 = kBackwardTileOf<kD, kDv, MmaSm::k228>, &k164 = kBackwardTileOf<kD, kDv, MmaSm::k164>;
    constexpr const BackwardTile& kShort = kBackwardTileOf<kD, kDv, MmaSm::kShort>;
    if constexpr (!(kShort == k228)) {  // made for sm_90: needs more than the 163 KB of sm_80
        const bool is_short = backward_mma_is_short(p.window_right == 0, p.seqlen_k);
        if (is_short && serves(Short{})) return run(Short{}, Plain{});
    }
    if constexpr (!(k228 == k164)) {
        if (serves(K228{})) return run(K228{}, Plain{});
    }
    static_assert(
        sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, MmaSm::kAny>, kD, kDv>) <= 99 * 1024 && sizeof(DqSmem<T, kD, kDv>) <= 99 * 1024,
        "a block of sm_86 and 89 has no more");
    if (serves(K164{})) return run(K164{}, Plain{});
    return general ? run(Any{}, General{}) : run(Any{}, Plain{});
}

template <typename T>
cudaError_t launch(const BackwardParams& b, size_t tile_memory, cudaStream_t stream) {
    return with_backward_bucket(b.forward.headdim, b.forward.headdim_v, [&](auto d, auto dv) {
        return launch_bucket<T, decltype(d)::value, decltype(dv)::value>(b, tile_memory, stream);
    });
}

}  // namespace
}  // namespace fa
