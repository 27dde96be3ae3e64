// wgmma_sm90/masked_tiles.cu: the small kernels before the main kernel of the Hopper backward under masks by blocks and masks of pairs. They
// read the mask once and write what masked_tiles.h describes:
//     pairs    masks of pairs: what each tile sees, and the bits of tiles that are cut, as the threads of the main kernel hold S
//     states   for each tile and block of keys, whether they meet, and how many blocks of lower keys the tile meets
//     walks    for each block of keys, the tiles that it meets, one after another, and the keys that no query sees
// The first is bound by memory, and the others are short.
#include "attention/backward/wgmma_sm90/masked_tiles.cuh"
#include "device/launch.h"

namespace fa {
namespace {

struct MasksParams {
    AttentionParams attention;
    MaskedTiles to;
};
constexpr int kKeys = 128;  // of a block

// ---- pairs: a block for each tile ----

constexpr int kPairsWarps = kMaskedThreads / 32;

// Four bytes of a row from `key` on; zeros past the end.
__device__ __forceinline__ uint32_t load_four(const uint8_t* row, int key, int end, bool aligned) {
    if (aligned && key + 4 <= end) return *reinterpret_cast<const uint32_t*>(row + key);
    uint32_t bytes = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (key + e < end) bytes |= uint32_t(row[key + e]) << 8 * e;
    return bytes;
}

template <int kBlockM>
__global__ void __launch_bounds__(kMaskedThreads) masked_pairs_kernel(const __grid_constant__ MasksParams params) {
    // Bit l of word e is key 4 l + e.
    __shared__ uint32_t bits[kBlockM][4];
    __shared__ uint32_t keys[4];
    const AttentionParams& p = params.attention;
    const MaskedTiles& to = params.to;
    const int block = int(blockIdx.x % unsigned(to.blocks)), rest = int(blockIdx.x / unsigned(to.blocks));
    const int m = rest % to.tiles_q, entry = rest / to.tiles_q % to.heads, b = rest / to.tiles_q / to.heads;
    const int row0 = m * kBlockM, key0 = block * kKeys, head = entry * to.heads_of_entry(p);
    const VisibleBand band = visible_band(p, sequence_of(p, b));
    const Range meets = query_tiles_of(band, key0, kBlockM, kKeys);
    TileSeen* const seen = to.seen + blockIdx.x;
    if (m < meets.begin || m >= meets.end) {
        if (threadIdx.x == 0) *seen = {};
        return;
    }
    if (threadIdx.x < 4) keys[threadIdx.x] = 0;
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key = key0 + 4 * lane;
    const uint8_t* const attend = static_cast<const uint8_t*>(p.mask.data) + b * p.mask.batch + head * p.mask.head;
    const bool aligned = ((reinterpret_cast<uintptr_t>(attend) | uintptr_t(p.mask.row)) & 3) == 0;
    uint32_t own = 0;  // those of the four keys that a row of this warp sees
    bool cut = false;
    constexpr int kRows = 8;  // at a time
#pragma unroll 1
    for (int i0 = warp; i0 < kBlockM; i0 += kRows * kPairsWarps) {
        uint32_t four[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = row0 + i0 + i * kPairsWarps;
            four[i] = row < band.seqlen_q ? load_four(attend + row * p.mask.row, key, band.seqlen_k, aligned) : 0;
            if (p.blocks.data && row < band.seqlen_q && key < band.seqlen_k && block_hides(p, b, head, row, key)) four[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = row0 + i0 + i * kPairsWarps;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool sees = four[i] >> 8 * e & 0xFF;
                const uint32_t all = __ballot_sync(~0u, sees);
                if (lane == 0) bits[i0 + i * kPairsWarps][e] = all;
                if (sees && key + e >= row + band.left && key + e <= row + band.right) own |= 1u << e;
                cut = cut || (!sees && row < band.seqlen_q && key + e < band.seqlen_k);
            }
        }
    }
    if (own) atomicOr(&keys[lane / 8], own << lane % 8 * 4);
    cut = __syncthreads_or(cut);
    TileSeen result{{keys[0], keys[1], keys[2], keys[3]}, cut, 0};
    if (threadIdx.x == 0) *seen = result;
    // Heads that share a walk visit a tile together, even where one of them sees nothing.
    if (!cut || (!result.anything() && to.heads_of_walk() == 1)) return;

    const int first = key_of_element(threadIdx.x, 0);
#pragma unroll
    for (int u = 0; u < kBlockM / 64; ++u) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            if (i / 2 % 2) continue;
            // Keys `first` and first + 8 have the same word.
            const uint32_t both = bits[query_of_element(threadIdx.x, 32 * u + i)][first % 4] >> first / 4;
            word |= (both & 1) << i | (both >> 2 & 1) << (i + 2);
        }
        to.words[(int64_t(blockIdx.x) * kMaskedThreads + threadIdx.x) * (kBlockM / 64) + u] = word;
    }
}

// ---- states and walks: a warp for each tile, and for each block of keys ----

constexpr int kListThreads = 128;

// What the heads of a walk see together.
__device__ __forceinline__ TileSeen seen_together(const MasksParams& params, const VisibleBand& band, int b, int walk, int m, int block) {
    const AttentionParams& p = params.attention;
    const MaskedTiles& to = params.to;
    TileSeen all{};
#pragma unroll 1
    for (int x = 0; x < to.heads_of_walk(); ++x) {
        const int entry = walk * to.heads_of_walk() + x;
        const TileSeen own = to.seen ? to.seen[to.tile_of(b, entry, m, block)]
                                     : seen_by_blocks(p, band, b, entry * to.heads_of_entry(p), m * to.block_m, to.block_m, block * kKeys);
#pragma unroll
        for (int j = 0; j < 4; ++j) all.keys[j] |= own.keys[j];
        all.cut |= own.cut;
    }
    return all;
}

__global__ void __launch_bounds__(kListThreads) masked_states_kernel(const __grid_constant__ MasksParams params) {
    const MaskedTiles& to = params.to;
    const int lane = threadIdx.x % 32;
    const int64_t index = int64_t(blockIdx.x) * (kListThreads / 32) + threadIdx.x / 32;
    const int m = int(index % to.tiles_q), walk = int(index / to.tiles_q % to.heads_k), b = int(index / to.tiles_q / to.heads_k);
    if (b >= to.batches) return;
    const VisibleBand band = visible_band(params.attention, sequence_of(params.attention, b));
    const Range blocks = key_blocks_of(band, m * to.block_m, to.block_m, kKeys);
    int before = 0;
#pragma unroll 1
    for (int block0 = 0; block0 < to.blocks; block0 += 32) {
        const int block = block0 + lane;
        bool meets = block >= blocks.begin && block < blocks.end, cut = false;
        if (meets) {
            const TileSeen seen = seen_together(params, band, b, walk, m, block);
            meets = seen.anything(), cut = seen.cut;
        }
        __syncwarp();
        const uint32_t all = __ballot_sync(~0u, meets);
        if (block < to.blocks)
            to.tiles[to.walk_of(b, walk, block) * to.tiles_q + m] = tile_state(meets, before + __popc(all & ((1u << lane) - 1)), cut);
        before += __popc(all);
    }
}

__global__ void __launch_bounds__(kListThreads) masked_walks_kernel(const __grid_constant__ MasksParams params) {
    const MaskedTiles& to = params.to;
    const int lane = threadIdx.x % 32;
    const int64_t index = int64_t(blockIdx.x) * (kListThreads / 32) + threadIdx.x / 32;
    const int block = int(index % to.blocks), walk = int(index / to.blocks % to.heads_k), b = int(index / to.blocks / to.heads_k);
    if (b >= to.batches) return;
    const VisibleBand band = visible_band(params.attention, sequence_of(params.attention, b));
    uint32_t* const tiles = to.tiles + index * to.tiles_q;
    uint32_t keys[4] = {};
    int count = 0;
#pragma unroll 1
    for (int m0 = 0; m0 < to.tiles_q; m0 += 32) {  // in place: nothing is written beyond what has been read
        const int m = m0 + lane;
        const uint32_t state = m < to.tiles_q ? tiles[m] : 0;
        const uint32_t all = __ballot_sync(~0u, state != 0);
        if (state) {
            tiles[count + __popc(all & ((1u << lane) - 1))] = tile_of_state(m, state).packed();
            const TileSeen seen = seen_together(params, band, b, walk, m, block);
#pragma unroll
            for (int j = 0; j < 4; ++j) keys[j] |= seen.keys[j];
        }
        __syncwarp();
        count += __popc(all);
    }
    MaskedWalk result{};
    result.count = count;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        result.unseen[j] = ~__reduce_or_sync(~0u, keys[j]) & bits_between(0, band.seqlen_k - block * kKeys - 32 * j);
    if (lane == 0) to.walks[index] = result;
}

}  // namespace

cudaError_t launch_masked_tiles(const AttentionParams& p, const MaskedTiles& to, cudaStream_t stream) {
    const MasksParams params{p, to};
    const int64_t masks = int64_t(to.batches) * to.heads, walks = int64_t(to.batches) * to.heads_k;
    const auto warps = [](int64_t count) { return unsigned(ceil_div(count, kListThreads / 32)); };
    if (to.seen) {
        const auto kernel = to.block_m == 64 ? masked_pairs_kernel<64> : masked_pairs_kernel<128>;
        if (cudaError_t error =
                launch_kernel(kernel, unsigned(masks * to.tiles_q * to.blocks), kMaskedThreads, 0, stream, params))
            return error;
    }
    if (cudaError_t error = launch_kernel(masked_states_kernel, warps(walks * to.tiles_q), kListThreads, 0, stream, params)) return error;
    return launch_kernel(masked_walks_kernel, warps(walks * to.blocks), kListThreads, 0, stream, params);
}

}  // namespace fa
