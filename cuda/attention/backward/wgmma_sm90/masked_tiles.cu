// wgmma_sm90/masked_tiles.cu: the small kernels before the main kernel of the Hopper backward under masks by blocks and masks of pairs,
// after that of attention/common/seen_blocks.cu:
//     states   in order: for each tile and block of keys, whether they meet, and how many blocks of lower keys the tile meets
//     walks    for each block of keys, the tiles that it meets, one after another, and the keys that no query sees
// Both read bits and are short. Each is launched while the one before ends, and so is the kernel that follows (rows.cu). Under masks by
// intervals, states come from bounds, walks list tiles alone, and launches are plain.
#include "attention/backward/wgmma_sm90/masked_tiles.cuh"
#include "attention/common/seen_blocks.cuh"
#include "attention/common/tile_intervals.h"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kKeys = 2 * kSeenBlock;  // of a block
struct TilesParams {
    AttentionParams attention;
    MaskedTiles to;
    IntervalBounds bounds;
};

// What the heads of a walk see together.
template <int kRows>
__device__ __forceinline__ TileSeen seen_of_walk(const MaskedTiles& to, const VisibleBand& band, int b, int head_k, int m, int block) {
    const WalkEntries entries = entries_of_walk(to, b, head_k);
    TileSeen all{};
#pragma unroll 1
    for (int x = 0; x < entries.count; ++x) add_seen<kRows>(all, to.seen, band, entries.first + x, m, block);
    return all;
}

// Under masks by intervals: whether rows of a tile may see a key of a block, in any of the heads.
template <int kRows>
__device__ __forceinline__ bool meets_by_intervals(const TilesParams& params, const VisibleBand& band, int b, int head_k, int m,
                                                   int block) {
    const int row0 = m * kRows * kSeenBlock, last = min(row0 + kRows * kSeenBlock, band.seqlen_q) - 1;
    return params.bounds.of_group<kKeys>(params.attention, b, head_k, block).seen_by(row0, last) != Seen::kNothing;
}

// A warp for each tile.
template <int kRows, bool kIntervals>
__global__ void __launch_bounds__(kThreads) tile_states_kernel(const __grid_constant__ TilesParams params) {
    launch_dependents();
    grid_dependency_wait();
    const MaskedTiles& to = params.to;
    const int lane = threadIdx.x % 32;
    const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int m = int(index % to.tiles_q), head_k = int(index / to.tiles_q % to.heads_k), b = int(index / to.tiles_q / to.heads_k);
    if (b >= to.batches) return;
    const VisibleBand band = visible_band(params.attention, sequence_of(params.attention, b));
    const Range blocks = key_blocks_of(band, m * kRows * kSeenBlock, kRows * kSeenBlock, kKeys);
    int before = 0;
#pragma unroll 1
    for (int block0 = 0; block0 < to.key_blocks; block0 += 32) {
        const int block = block0 + lane;
        bool meets = false, cut = false;
        if (block >= blocks.begin && block < blocks.end) {
            if constexpr (kIntervals) {
                meets = meets_by_intervals<kRows>(params, band, b, head_k, m, block);
            } else {
                const TileSeen seen = seen_of_walk<kRows>(to, band, b, head_k, m, block);
                meets = seen.anything(), cut = seen.cut;
            }
        }
        __syncwarp();
        const uint32_t meet = __ballot_sync(~0u, meets);
        if (block < to.key_blocks)
            to.tiles[to.walk_of(b, head_k, block) * to.tiles_q + m] = tile_state(meets, before + __popc(meet & ((1u << lane) - 1)), cut);
        before += __popc(meet);
    }
}

// A warp for each walk. kStates: tile_states_kernel has written which tiles meet it.
template <int kRows, bool kIntervals, bool kStates>
__global__ void __launch_bounds__(kThreads) walks_kernel(const __grid_constant__ TilesParams params) {
    launch_dependents();
    grid_dependency_wait();
    const MaskedTiles& to = params.to;
    const int lane = threadIdx.x % 32;
    const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int block = int(index % to.key_blocks), head_k = int(index / to.key_blocks % to.heads_k),
              b = int(index / to.key_blocks / to.heads_k);
    if (b >= to.batches) return;
    const VisibleBand band = visible_band(params.attention, sequence_of(params.attention, b));
    const Range met = kStates ? Range{0, to.tiles_q} : query_tiles_of(band, block * kKeys, kRows * kSeenBlock, kKeys);
    uint32_t* const tiles = to.tiles + index * to.tiles_q;
    uint64_t keys[2] = {};
    int count = 0;
#pragma unroll 1
    for (int m0 = met.begin; m0 < met.end; m0 += 32) {  // in place: no state is overwritten before it has been read
        const int m = m0 + lane;
        uint32_t state = kStates && m < met.end ? tiles[m] : 0;
        TileSeen seen{};
        if constexpr (!kIntervals)
            if (kStates ? state != 0 : m < met.end) seen = seen_of_walk<kRows>(to, band, b, head_k, m, block);
        if constexpr (!kStates) state = tile_state(seen.anything(), 0, seen.cut);
        keys[0] |= seen.keys[0], keys[1] |= seen.keys[1];
        const uint32_t meet = __ballot_sync(~0u, state != 0);
        if (state) tiles[count + __popc(meet & ((1u << lane) - 1))] = tile_of_state(m, state).packed();
        __syncwarp();
        count += __popc(meet);
    }
    if (lane == 0) to.walks[index].count = count;
    if constexpr (!kIntervals) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const uint32_t seen = __reduce_or_sync(~0u, uint32_t(keys[x / 2] >> x % 2 * 32));
            const uint32_t unseen = ~seen & uint32_t(bits_of_range<32>(0, band.seqlen_k, block * kKeys + x * 32));
            if (lane == 0) to.walks[index].unseen[2 * x] = uint16_t(unseen), to.walks[index].unseen[2 * x + 1] = uint16_t(unseen >> 16);
        }
    }
}

// Fills the lists of params.to. kStates: with the number of blocks before each.
template <bool kIntervals, bool kStates>
cudaError_t launch_lists(const TilesParams& params, bool short_tiles, cudaStream_t stream) {
    const MaskedTiles& to = params.to;
    const auto launch = [&](auto* kernel, int64_t warps) {
        return launch_kernel(kernel, unsigned(ceil_div(warps, kWarps)), kThreads, 0, stream, params, !kIntervals);
    };
    const int64_t states = int64_t(to.batches) * to.heads_k * to.tiles_q;
    if (states == 0 || walks_of(to) == 0) return cudaSuccess;
    if constexpr (kStates)
        if (cudaError_t error = launch(short_tiles ? tile_states_kernel<1, kIntervals> : tile_states_kernel<2, kIntervals>, states))
            return error;
    return launch(short_tiles ? walks_kernel<1, kIntervals, kStates> : walks_kernel<2, kIntervals, kStates>, walks_of(to));
}

}  // namespace

cudaError_t launch_interval_tiles(const AttentionParams& p, const BackwardPlan& plan, const IntervalBounds& bounds, void* workspace,
                                  MaskedTiles* to, cudaStream_t stream) {
    *to = interval_tiles(p, plan);
    place_masked_tiles(to, workspace);
    return launch_lists<true, true>({p, *to, bounds}, plan.block_m == kSeenBlock, stream);
}

cudaError_t launch_masked_tiles(const AttentionParams& p, const BackwardPlan& plan, bool in_order, void* workspace, MaskedTiles* to,
                                cudaStream_t stream) {
    *to = masked_tiles(p, plan);
    void* const rest = place_masked_tiles(to, workspace);
    if (cudaError_t error = launch_seen_blocks(p, PairWords::kOfKeys, rest, &to->seen, stream)) return error;
    const TilesParams params{p, *to, {}};
    const bool short_tiles = plan.block_m == kSeenBlock;
    return in_order ? launch_lists<false, true>(params, short_tiles, stream) : launch_lists<false, false>(params, short_tiles, stream);
}

}  // namespace fa
