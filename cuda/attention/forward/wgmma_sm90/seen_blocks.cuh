// wgmma_sm90/seen_blocks.cuh: masks by blocks and masks of pairs in the loops of plans with options. The producer decides what becomes of a
// tile of keys, from the bits that a small kernel has written (attention/common/seen_blocks.cu):
//
//     hidden  no row of the item sees any of its keys: the tile is not loaded, and the consumers never hear of it
//     whole   every row sees every key: the consumers treat it as in a call without a mask
//     cut     a warpgroup of which no row sees any of the keys passes over the tile. In the others a thread has a word of 64 bits for
//             each of its two rows and each 64 keys of the tile. A warpgroup's rows are one block: where the block is hidden or whole,
//             all bits are 0 or 1, and only where it is cut are they read from memory
//
// Keys that no row of the item sees have their V zeroed, as under a mask of keys. A window or causal hides what lies outside it, as in all
// plans with options.
#pragma once

#include <climits>

#include "attention/common/seen_blocks.h"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"

namespace fa {

// ---- the producer, a whole warp ----

// Called by one thread for each item.
template <int kBlockN>
__device__ __forceinline__ void describe_item(const AttentionParams&, const SeenBlocks& blocks, const ForwardWork& w, int slot,
                                              SeenBlockTiles& known) {
    const int64_t entry = blocks.shape.entry(w.batch, w.head);
    const int m = w.row0 / kSeenBlock;
    known.words = blocks.words + blocks.shape.word(entry, m);
    known.keys = blocks.keys ? blocks.keys + blocks.shape.block(entry, m) : nullptr;
    known.from = INT_MAX;
    known.pairs[slot] = blocks.pairs ? blocks.pairs + blocks.shape.block(entry, m) * kSeenBlock : nullptr;
}
template <int kBlockM, int kBlockN>
__device__ __forceinline__ BlocksOfTile blocks_of_tile(const SeenBlocks& blocks, const ForwardWork& w, int n, const SeenBlockTiles& known) {
    constexpr int kRows = kBlockM / kSeenBlock, kKeys = kBlockN / kSeenBlock;
    static_assert(kBlockM % kSeenBlock == 0 && kBlockN % kSeenBlock == 0, "tiles are whole blocks");
    const int rows = (w.seqlen_q - w.row0 + kSeenBlock - 1) / kSeenBlock, keys = (w.seqlen_k + kSeenBlock - 1) / kSeenBlock;
    return blocks_of_tile<kRows, kKeys>(known.words, blocks.shape.words_of_row(), n * kKeys, rows, keys);
}
// Looks at the 32 tiles of the item that end with tile n, one in each lane. Returns n.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int look_at_tiles(const SeenBlocks& blocks, const ForwardWork& w, int n, SeenBlockTiles& known) {
    const int own = n - 31 + opaque(int(threadIdx.x));
    BlocksOfTile tile{0, 0, false};
    if (own >= w.first_tile && own * kBlockN < w.seqlen_k) tile = blocks_of_tile<kBlockM, kBlockN>(blocks, w, own, known);
    const uint32_t some = __ballot_sync(~0u, tile.some),
                   cut = __ballot_sync(~0u, !tile.is_whole<kBlockM / kSeenBlock, kBlockN / kSeenBlock>());
    known.from = n - 31, known.seen = some, known.cut = cut;
    __syncwarp();
    return n;
}
// Writes to the entry of tile n what the consumers need to know of its blocks, and which of its keys no row of the item sees. `cut`:
// whether a block is hidden or cut. In a whole tile causal or a window may hide a key.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ void describe_tile(const AttentionParams&, const SeenBlocks& blocks, const ForwardWork& w, int n, bool cut,
                                              const SeenBlockTiles& known, BlockKeyTile& tile) {
    constexpr int kRows = kBlockM / kSeenBlock, kKeys = kBlockN / kSeenBlock;
    const int last_row = min(w.row0 + kBlockM, w.seqlen_q) - 1;
    if (!cut && (n + 1) * kBlockN - 1 <= last_row + w.right && n * kBlockN >= w.row0 + w.left) return;
    const int lane = opaque(int(threadIdx.x));
    const BlocksOfTile own = blocks_of_tile<kBlockM, kBlockN>(blocks, w, n, known);
    tile.seen = own.seen, tile.pairs = own.cut;
    uint64_t keys_of_block = 0;  // lane x: of block x of the tile
    if (lane < kRows * kKeys) {
        if (own.cut >> lane & 1) keys_of_block = known.keys[lane / kKeys * blocks.shape.key_blocks + n * kKeys + lane % kKeys];
        else keys_of_block = own.seen >> lane & 1 ? ~uint64_t(0) : 0;
    }
    uint32_t any = 0;
#pragma unroll 1
    for (int q = 0; q < 4; ++q) {  // the lane's key of word q: KeyTile::hidden
        const int place = lane / 2 * 8 + lane % 2 + 2 * q, key = n * kBlockN + place, column = place / kSeenBlock % kKeys;
        // The window leaves these rows of the item to the key.
        const int first = max(0, key - w.right - w.row0), last = min(last_row - w.row0, key - w.left - w.row0);
        const bool hidden = hides_key<kRows, kKeys>(column, place % kSeenBlock, first, last,
                                                    [&](int block) { return __shfl_sync(~0u, keys_of_block, block); });
        const uint32_t word = __ballot_sync(~0u, hidden && place < kBlockN && key < w.seqlen_k);
        if (lane == q) tile.hidden[q] = word;
        any |= word;
    }
    tile.hides = any != 0;
}

// ---- the consumers ----

// What blocks, pairs and windows do to the tiles of one item. The interface of TileOptions.
template <WgmmaPlanId kId>
struct TileBlocks {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr int kBlockN = kPlan.block_n, kKeys = kBlockN / kSeenBlock;
    using Scores = float[kBlockN / 2];
    using Words = uint32_t[2][kBlockN / 32];  // of the thread's two rows, 32 keys each
    const AttentionParams& p;
    const ForwardWork& w;
    const Consumer& me;
    const SeenBlocks& blocks;
    const uint64_t* const& pairs;  // of the item's rows
    Words& words;
    const MaskedTiles masked;

    __device__ __forceinline__ bool has_edge(int n) const { return n >= masked.right_tile || n < masked.left_tile; }
    __device__ __forceinline__ bool is_plain(int cut, int n) const { return !(cut || has_edge(n)); }
    // Whether the tile's keys must be compared for this warpgroup's rows.
    __device__ __forceinline__ bool is_cut(const BlockKeyTile& tile) const {
        constexpr uint32_t kAll = (1u << kKeys) - 1;
        return tile.cut && ((tile.seen >> me.wg * kKeys & kAll) != kAll || (tile.pairs >> me.wg * kKeys & kAll) != 0);
    }
    // Whether a row of this warpgroup may see a key of the tile.
    __device__ __forceinline__ bool sees(const BlockKeyTile& tile) const {
        return !tile.cut || (tile.seen >> me.wg * kKeys & ((1u << kKeys) - 1));
    }
    // Begins to read the words of tile n.
    __device__ __forceinline__ void fetch(const BlockKeyTile& tile, int n) const {
        if (!is_cut(tile)) return;
        const Consumer at = me.rare();
        const uint64_t* of_row = pairs + (int64_t(me.wg) * blocks.shape.key_blocks + n * kKeys) * kSeenBlock + at.row() % 64;
#pragma unroll
        for (int x = 0; x < kKeys; ++x) {
            const uint32_t all = tile.seen >> (me.wg * kKeys + x) & 1 ? ~0u : 0u;
            const bool reads = tile.pairs >> (me.wg * kKeys + x) & 1;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                words[r][2 * x] = words[r][2 * x + 1] = all;
                if (reads) {
                    const uint2 word = __ldg(reinterpret_cast<const uint2*>(of_row + x * kSeenBlock + 8 * r));
                    words[r][2 * x] = word.x, words[r][2 * x + 1] = word.y;
                }
            }
        }
    }
    // Moves the bits of the thread's keys to where shows() has them.
    __device__ __forceinline__ void align(const BlockKeyTile& tile) const {
        if (!is_cut(tile)) return;
        const int first = 2 * me.rare().quad();
#pragma unroll
        for (int x = 0; x < kBlockN / 32; ++x) words[0][x] >>= first, words[1][x] >>= first;
    }
    // Whether element i of the scores is seen: key 8 (i / 4) + 2 quad + i % 2.
    __device__ __forceinline__ bool shows(int i) const { return words[i / 2 % 2][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1; }

    // Whether the maximum of the tile must be found: a row may see its first key.
    __device__ __forceinline__ bool is_exact(const BlockKeyTile&, int n, int /* before */, const RowStatistics& rows) const {
        return n >= masked.right_tile || __any_sync(~0u, rows.row_max[0] == -INFINITY || rows.row_max[1] == -INFINITY);
    }
    __device__ __forceinline__ void apply(Scores& S, const BlockKeyTile& tile, int n) const {
        if (is_cut(tile)) {
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i)
                if (!shows(i)) S[i] = -INFINITY;
        }
        mask_scores<kId>(S, w, masked, n, me);
    }
    __device__ __forceinline__ InExponent prepare(Scores& S, const BlockKeyTile& tile, int n) const {
        mask_scores<kId>(S, w, masked, n, me);
        return is_cut(tile) ? InExponent::kMask : InExponent::kNothing;
    }
    template <typename Pack>
    __device__ __forceinline__ void take_exponentials(Scores& S, float scale, const RowStatistics& rows, const BlockKeyTile&, int /* n */,
                                                      int /* before */, InExponent option, float (&sum)[2], const Pack& pack) const {
        if (option == InExponent::kNothing) {
            exponentials(S, exponent_of_products(scale), rows.row_max, sum);
            pack();
            return;
        }
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) base[r] = rows.row_max[r] == -INFINITY ? 0.0f : rows.row_max[r];
        exponentials_of(S, sum, [&](float x, int i, int r) { return shows(i) ? fmaf(x, scale, -base[r]) : -INFINITY; });
        pack();
    }
};

}  // namespace fa
