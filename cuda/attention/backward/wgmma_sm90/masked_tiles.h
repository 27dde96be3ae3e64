// wgmma_sm90/masked_tiles.h: masks by blocks and masks of pairs in the Hopper backward, for host and device: which tiles of queries a block
// of 128 keys visits, and the bits of a thread's scores. attention/common/seen_blocks.h has what rows see by blocks of 64. Masks by
// intervals have the same lists where blocks take turns in order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/seen_blocks.h"

namespace fa {

// ---- the walk of a block of keys ----

// A tile that the block visits, in 32 bits. before: in order, of the blocks that visit the tile, those of lower keys; else 0. cut: whether
// some query may not see some key.
struct SeenTile {
    int32_t m, before;
    bool cut;

    FA_INLINED uint32_t packed() const { return uint32_t(m) << 16 | uint32_t(before) << 1 | uint32_t(cut); }
    static FA_INLINED SeenTile from(uint32_t packed) { return {int32_t(packed >> 16), int32_t(packed >> 1 & 0x7FFF), (packed & 1) != 0}; }
};
// The same while m is the place in an array of all tiles: 0 for a tile that is not visited.
FA_INLINED uint32_t tile_state(bool visits, int32_t before, bool cut) {
    return visits ? uint32_t(before) << 2 | uint32_t(cut) << 1 | 1u : 0u;
}
FA_INLINED SeenTile tile_of_state(int32_t m, uint32_t state) { return {m, int32_t(state >> 2), (state >> 1 & 1) != 0}; }

struct MaskedWalk {
    uint16_t unseen[8];  // bit j % 16 of number j / 16: no query sees key j. Keys past the end have no bit
    int32_t count;       // of its tiles
};

// In the workspace. Sequences with the same mask, and heads with the same keys, share their walks.
struct MaskedTiles {
    SeenBlocks seen;
    uint32_t* tiles;           // (batches, heads_k, key blocks, tiles_q): the tiles that each walk visits, upwards: SeenTile
    MaskedWalk* walks;         // (batches, heads_k, key blocks)
    int32_t batches, heads_k;  // each 1, or that of the call
    int32_t tiles_q, key_blocks;

    FA_INLINED int64_t walk_of(int32_t b, int32_t head_k, int32_t block) const {
        return (int64_t(batches == 1 ? 0 : b) * heads_k + (heads_k == 1 ? 0 : head_k)) * key_blocks + block;
    }
};
// The entries of the seen blocks that a walk looks at: those of its query heads. Parts of a group may share one (walk_parts.h).
struct WalkEntries {
    int64_t first;
    int32_t count;
};
FA_INLINED WalkEntries entries_of_walk(const MaskedTiles& t, int32_t b, int32_t head_k) {
    const SeenBlocksShape& shape = t.seen.shape;
    const int64_t batch = shape.batches == 1 ? 0 : int64_t(b) * shape.heads;
    return {batch + int64_t(head_k) * shape.heads / t.heads_k, shape.heads > t.heads_k ? shape.heads / t.heads_k : 1};
}
inline MaskedTiles masked_tiles(const AttentionParams& p, const BackwardPlan& plan) {
    MaskedTiles t{};
    t.seen.shape = seen_blocks_shape(p);
    t.batches = p.cu_seqlens_q ? p.batch : t.seen.shape.batches;  // lengths differ
    t.heads_k = t.seen.shape.heads == 1 ? 1 : p.nheads_k;
    t.tiles_q = (p.seqlen_q + plan.block_m - 1) / plan.block_m, t.key_blocks = (p.seqlen_k + plan.block_n - 1) / plan.block_n;
    return t;
}
// In the workspace the walks come first, then the tiles, then the seen blocks.
inline int64_t walks_of(const MaskedTiles& t) { return int64_t(t.batches) * t.heads_k * t.key_blocks; }
inline void* place_masked_tiles(MaskedTiles* t, void* memory) {
    t->walks = static_cast<MaskedWalk*>(align_up(memory, alignof(MaskedWalk)));
    t->tiles = reinterpret_cast<uint32_t*>(t->walks + walks_of(*t));
    return t->tiles + walks_of(*t) * t->tiles_q;
}
inline size_t masked_tiles_bytes(const AttentionParams& p, const BackwardPlan& plan) {
    const MaskedTiles t = masked_tiles(p, plan);
    return size_t(walks_of(t)) * (sizeof(MaskedWalk) + t.tiles_q * sizeof(uint32_t)) + alignof(MaskedWalk) +
           seen_blocks_bytes(t.seen.shape);
}

// The same for masks by intervals, without the seen blocks. Very long sequences have no lists: these grow with the square of the length.
inline MaskedTiles interval_tiles(const AttentionParams& p, const BackwardPlan& plan) {
    MaskedTiles t{};
    t.batches = p.batch, t.heads_k = p.intervals.heads_of_entry == p.nheads ? 1 : p.nheads_k;
    t.tiles_q = (p.seqlen_q + plan.block_m - 1) / plan.block_m, t.key_blocks = (p.seqlen_k + plan.block_n - 1) / plan.block_n;
    return t;
}
inline bool has_interval_tiles(const AttentionParams& p, const BackwardPlan& plan, bool in_order) {
    constexpr int64_t kMost = 1 << 24, kTiles = 1 << 16, kBlocks = 1 << 15;  // SeenTile
    const MaskedTiles t = interval_tiles(p, plan);
    return plan.intervals && in_order && t.tiles_q <= kTiles && t.key_blocks <= kBlocks && walks_of(t) * t.tiles_q <= kMost;
}
inline size_t interval_tiles_bytes(const AttentionParams& p, const BackwardPlan& plan) {
    const MaskedTiles t = interval_tiles(p, plan);
    return size_t(walks_of(t)) * (sizeof(MaskedWalk) + t.tiles_q * sizeof(uint32_t)) + alignof(MaskedWalk);
}

// What the queries of a tile see of a block of keys, causal and windows included.
struct TileSeen {
    uint64_t keys[2];  // bit j % 64 of word j / 64: some query sees key j
    bool cut;          // whether the masks hide some pair

    FA_INLINED bool anything() const { return (keys[0] | keys[1]) != 0; }
};
// The keys from key0 on, as bits, that some of rows row0 .. end - 1 see under causal and windows.
FA_INLINED uint64_t keys_in_band(const VisibleBand& band, int32_t row0, int32_t end, int32_t key0) {
    if (row0 >= end) return 0;
    const int32_t past = end + band.right;
    return bits_of_range<kSeenBlock>(row0 + band.left, past < band.seqlen_k ? past : band.seqlen_k, key0);
}
// Adds what tile m of kRows row blocks sees in a head of entry `entry`, of key block `block`.
template <int kRows>
FA_INLINED void add_seen(TileSeen& all, const SeenBlocks& seen, const VisibleBand& band, int64_t entry, int32_t m, int32_t block) {
    const SeenBlocksShape& shape = seen.shape;
    const int32_t row_block = m * kRows;
    const BlocksOfTile tile = blocks_of_tile<kRows, 2>(seen.words + shape.word(entry, row_block), shape.words_of_row(), 2 * block,
                                                       shape.row_blocks - row_block, shape.key_blocks);
    all.cut |= !tile.is_whole<kRows, 2>();
    for (int32_t r = 0; r < kRows && row_block + r < shape.row_blocks; ++r)
        for (int32_t x = 0; x < 2 && 2 * block + x < shape.key_blocks; ++x) {
            if (!(tile.seen >> (2 * r + x) & 1)) continue;
            const int32_t row0 = (row_block + r) * kSeenBlock;
            const int32_t end = row0 + kSeenBlock < band.seqlen_q ? row0 + kSeenBlock : band.seqlen_q;
            const uint64_t keys = keys_in_band(band, row0, end, (2 * block + x) * kSeenBlock);
            all.keys[x] |= seen.keys ? keys & seen.keys[shape.block(entry, row_block + r) + 2 * block + x] : keys;
        }
}

// ---- the bits of a thread ----

// From words of keys `key` and key + 8 of a cut block, those of 32 elements of S (wgmma_sm90/fragments.cuh). The thread is number `quad` of
// its quad.
FA_INLINED uint32_t pack_seen(uint64_t key, uint64_t key_8, int32_t quad) {
    const auto two = [&](uint32_t rows) { return rows >> 2 * quad & 0x03030303u; };  // rows 8 c, 8 c + 1, for four c
    return two(uint32_t(key)) | two(uint32_t(key_8)) << 2 | two(uint32_t(key >> 32)) << 4 | two(uint32_t(key_8 >> 32)) << 6;
}
FA_INLINED constexpr int32_t seen_bit(int32_t i) { return i / 4 % 4 * 8 + i / 16 % 2 * 4 + i % 4; }

}  // namespace fa
