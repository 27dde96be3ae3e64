// wgmma_sm90/masks.cuh: masks by blocks and masks of pairs in the Hopper backward, in plans of their own that share the code of plans with
// options.
//
// A block of keys has a list of the tiles of which some query sees some of its keys (masked_tiles.cu), and walks over these alone, also in
// order: the list says how many blocks of lower keys meet the tile. The thread that loads Q says beside each tile where it lies and what
// its blocks of 64 queries x 64 keys are: hidden, whole or cut. In a cut block a thread has the bits of its two keys: 32 scores in one
// register. Keys that no query sees are zeroed in K and V, and get no gradient.
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"

namespace fa {

// A tile of Q, for the main warpgroups.
struct alignas(16) MaskedTile {
    int place_and_cut;   // 2 place + cut. place: of the walk (BackwardWork). cut: whether some query may not see some key
    int head;            // of the group
    uint32_t block;      // the tile's first block in SeenBlocks::pairs
    uint8_t seen, cuts;  // bit 2 r + x, of block x of 64 keys and block r of 64 queries: BlocksOfTile
};

// Called by one thread after find_key_block: the walk visits the tiles of the list.
template <int kBlockN>
__device__ __forceinline__ void list_seen_tiles(const AttentionParams& p, const BackwardSchedule& schedule, BackwardMaskedWork& w) {
    const MaskedTiles& all = schedule.masks;
    const int block = w.key0 / kBlockN, tiles = w.end_step - w.first_step;
    const int64_t walk = all.walk_of(w.batch, w.head_k, block), entry = all.seen.shape.entry(w.batch, w.head_k * p.group);
    const Range own = own_part(schedule, w, {0, all.walks[walk].count});
    w.tiles = all.tiles + walk * all.tiles_q, w.unseen = all.walks[walk].unseen;
    w.first_block = uint32_t(all.seen.shape.block(entry, 0)) + 2 * block, w.words = all.seen.words + all.seen.shape.word(entry, 0);
    if (w.in_order) {
        w.rounds = own.end - own.begin, w.end_m = own.end;
        return;
    }
    // The walk begins at another of the tiles that are left, as it would at another of all.
    const int count = own.end - own.begin;
    w.start_step = own.begin + (tiles > 0 ? int(int64_t(w.start_step - w.first_step) * count / tiles) : 0);
    w.first_step = own.begin, w.end_step = own.end;
    w.rounds = count > 0 ? p.group : 0;
}

// Called by one thread: what the main warpgroups need to know of a tile of Q.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ MaskedTile describe_tile(const MaskedTiles& all, const BackwardMaskedWork& w, const VisitedSeen& at) {
    constexpr int kRows = kBlockM / kSeenBlock;
    MaskedTile tile{2 * at.m * w.width + at.cut, at.head, 0, 0, 0};
    if (!at.cut) return tile;
    const SeenBlocksShape& shape = all.seen.shape;
    const int rows = at.head / opaque(shape.heads_of_entry) * shape.row_blocks + at.m * kRows, first = 2 * (w.key0 / kBlockN);
    const BlocksOfTile blocks = blocks_of_tile<kRows, 2>(w.words + int64_t(rows) * shape.words_of_row(), shape.words_of_row(), first,
                                                         shape.row_blocks - at.m * kRows, shape.key_blocks);
    tile.block = w.first_block + uint32_t(rows) * uint32_t(shape.key_blocks), tile.seen = uint8_t(blocks.seen),
    tile.cuts = uint8_t(blocks.cut);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
        if (blocks.cut >> 2 * r & 3) {
            constexpr uint32_t kBytes = kSeenBlock * sizeof(uint64_t);
            bulk_prefetch(all.seen.pairs + int64_t(tile.block + r * shape.key_blocks) * kSeenBlock,
                          first + 1 < shape.key_blocks ? 2 * kBytes : kBytes);
        }
    return tile;
}

// The bits of a thread's scores: bit seen_bit(i % 32) of word i / 32 where the query of element i sees its key. `thread`: of both main
// warpgroups.
template <int kBlockM>
__device__ __forceinline__ void read_seen_pairs(uint32_t (&seen)[kBlockM / 64], const SeenBlocks& blocks, const MaskedTile& tile, bool cut,
                                                int thread) {
    const int x = thread / 128, key = thread / 32 % 4 * 16 + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < kBlockM / 64; ++r) {
        seen[r] = cut && !(tile.seen >> (2 * r + x) & 1) ? 0u : ~0u;
        if (cut && tile.cuts >> (2 * r + x) & 1) {
            const uint64_t* const words = blocks.pairs + int64_t(tile.block + r * blocks.shape.key_blocks + x) * kSeenBlock + key;
            seen[r] = pack_seen(words[0], words[8], thread % 4);
        }
    }
}
// Sets the scores without a bit to -inf. Called by a whole warp.
template <int kCount>
__device__ __forceinline__ void hide_pairs(float (&S)[kCount], const uint32_t (&seen)[kCount / 32]) {
    uint32_t all = seen[0];
    for (const uint32_t word : seen) all &= word;
    if (__all_sync(~0u, all == ~0u)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (!(seen[i / 32] >> seen_bit(i % 32) & 1)) S[i] = -INFINITY;
}

}  // namespace fa
