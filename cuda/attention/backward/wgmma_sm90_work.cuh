// wgmma_sm90_work.cuh: the work of a block of the Hopper backward: which keys it owns, which query tiles it walks, and in which order.
#pragma once

#include "attention/backward/wgmma_sm90_tiles.h"
#include "attention/common/params.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {

// One set of keys of a block, and what the block needs to know of its sequence. One thread works it out for all others.
struct alignas(16) BackwardWork {
    int valid;
    int key0;  // first key of the block
    int head_k, batch;
    int seqlen_q, seqlen_k, shift;
    int q_row, k_row;    // varlen: the sequence's first row, else 0
    int first_tile;      // varlen: the sequence's first tile in QueryTiles, else 0
    int left, right;     // row i sees keys i + left .. i + right of 0 .. seqlen_k - 1
    int first_m, end_m;  // query tiles that see any of the keys
    uint32_t it0;        // query tiles that the block has walked for earlier keys
    int start_m;         // the tile where the walk starts; it goes up to end_m and continues at first_m
    int mask_end;        // tiles before this one have rows that do not see all of the keys; keys past the end count as unseen
};

struct BackwardSchedule {
    QueryTiles tiles;
    int n_blocks;       // key blocks of a sequence (dense)
    int section_heads;  // with by_section: key heads of a section
    bool by_section;    // the first blocks of all heads of a section come before their second blocks; else one head after another
    bool in_order;      // deterministic: blocks take turns at every query tile
    int blocks;         // of 128 keys; the grid takes them in turn
    int q_loads, k_loads, v_loads, dout_loads;  // boxes that make a tile
};

// The first lane's value, in every lane that still runs. The compiler learns from the shuffle that the value is uniform.
template <typename X>
__device__ __forceinline__ X uniform(X x) {
    return __shfl_sync(~0u, x, 0);
}

// The query tile after tile m in a block's walk.
FA_HOST_DEVICE int next_tile(int m, int first_m, int end_m) { return m + 1 == end_m ? first_m : m + 1; }

// The tile of iteration `it` of the walk.
FA_HOST_DEVICE int tile_of_iteration(const BackwardWork& w, int it) {
    return w.first_m + (w.start_m - w.first_m + it) % (w.end_m - w.first_m);
}

// The keys of block `index` and the query tiles that see any of them. False when the block has no keys.
//
// Blocks of one head that run at the same time add to the same sums of dQ, so they should be at different query tiles. Under a causal mask
// each block starts at its own first tile, and these differ. Without a right edge the starts are spread over the tiles.
//
// Deterministic blocks add in the same order at every tile, and a block may wait only for blocks that have started before it. Without a
// right edge all blocks start at the first tile, lowest keys first. With one, the highest keys come first: no other block has reached their
// first tile yet. Heads of a section then run side by side: blocks that follow each other through the tiles end one after the other, and
// those of the next section begin in that order. One head after another, several blocks would begin at once and wait for each other.
template <int kBlockM, int kBlockN>
FA_HOST_DEVICE bool find_key_block(const AttentionParams& p, const BackwardSchedule& schedule, int index, BackwardWork& w) {
    if (schedule.in_order && p.window_right >= 0) index = schedule.blocks - 1 - index;
    if (p.cu_seqlens_q) {
        const int slot = index / p.nheads_k;
        w.head_k = index - slot * p.nheads_k;
        // Sequence b owns the slots from (its first key) / N + b up to those of the next one. They are enough wherever it starts, and need
        // no prefix sum. Before the first of several parts, and between them, slots may have no keys.
        const auto first_slot = [&](int b) { return first_key_row(p, b) / kBlockN + b; };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_slot(middle) <= slot) low = middle;
            else high = middle - 1;
        }
        w.batch = low;
        w.key0 = (slot - first_slot(low)) * kBlockN;
        w.q_row = clamp_to(p.cu_seqlens_q[low], 0, p.total_q), w.k_row = first_key_row(p, low);
        w.first_tile = w.q_row / kBlockM + low;
    } else {
        int sequence_head, n;
        if (schedule.by_section) {
            const int section = index / (schedule.section_heads * schedule.n_blocks), first = section * schedule.section_heads;
            const int i = index - first * schedule.n_blocks, heads = min(schedule.section_heads, p.batch * p.nheads_k - first);
            n = i / heads, sequence_head = first + i - n * heads;
        } else {
            sequence_head = index / schedule.n_blocks, n = index - sequence_head * schedule.n_blocks;
        }
        w.batch = sequence_head / p.nheads_k, w.head_k = sequence_head - w.batch * p.nheads_k;
        w.key0 = n * kBlockN;
        w.q_row = w.k_row = w.first_tile = 0;
    }
    const Sequence s = sequence_of(p, w.batch);
    w.seqlen_q = s.seqlen_q, w.seqlen_k = s.seqlen_k, w.shift = s.shift;
    const VisibleBand band = visible_band(p, s);
    w.left = band.left, w.right = band.right;
    const Range tiles = query_tiles_of(band, w.key0, kBlockM, kBlockN);
    w.first_m = w.start_m = tiles.begin, w.end_m = tiles.end;
    if (!schedule.in_order && p.window_right < 0)
        w.start_m += int(int64_t(tiles.end - tiles.begin) * w.key0 / (w.seqlen_k > 0 ? w.seqlen_k : 1));
    const int hidden_rows = min(w.key0 + kBlockN, w.seqlen_k) - 1 - w.right;
    w.mask_end = w.key0 + kBlockN > w.seqlen_k ? w.end_m : hidden_rows > 0 ? (hidden_rows + kBlockM - 1) / kBlockM : 0;
    return w.key0 >= 0 && w.key0 < w.seqlen_k;
}

// Query tiles that the block walks for these keys, over all heads of the group.
FA_HOST_DEVICE int count_tiles(const AttentionParams& p, const BackwardWork& w) { return (w.end_m - w.first_m) * p.group; }

// The keys that a block takes, in two slots that are used in turn. full: the slot is written. empty: every reader is through with it.
struct WorkList {
    static constexpr int kReaders = 3 + (kMainWarps + kDqWarps) * kWarpArrivals;  // three threads of the loading warpgroup, and the warps
    BackwardWork work[2];
    uint64_t full[2], empty[2];
    uint64_t asked;  // the loads of all query tiles have been issued: time to take the next keys
};
// Calls visit(work, n) for the n-th set of keys that the block takes, until there are no more.
template <typename Visit>
__device__ __forceinline__ void for_each_work(const WorkList& list, const Visit& visit) {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        mbarrier_wait(shared_address(&list.full[n & 1]), n >> 1 & 1);
        const BackwardWork& w = list.work[n & 1];
        if (!uniform(w.valid)) return;
        visit(w, n);
    }
}
__device__ __forceinline__ void release_work(const WorkList& list, uint32_t n) { mbarrier_arrive(shared_address(&list.empty[n & 1])); }

// The number of the sequence's first query tile of head `head` in QueryTiles.
__device__ __forceinline__ int64_t first_query_tile(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w, int head) {
    return int64_t((p.cu_seqlens_q ? 0 : w.batch) * p.nheads + head) * tiles.tiles + w.first_tile;
}

}  // namespace fa
