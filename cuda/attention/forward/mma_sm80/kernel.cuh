// mma_sm80/kernel.cuh: FlashAttention-2 on tensor cores, for every GPU from sm_80 on, with every option. T is fp16 or bf16
// (mma_sm80/entry.cu, head dims up to 512), float with products in tf32 (mma_sm80/tf32.cu, head dims up to 256), or SplitFloat: float32
// with float32's accuracy (mma_sm80/float32.cu, head dims up to 512).
//
// One block of 2 to 8 warps computes 32 to 128 query rows of one head, as in flash_attn_minimal.cu. New against that rung:
//   - mma.sync computes S = Q K^T and O += P V. A warp owns 16 or 32 whole rows, and a row lies in the four lanes of a quad, so no softmax
//     needs another warp.
//   - P never leaves the registers: one or two accumulator tiles, rounded to T, are an A fragment (device/mma.cuh).
//   - cp.async copies the next K and V while this tile is computed; rows and columns that do not exist arrive as zeros.
//   - Shared memory is swizzled (SharedTile), so neither ldmatrix nor the copies have bank conflicts.
//   - exp2 with the scale folded in; masks only on tiles that a window or diagonal cuts; a warp skips tiles that none of its rows see.
//
// One tile of keys, two stages (|: block barrier)          and with one stage, in half the memory
//
//     copy     | K, V of the next tile  .  .  .  . |       copy     | V . . . . . | K of the next tile . . . |
//     tensor   |  S = Q K^T          O += P V      |       tensor   |  S = Q K^T  |            O += P V      |
//     ALU      |           max   exp2 exp2 exp2    |       ALU      |             |  max   exp2 exp2 exp2    |
//
// The exponentials of the next 16 keys are interleaved with the products of the current 16. A second block on the SM, or other warps, fill
// the remaining gaps.
//
// Shared memory (Smem)      Q block_m x d | K stages x block_n x d | V stages x block_n x dv | what each warp sees | visible keys
//
// Above head dim 256, the 16 rows of a warp do not leave registers for all columns of O. There a block computes one part of the columns, at
// most 256, and every part computes S again: half as many products again at head dim 512. (SplitFloat: mma_sm80/float32_wide.cu.)
//
// At head dims up to 128 the bound is how much of the softmax the products of other warps cover. At 256, where a warp has 16 rows, it is
// the bytes that ldmatrix reads. At 64, 128 and 256, tensor cores are about 54, 65 and 55 % busy and shared memory 42, 55 and 81 % (bf16,
// 4096 keys, H200). tiles_mma_sm80.h chooses the tiles. fp32 sums and statistics; results do not depend on timing.
#pragma once

#include "attention/forward/mma_sm80/warp.cuh"
#include "attention/kernels.h"
#include "device/launch.h"

namespace fa {
namespace {

template <int kMmas, int kTiles>
__device__ __forceinline__ void copy(const float (&from)[kMmas][kTiles][4], float (&to)[kMmas][kTiles][4]) {
#pragma unroll
    for (int x = 0; x < kMmas * kTiles * 4; ++x) to[x / 4 / kTiles][x / 4 % kTiles][x % 4] = from[x / 4 / kTiles][x / 4 % kTiles][x % 4];
}

// The walk of a block with infinity or NaN among its inputs, or a sum beyond float32. A function of its own with arrays of its own: the
// usual walk keeps its sums in registers.
template <typename Warp>
__device__ __noinline__ void walk_any(const MmaParams& params, typename Warp::SharedMemory& smem, typename Warp::Output& O,
                                      typename Warp::RowValues& row_max, typename Warp::RowValues& row_sum) {
    const GridPlace work = Warp::work_at(params, blockIdx.x);
    typename Warp::Places places;
    Warp warp(params, smem, places, work, sequence_of(params.attention, work.b));
    for (int r = 0; r < Warp::kRows; ++r) row_max[r] = -FLT_MAX, row_sum[r] = 0;
#pragma unroll 1
    for (int x = 0; x < int(sizeof O / sizeof(float)); ++x) (&O[0][0][0])[x] = 0;
    typename Warp::Queries Q;
    warp.load_first(Q);
    warp.template walk<SplitRange::kAny>(Q, O, row_max, row_sum);
}

// Pages of 16 bits have one large tile; at head dim 128 pages take registers that three blocks lack.
template <typename T, int kD, int kDv, KeyRows kKeyRows>
inline constexpr bool kHas228 = !(kTileOf<T, kD, kDv, MmaSm::k228> == kTileOf<T, kD, kDv, MmaSm::k164>) &&
                                !(kKeyRows == KeyRows::kInPages && (kD == 128 || sizeof(T) == 2));

// Whether some call takes this tile on GPUs whose tiles may take so many bytes.
template <typename T, int kD, int kDv, MmaSm kSm, KeyRows kKeyRows>
constexpr bool tile_is_taken(size_t tile_memory) {
    constexpr const MmaTile &kTile = kTileOf<T, kD, kDv, kSm>, &k228 = kTileOf<T, kD, kDv, MmaSm::k228>;
    const auto fits = [=](const MmaTile& tile, size_t bytes) { return mma_tile_fits(tile, bytes, tile_memory); };
    const bool fits_own = fits(kTile, sizeof(Smem<T, kTileOf<T, kD, kDv, kSm>, kD, kDv>));
    const bool takes_228 = tile_memory > kMostSharedSm80 && fits(k228, sizeof(Smem<T, kTileOf<T, kD, kDv, MmaSm::k228>, kD, kDv>));
    if (kSm == MmaSm::k228) return takes_228;
    if (kD > 256 && sizeof(T) == 2) {  // of 512 columns, the larger tile that fits
        if (kSm == MmaSm::k99) return !fits(kTileOf<T, kD, kDv, MmaSm::k164>, sizeof(Smem<T, kTileOf<T, kD, kDv, MmaSm::k164>, kD, kDv>));
        return fits_own;
    }
    if (kSm != MmaSm::k164) return true;
    // As many blocks of as many rows: whatever fills the GPU with these tiles fills it with those.
    const bool as_large = kHas228<T, kD, kDv, kKeyRows> && k228.block_m == kTile.block_m && k228.blocks_per_sm == kTile.blocks_per_sm;
    return fits_own && !(takes_228 && as_large);
}

template <typename T, int kD, int kDv, MmaSm kSm, Options kOptions, KeyRows kKeyRows>
__global__ void __launch_bounds__(kTileOf<T, kD, kDv, kSm>.warps * 32, kTileOf<T, kD, kDv, kSm>.blocks_per_sm)
    attention_kernel(const __grid_constant__ MmaParams params) {
#if defined(__CUDA_ARCH__)
    if constexpr (!is_compiled(kTarget, tile_is_taken<T, kD, kDv, kSm, kKeyRows>)) {
        __trap();
        return;
    }
#endif
    using Warp = ForwardWarp<T, kD, kDv, kSm, kOptions, kKeyRows>;
    if constexpr (Warp::kSplit) {  // a word in the workspace may say that another kernel has served the call
        const int* const wanted = static_cast<const int*>(params.attention.workspace);
        if (wanted && *wanted == 0) return;
    }
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<typename Warp::SharedMemory*>(shared);
    const GridPlace work = Warp::work_at(params, blockIdx.x);
    const Sequence s = sequence_of(params.attention, work.b);
    if (work.query_tile * Warp::kBlockM >= s.seqlen_q) return;

    typename Warp::Places places;
    Warp warp(params, smem, places, work, s);
    typename Warp::Output O = {};
    typename Warp::RowValues row_max, row_sum;
#pragma unroll
    for (int r = 0; r < Warp::kRows; ++r) row_max[r] = -FLT_MAX, row_sum[r] = 0;
    typename Warp::Queries Q;
    if (warp.first_tile <= warp.last_tile) warp.load_first(Q);
    warp.walk(Q, O, row_max, row_sum);
    if constexpr (Warp::kSplit) {
        if (__syncthreads_or(!warp.is_finite(O, row_sum))) {  // rare: infinity or NaN among the inputs, or a sum beyond float32
            typename Warp::Output any_O;
            typename Warp::RowValues any_max, any_sum;
            walk_any<Warp>(params, smem, any_O, any_max, any_sum);
#pragma unroll
            for (int r = 0; r < Warp::kRows; ++r) row_max[r] = any_max[r], row_sum[r] = any_sum[r];
            copy(any_O, O);
        }
    }
    warp.finish(O, row_max, row_sum);
}

// ---- launches ----

template <typename T>
MmaParams mma_params(const AttentionParams& p) {
    MmaParams params{};
    params.attention = p;
    params.group = divisor_of(p.group), params.bounds_keys = p.window_left >= 0 || p.window_right >= 0 || p.chunk.divisor;
    params.aligned_q = aligned_rows<T>(p, p.q, p.nheads, p.headdim), params.aligned_out = aligned_rows<T>(p, p.out, p.nheads, p.headdim_v);
    params.aligned_k = aligned_rows<T>(p, p.k, p.nheads_k, p.headdim), params.aligned_v = aligned_rows<T>(p, p.v, p.nheads_k, p.headdim_v);
    return params;
}
// Only for scale > 0 is the maximum of the products also the maximum of the scores.
inline bool mma_needs_general(const AttentionParams& p) { return p.general_scores() || !(p.scale > 0); }

template <typename T, int kD, int kDv, MmaSm kSm, Options kOptions, KeyRows kKeyRows>
cudaError_t launch_tile(MmaParams& params, cudaStream_t stream) {
    constexpr const MmaTile& kTile = kTileOf<T, kD, kDv, kSm>;
    const AttentionParams& p = params.attention;
    const int64_t heads = int64_t(p.nheads) * p.batch, section = heads_per_section(p.seqlen_k, (kD + kDv) * int64_t(sizeof(T)), p.group);
    const int tiles = (p.seqlen_q + kTile.block_m - 1) / kTile.block_m;
    params.order = grid_order(tiles, p.nheads, p.batch, section);
    params.parts = (p.headdim_v + kDv - 1) / kDv;
    if (p.max_score)
        if (const cudaError_t error = clear_max_score(p, nullptr, stream)) return error;
    if constexpr (ForwardWarp<T, kD, kDv, kSm, kOptions, kKeyRows>::kSkips) {
        if (p.intervals.data)
            if (const cudaError_t error = launch_interval_bounds(p, kBoundsKeys, p.workspace, &params.bounds, stream)) return error;
    }
    return launch_kernel(attention_kernel<T, kD, kDv, kSm, kOptions, kKeyRows>, unsigned(tiles * heads * params.parts),
                         unsigned(kTile.warps * 32), sizeof(Smem<T, kTileOf<T, kD, kDv, kSm>, kD, kDv>), stream, params);
}

template <typename T, int kD, int kDv, KeyRows kKeyRows = KeyRows::kStrided>
cudaError_t launch_bucket(const AttentionParams& p, int multiprocessors, size_t tile_memory, cudaStream_t stream) {
    MmaParams params = mma_params<T>(p);
    const int64_t heads = int64_t(p.nheads) * p.deciding_batch();
    const bool general = mma_needs_general(p), aligned = params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_out;
    const auto serves = [&](auto sm) {
        constexpr MmaSm kSm = decltype(sm)::value;
        return aligned && tile_is_taken<T, kD, kDv, kSm, kKeyRows>(tile_memory) &&
               mma_tile_fills(kTileOf<T, kD, kDv, kSm>, heads, p.seqlen_q, multiprocessors);
    };
    if constexpr (sizeof(T) == 2) {
        constexpr const MmaTile &kShort = kTileOf<T, kD, kDv, MmaSm::kShort>, &k99 = kTileOf<T, kD, kDv, MmaSm::k99>;
        if (!general && aligned && p.seqlen_q <= 2 * kShort.block_m && p.deciding_keys() <= kShort.block_n)
            return launch_tile<T, kD, kDv, MmaSm::kShort, Options::kNone, kKeyRows>(params, stream);
        if (!general && aligned && mma_tile_runs_at_once(k99, heads, p.seqlen_q, p.deciding_keys(), multiprocessors))
            return launch_tile<T, kD, kDv, MmaSm::k99, Options::kNone, kKeyRows>(params, stream);
    }
    if (!general) {
        if constexpr (kHas228<T, kD, kDv, kKeyRows>) {
            if (serves(std::integral_constant<MmaSm, MmaSm::k228>{}))
                return launch_tile<T, kD, kDv, MmaSm::k228, Options::kNone, kKeyRows>(params, stream);
        }
        if (serves(std::integral_constant<MmaSm, MmaSm::k164>{}))
            return launch_tile<T, kD, kDv, MmaSm::k164, Options::kNone, kKeyRows>(params, stream);
    }
    if constexpr (sizeof(T) == 2) {
        if (!general && aligned) return launch_tile<T, kD, kDv, MmaSm::k99, Options::kNone, kKeyRows>(params, stream);
    }
    if (general) return launch_tile<T, kD, kDv, MmaSm::kAny, Options::kAll, kKeyRows>(params, stream);
    return launch_tile<T, kD, kDv, MmaSm::kAny, Options::kNone, kKeyRows>(params, stream);
}

template <typename T>
cudaError_t launch(const AttentionParams& p, int multiprocessors, size_t tile_memory, cudaStream_t stream) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (d <= 64) return launch_bucket<T, 64, 64>(p, multiprocessors, tile_memory, stream);
    if (d <= 96) return launch_bucket<T, 96, 96>(p, multiprocessors, tile_memory, stream);
    if (d <= 128) return launch_bucket<T, 128, 128>(p, multiprocessors, tile_memory, stream);
    if (d <= 192 && p.headdim_v <= 128) return launch_bucket<T, 192, 128>(p, multiprocessors, tile_memory, stream);
    if (d <= 192) return launch_bucket<T, 192, 192>(p, multiprocessors, tile_memory, stream);
    return launch_bucket<T, 256, 256>(p, multiprocessors, tile_memory, stream);
}

}  // namespace
}  // namespace fa
