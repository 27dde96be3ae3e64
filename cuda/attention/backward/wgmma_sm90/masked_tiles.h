// wgmma_sm90/masked_tiles.h: masks by blocks and masks of pairs in the Hopper backward, for host and device: what a tile of queries sees of a
// block of keys, and what the kernels of masked_tiles.cu leave in the workspace for the main kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/mask.h"

namespace fa {

// What the queries of a tile see of a block of 128 keys. Causal and windows count for `keys`, but not for the others.
struct TileSeen {
    uint32_t keys[4];  // bit j % 32 of word j / 32: some query sees key j
    uint32_t cut;      // 1: the mask hides some pair
    uint32_t hidden;   // masks by blocks: bit 2 u + x: queries 64 u .. 64 u + 63 do not see keys 64 x .. 64 x + 63

    FA_INLINED bool anything() const { return keys[0] | keys[1] | keys[2] | keys[3]; }
};

// Bits begin .. end - 1 of 32.
FA_INLINED uint32_t bits_between(int32_t begin, int32_t end) {
    const int32_t from = begin < 0 ? 0 : begin, to = end > 32 ? 32 : end;
    if (from >= to) return 0;
    return (to - from == 32 ? ~0u : (1u << (to - from)) - 1) << from;
}
// Those of keys key0 .. key0 + 31 that some of rows row0 .. end - 1 see under causal and windows.
FA_INLINED uint32_t keys_in_band(const VisibleBand& band, int32_t row0, int32_t end, int32_t key0) {
    if (row0 >= end) return 0;
    const int32_t past = end + band.right;
    return bits_between(row0 + band.left - key0, (past < band.seqlen_k ? past : band.seqlen_k) - key0);
}

// The blocks of 64 rows and 64 keys that a mask by blocks hides, among `rows` rows and `keys` keys, up to 128 each: TileSeen::hidden. `of`:
// the element that decides on the first row and key.
FA_INLINED uint32_t hidden_blocks(const AttentionParams& p, const uint8_t* of, int32_t rows, int32_t keys) {
    uint32_t hidden = 0;
    const int32_t other = p.blocks.key_shift == 6;  // from the element of the first 64 keys to that of the next
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int32_t u = 0; 64 * u < rows && u < 2; ++u) {
        const uint8_t* const row = of + (64 * u >> p.blocks.row_shift) * p.blocks.row;
        if (!row[0]) hidden |= 1u << 2 * u;
        if (keys > 64 && !row[other]) hidden |= 2u << 2 * u;
    }
    return hidden;
}
// Of rows row0 .. row0 + block_m - 1 and keys key0 .. key0 + 127 under a mask by blocks. Rows and keys past the end do not count.
FA_INLINED TileSeen seen_by_blocks(const AttentionParams& p, const VisibleBand& band, int32_t b, int32_t head, int32_t row0, int32_t block_m,
                                   int32_t key0) {
    TileSeen seen{};
    const int32_t rows = band.seqlen_q - row0, keys = band.seqlen_k - key0;
    seen.hidden = hidden_blocks(p, blocks_of_row(p, b, head, row0) + (key0 >> p.blocks.key_shift), rows < block_m ? rows : block_m, keys);
    seen.cut = seen.hidden != 0;
    for (int32_t u = 0; u < block_m / 64 && row0 + 64 * u < band.seqlen_q; ++u)
        for (int32_t x = 0; x < 2 && key0 + 64 * x < band.seqlen_k; ++x) {
            const int32_t row = row0 + 64 * u, key = key0 + 64 * x, end = row + 64 < band.seqlen_q ? row + 64 : band.seqlen_q;
            if (seen.hidden >> (2 * u + x) & 1) continue;
            seen.keys[2 * x] |= keys_in_band(band, row, end, key), seen.keys[2 * x + 1] |= keys_in_band(band, row, end, key + 32);
        }
    return seen;
}

// ---- a thread's pairs ----

// The bits of a mask of pairs lie in the order of the fragments of S (wgmma_sm90/fragments.cuh): bit i % 32 of word i / 32 of a thread is
// element i. The threads of both main warpgroups count from 0.
constexpr int kMaskedThreads = 256;
FA_INLINED int32_t query_of_element(int32_t thread, int32_t i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }
FA_INLINED int32_t key_of_element(int32_t thread, int32_t i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }

// ---- the walk ----

// A tile that a block of keys visits, in 32 bits. `before`: of the blocks that visit the tile, those of lower keys.
struct SeenTile {
    int32_t m, before;
    bool cut;
    static constexpr int32_t kMostTiles = 1 << 16, kMostBlocks = 1 << 15;

    FA_INLINED uint32_t packed() const { return uint32_t(m) << 16 | uint32_t(before) << 1 | uint32_t(cut); }
    static FA_INLINED SeenTile from(uint32_t packed) { return {int32_t(packed >> 16), int32_t(packed >> 1 & 0x7FFF), bool(packed & 1)}; }
};
// The same while m is the place in an array that has all tiles: 0 for a tile that is not visited.
FA_INLINED uint32_t tile_state(bool seen, int32_t before, bool cut) {
    return seen ? uint32_t(before) << 2 | uint32_t(cut) << 1 | 1u : 0u;
}
FA_INLINED SeenTile tile_of_state(int32_t m, uint32_t state) { return {m, int32_t(state >> 2), bool(state >> 1 & 1)}; }

// The walk of a block of keys.
struct MaskedWalk {
    uint32_t unseen[4];  // bit j % 32 of word j / 32: no query sees key j. Keys past the end have no bit
    int32_t count;       // of its tiles
};

// In the workspace. Masks that several heads or batch entries share are there once.
struct MaskedTiles {
    uint32_t* tiles;     // (batches, heads_k, blocks, tiles_q): of each block of keys, the tiles that it visits, upwards: SeenTile
    MaskedWalk* walks;   // (batches, heads_k, blocks)
    TileSeen* seen;      // masks of pairs: (batches, heads, tiles_q, blocks); else nullptr
    uint32_t* words;     // the same: (batches, heads, tiles_q, blocks, kMaskedThreads, block_m / 64), of tiles that are cut
    int32_t batches;     // 1 or batch
    int32_t heads;       // masks of a sequence: 1, nheads_k or nheads
    int32_t heads_k;     // walks of a block of keys: 1 or nheads_k. Heads that share keys share a walk
    int32_t tiles_q, blocks, block_m;

    FA_INLINED int64_t walk_of(int32_t b, int32_t head_k, int32_t block) const {
        return (int64_t(batches == 1 ? 0 : b) * heads_k + (heads_k == 1 ? 0 : head_k)) * blocks + block;
    }
    FA_INLINED int64_t tile_of(int32_t b, int32_t entry, int32_t m, int32_t block) const {
        return ((int64_t(batches == 1 ? 0 : b) * heads + entry) * tiles_q + m) * blocks + block;
    }
    FA_INLINED int32_t heads_of_walk() const { return heads / heads_k; }
    FA_INLINED int32_t heads_of_entry(const AttentionParams& p) const { return p.nheads / heads; }
};

inline MaskedTiles masked_tiles(const AttentionParams& p, const BackwardPlan& plan) {
    MaskedTiles t{};
    const bool of_batches = p.cu_seqlens_q || (p.mask.data && p.mask.batch) || (p.blocks.data && p.blocks.batch);
    t.batches = of_batches ? p.batch : 1;
    t.heads = p.mask.data && p.mask.head ? p.nheads : p.blocks.data ? p.nheads / p.blocks.heads_of_entry : 1;
    t.heads_k = t.heads == 1 ? 1 : p.nheads_k;
    t.block_m = plan.block_m;
    t.tiles_q = (p.seqlen_q + plan.block_m - 1) / plan.block_m, t.blocks = (p.seqlen_k + plan.block_n - 1) / plan.block_n;
    return t;
}
// Where the parts lie from `memory` on, which is aligned to 128 bytes. Returns their bytes.
inline size_t place_masked_tiles(const AttentionParams& p, MaskedTiles* t, void* memory) {
    const size_t walks = size_t(t->batches) * t->heads_k * t->blocks, tiles = size_t(t->batches) * t->heads * t->tiles_q * t->blocks;
    size_t bytes = 0;
    const auto place = [&](auto** part, size_t count) {
        *part = reinterpret_cast<std::remove_reference_t<decltype(*part)>>(static_cast<char*>(memory) + bytes);
        bytes += (count * sizeof **part + 127) / 128 * 128;
    };
    place(&t->walks, walks), place(&t->tiles, walks * t->tiles_q);
    if (p.mask.data) place(&t->seen, tiles), place(&t->words, tiles * kMaskedThreads * (t->block_m / 64));
    return bytes;
}
inline size_t masked_tiles_bytes(const AttentionParams& p, const BackwardPlan& plan) {
    MaskedTiles t = masked_tiles(p, plan);
    return place_masked_tiles(p, &t, nullptr) + 128;
}

}  // namespace fa
