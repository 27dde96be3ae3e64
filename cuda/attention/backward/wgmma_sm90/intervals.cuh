// wgmma_sm90/intervals.cuh: masks by intervals in the Hopper backward, in plans of their own that share the code of plans with options.
//
// A block of keys knows the rows that none of its keys is seen by, from the bounds that a small kernel has written
// (attention/common/interval_bounds.cu). They leave at most two gaps in its walk (attention/common/tile_intervals.h). Blocks in order have
// lists of tiles, because each waits for the blocks before it that visit the same tile (masked_tiles.cu). The thread that loads Q says
// beside each tile where the tile lies and whether it is cut: whether some row does not see some key. In cut tiles each thread compares the
// rows with the intervals of its two keys. Keys that no query sees are zeroed in K and V, and get no gradient.
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/tile_intervals.h"

namespace fa {

// A tile of Q, for the main warpgroups.
struct alignas(16) IntervalTile {
    int place_and_cut;  // 2 place + cut. place: of the walk (BackwardWork). cut: whether some row may not see some key
    int head;           // of the group
    int entry;          // of the head, on the head axis of the numbers
};

// The entry of a query head on the head axis of the numbers. Mostly all heads have one. Opaque: nothing of the division is held in
// registers.
__device__ __forceinline__ int entry_of(const AttentionParams& p, int head) {
    const int heads = opaque(p.intervals.heads_of_entry);
    return head < heads ? 0 : opaque(head / heads);
}

// Called by one thread after find_key_block: leaves the tiles out of which no row sees any of the keys.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ void leave_out_hidden(const AttentionParams& p, const BackwardSchedule& schedule, BackwardIntervalWork& w) {
    const IntervalBounds& all = schedule.bounds;
    const MaskedTiles& lists = schedule.masks;
    w.bounds.clear();
    const HiddenBounds* of_head = all.data + entry_of(p, w.head_k * p.group) * all.head + all.first<kBlockN>(p, w.batch) + w.key0 / kBlockN;
#pragma unroll 1
    for (int left = p.group; left > 0; left -= opaque(p.intervals.heads_of_entry), of_head += all.head) merge(w.bounds, *of_head);
    w.tiles = nullptr;
    if (w.in_order) {
        w.gaps = {};
        Range own{w.first_m, w.end_m};
        if (lists.tiles) {
            const int64_t walk = lists.walk_of(w.batch, w.head_k, w.key0 / kBlockN);
            w.tiles = lists.tiles + walk * lists.tiles_q;
            own = {0, lists.walks[walk].count};
        }
        own = own_part(schedule, w, own);
        w.rounds = own.end - own.begin, w.end_m = own.end;
        return;
    }
    w.gaps = tile_gaps(w.bounds, w.first_m, w.end_m, kBlockM, w.seqlen_q);
    // The walk begins at another of the tiles that are left, as it would at another of all.
    const int tiles = w.end_step - w.first_step, begun = w.start_step - w.first_step;
    const Range own = own_part(schedule, w, {w.first_step, w.end_step - w.gaps.tiles()});
    w.first_step = own.begin, w.end_step = own.end;
    w.start_step = own.begin + (tiles > 0 ? int(int64_t(begun) * (own.end - own.begin) / tiles) : 0);
}

// Called by one thread: what the main warpgroups need to know of a tile of Q.
template <int kBlockM>
__device__ __forceinline__ IntervalTile describe_tile(const AttentionParams& p, const BackwardIntervalWork& w, Visited at) {
    const int row0 = at.m * kBlockM, last = min(row0 + kBlockM, w.seqlen_q) - 1;
    const bool cut = w.bounds.seen_by(row0, last) != Seen::kEverything;
    return {2 * at.m * w.width + cut, at.head, entry_of(p, w.head_k * p.group + at.head)};
}

// Called by a whole warp: bit i says that no query sees key0 + i, one of 16 keys. Keys past the end have no bit. Mostly the bounds know
// that there is no such key, and the numbers are not read.
__device__ __forceinline__ uint32_t unseen_keys(const AttentionParams& p, const BackwardIntervalWork& w, int key0) {
    if (!may_have_unseen_key(w.bounds)) return 0;
    const int key = key0 + opaque(int(threadIdx.x % 16)), first_head = w.head_k * p.group;
    bool unseen = key < w.seqlen_k;
    if (unseen) {
        const int first = max(0, key - w.right), last = min(w.seqlen_q - 1, key - w.left);
#pragma unroll 1
        for (int head = first_head; head < first_head + p.group && unseen; head += p.intervals.heads_of_entry)
            unseen = hides_all(hidden_rows(p, row_indices_of(p, w.batch, head) + key * p.intervals.key), first, last);
    }
    return __ballot_sync(~0u, unseen) & 0xFFFF;
}

// Sets the pairs that intervals hide to -inf. `key` belongs to element 0, whose query is row0 + `query`. row0: the first row of the tile.
template <int kBlockM, int kCount>
__device__ __forceinline__ void hide_rows(const AttentionParams& p, float (&S)[kCount], const BackwardWork& w, int entry, int key, int row0,
                                          int query) {
    const int32_t* const numbers = opaque(row_indices_of(p, w.batch, 0)) + entry * p.intervals.head;
    const RowIndicesForm form = p.intervals.form;
    // Keys past the end are hidden already.
    const HiddenRows hidden[2] = {hidden_rows(p, numbers + min(key, w.seqlen_k - 1) * p.intervals.key),
                                  hidden_rows(p, numbers + min(key + 8, w.seqlen_k - 1) * p.intervals.key)};
    const auto hide = [&](int x) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            TileRows rows = rows_in_tile(hidden[r], x, form, row0, kBlockM);
            rows.begin -= query;
#pragma unroll
            for (int i = 2 * r; i < kCount; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (rows.hides(2 * i - 4 * r + e)) S[i + e] = -INFINITY;
        }
    };
    hide(0);
    if (intervals_of_tile(form) > 1) hide(1);
}

}  // namespace fa
