// wgmma_sm90/masks.cuh: masks by blocks and masks of pairs in the Hopper backward, in plans of their own that share the code of plans with
// options.
//
// A block of keys has a list of the tiles of which some query sees some of its keys (masked_tiles.cu), and walks over these alone, also in
// order: the list says how many blocks of lower keys meet the tile. The thread that loads Q says beside each tile where it lies and whether
// the mask cuts it. In cut tiles a thread has a bit for each of its scores: one word for 32 scores, from memory, or from the two or four
// blocks of the mask that the tile covers. Keys that no query sees are zeroed in K and V, and get no gradient.
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"

namespace fa {

// A tile of Q, for the main warpgroups.
struct alignas(16) MaskedTile {
    int place_and_cut;  // 2 place + cut. place: of the walk (BackwardWork). cut: whether some query may not see some key
    int head;           // of the group
    uint32_t tile;      // masks of pairs: which of MaskedTiles::words
    uint32_t hidden;    // masks by blocks: TileSeen::hidden
};

// Called by one thread after find_key_block: the walk visits the tiles of the list.
template <int kBlockN>
__device__ __forceinline__ void list_seen_tiles(const AttentionParams& p, const MaskedTiles& all, BackwardMaskedWork& w) {
    const int64_t walk = all.walk_of(w.batch, w.head_k, w.key0 / kBlockN);
    const int count = all.walks[walk].count, tiles = w.end_step - w.first_step;
    w.tiles = all.tiles + walk * all.tiles_q, w.unseen = reinterpret_cast<const uint16_t*>(all.walks[walk].unseen);
    const int head = w.head_k * p.group, block = w.key0 / kBlockN;
    if (all.words) w.first_word = uint32_t(all.tile_of(w.batch, head / all.heads_of_entry(p), 0, block));
    else w.blocks = blocks_of_row(p, w.batch, head, 0) + (w.key0 >> p.blocks.key_shift);
    if (w.in_order) {
        w.rounds = w.end_m = count;
        return;
    }
    // The walk begins at another of the tiles that are left, as it would at another of all.
    w.start_step = tiles > 0 ? int(int64_t(w.start_step - w.first_step) * count / tiles) : 0;
    w.first_step = 0, w.end_step = count;
    w.rounds = count > 0 ? p.group : 0;
}

// Called by one thread: what the main warpgroups need to know of a tile of Q.
template <int kBlockM>
__device__ __forceinline__ MaskedTile describe_tile(const AttentionParams& p, const MaskedTiles& all, const BackwardMaskedWork& w,
                                                    const VisitedSeen& at) {
    MaskedTile tile{2 * at.m * w.width + at.cut, at.head, 0, 0};
    if (!at.cut) return tile;
    const int entry = opaque(at.head / opaque(p.nheads / all.heads));
    if (all.words) {
        constexpr uint32_t kBytes = kMaskedThreads * (kBlockM / 64) * sizeof(uint32_t);
        tile.tile = w.first_word + uint32_t((entry * all.tiles_q + at.m) * all.blocks);
        bulk_prefetch(reinterpret_cast<const char*>(all.words) + int64_t(tile.tile) * kBytes, kBytes);
    } else {
        const int row0 = at.m * kBlockM;
        tile.hidden = hidden_blocks(p, w.blocks + entry * p.blocks.head + (row0 >> p.blocks.row_shift) * p.blocks.row,
                                    min(kBlockM, w.seqlen_q - row0), w.seqlen_k - w.key0);
    }
    return tile;
}

// The bits of a thread's scores: 1 where the query sees the key. `thread`: of both main warpgroups.
template <int kBlockM>
__device__ __forceinline__ void read_seen_pairs(uint32_t (&seen)[kBlockM / 64], const MaskedTiles& all, const MaskedTile& tile, bool cut,
                                                int thread) {
    constexpr int kWords = kBlockM / 64;
    if (cut && all.words) {
        const uint32_t* const own = all.words + (int64_t(tile.tile) * kMaskedThreads + thread) * kWords;
        if constexpr (kWords == 2) reinterpret_cast<uint2&>(seen) = *reinterpret_cast<const uint2*>(own);
        else seen[0] = *own;
    } else {
#pragma unroll
        for (int u = 0; u < kWords; ++u) seen[u] = cut && tile.hidden >> (2 * u + thread / 128) & 1 ? 0u : ~0u;
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
        if (!(seen[i / 32] >> i % 32 & 1)) S[i] = -INFINITY;
}

}  // namespace fa
