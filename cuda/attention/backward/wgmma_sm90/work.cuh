// wgmma_sm90/work.cuh: the work of a block of the Hopper backward: which keys it owns, which query tiles it walks over, and in which order.
#pragma once

#include <climits>
#include <type_traits>

#include "attention/backward/wgmma_sm90/interval_order.h"
#include "attention/backward/wgmma_sm90/masked_tiles.h"
#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/interval_bounds.cuh"
#include "attention/common/params.h"
#include "attention/common/tile_intervals.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// One set of keys of a block, and what the block needs to know about the sequence. One thread computes it for all others.
struct alignas(16) BackwardWork {
    int valid;
    int key0;  // first key of the block
    int head_k, batch;
    int sums_k;  // head of dK and dV: head_k, or that of the part in the workspace (walk_parts.h)
    int seqlen_q, seqlen_k, shift;
    int q_row, k_row;    // varlen: the sequence's first row; else 0
    int first_tile;      // varlen: the sequence's first tile in QueryTiles; else 0
    int left, right;     // row i sees keys i + left .. i + right, within 0 .. seqlen_k - 1
    int first_m, end_m;  // query tiles that see any of the keys; with row_parts the block's part of them
    uint32_t it0;        // query tiles that the block has walked for earlier keys

    // The walk visits each of its query tiles in every head of the group, in rounds of steps:
    //     free       a round is a head; its steps are the tiles, from start_step up to end_step and then from first_step on
    //     in order   a round is a tile, from the last down to the first; its steps are the heads
    bool in_order;
    bool waits;  // in order: wait for the blocks of lower keys
    int rounds, first_step, end_step, start_step;
    // The main warpgroups instead count places: m * width + width - 1 - head, where width is the number of steps per tile (in order: the
    // heads of the group; free: 1). After last_place comes wrap_place.
    int width, start_place, last_place, wrap_place;
    // Places before this one have rows that do not see all of the keys; keys past the end count as unseen. kEveryTile where rows of the
    // call may be large: then every tile takes the path of masked tiles, which corrects them.
    int mask_place;
    static constexpr int kEveryTile = INT_MAX;
    FA_HOST_DEVICE bool has_large_rows() const { return mask_place == kEveryTile; }
};

// The same with masks by intervals. The steps of the walk pass over the gaps: tiles of queries of which no head of the group sees a key.
// Places are those of the tiles themselves; the main warpgroups read them beside each tile.
struct BackwardIntervalWork : BackwardWork {
    TileGaps gaps;
    HiddenBounds bounds;    // of the keys, for all heads of the group
    const uint32_t* tiles;  // in order: a list of SeenTile as below, or nullptr: all tiles
};
// The same with a mask by blocks or of pairs: a list of the tiles that the walk visits. Its steps, in order its rounds, count them. Places
// are those of the tiles themselves.
struct BackwardMaskedWork : BackwardWork {
    const uint32_t* tiles;   // SeenTile
    const SeenWord* words;   // of the first row, in the group's first head
    uint32_t first_block;    // of that row and the first key, in SeenBlocks::pairs
    const uint16_t* unseen;  // a bit for each key that no query sees, of sixteen keys each
};
template <BackwardPlanId kId>
using BackwardWorkOf = std::conditional_t<kBackwardPlan<kId>.masks, BackwardMaskedWork,
                                          std::conditional_t<kBackwardPlan<kId>.intervals, BackwardIntervalWork, BackwardWork>>;
// The tile of a step; in order, of a round.
FA_HOST_DEVICE int tile_of_step(const BackwardIntervalWork& w, int step) {
    return w.tiles ? SeenTile::from(w.tiles[step]).m : w.gaps.tile_of(step);
}
FA_HOST_DEVICE int tile_of_step(const BackwardMaskedWork& w, int step) { return SeenTile::from(w.tiles[step]).m; }

// The tile of a place. A division takes 40 instructions, and mostly there is nothing to divide.
FA_HOST_DEVICE int tile_of_place(const BackwardWork& w, int place) { return w.width == 1 ? place : place / w.width; }

// What softcap multiplies by. An instruction takes these from the kernel's arguments, so they need no registers.
struct SoftcapFactors {
    float argument;  // scale / softcap: turns products into arguments of tanh
    float exponent;  // softcap log2(e): turns tanh into exponents of 2
    float inverse;   // 1 / exponent
    float bits;      // inverse / 2^15
    float offset;    // softcap_slope in options.cuh
};

struct BackwardSchedule {
    QueryTiles tiles;
    int n_blocks;       // key blocks of a sequence (dense)
    int section_heads;  // with by_section: key heads of a section
    bool by_section;    // the first blocks of all heads of a section come before their second blocks; else one head after another
    bool in_order;      // deterministic: blocks add to every query tile in the order of their keys
    int blocks;         // blocks of 128 keys, or parts of their walks; the thread blocks of the grid take them in turn
    int head_parts;     // key heads of the schedule that share a key head of K and V (walk_parts.h)
    int row_parts;      // neighbouring blocks that share the walk of a set of keys
    int q_loads, k_loads, v_loads, dout_loads;  // boxes of a tile
    SoftcapFactors softcap;
    IntervalBounds bounds;  // plans for intervals: of each block of keys
    MaskedTiles masks;      // plans for masks; in order, lists of plans for intervals
    IntervalOrder order;    // plans for intervals, in no order: of blocks of keys
};

// The first lane's value, in all lanes that still run. The shuffle tells the compiler that it is uniform.
template <typename X>
__device__ __forceinline__ X uniform(X x) {
    return __shfl_sync(~0u, x, 0);
}

FA_HOST_DEVICE int next_step(int step, int first, int end) { return step + 1 == end ? first : step + 1; }
// In order, places go down; otherwise they go up. `wrap` tells which.
FA_HOST_DEVICE int next_place(int place, int last, int wrap) { return place == last ? wrap : wrap > last ? place - 1 : place + 1; }

// Places from this one on have rows whose window begins after the first of the keys.
FA_HOST_DEVICE int left_place_of(const AttentionParams& p, const BackwardWork& w, int block_m) {
    return p.window_left < 0 ? INT_MAX : max(w.key0 - w.left + 1, 0) / block_m * w.width;
}

// A step of a walk: a query tile of a head of the group.
struct Visited {
    int m, head;
};
// The same from the list of a mask.
struct VisitedSeen : Visited {
    int before;  // of the blocks that visit the tile, those of lower keys
    bool cut;
};
// The same under masks by intervals. before: -1 without a list.
struct VisitedInterval : Visited {
    int before;
};
FA_HOST_DEVICE Visited visit_of_step(const BackwardWork&, int step, int head) { return {step, head}; }
FA_HOST_DEVICE VisitedInterval visit_of_step(const BackwardIntervalWork& w, int step, int head) {
    if (!w.tiles) return {{w.gaps.tile_of(step), head}, -1};
    const SeenTile tile = SeenTile::from(w.tiles[step]);
    return {{tile.m, head}, tile.before};
}
FA_HOST_DEVICE VisitedSeen visit_of_step(const BackwardMaskedWork& w, int step, int head) {
    const SeenTile tile = SeenTile::from(w.tiles[step]);
    return {{tile.m, head}, tile.before, tile.cut};
}
// Iteration `it` of the walk.
FA_HOST_DEVICE Visited visited(const BackwardWork& w, int it) {
    const int steps = w.end_step - w.first_step, step = w.first_step + (w.start_step - w.first_step + it) % steps;
    return w.in_order ? Visited{w.end_m - 1 - it / steps, step} : Visited{step, it / steps};
}

// The block's part of a walk: of its steps, in order of its rounds. Parts have equal numbers of them, or one more.
FA_HOST_DEVICE Range own_part(const BackwardSchedule& schedule, const BackwardWork& w, const Range& walk) {
    const int parts = schedule.row_parts;
    if (parts == 1) return walk;
    const int part = w.sums_k - w.head_k * parts, steps = (walk.end - walk.begin) / parts, more = (walk.end - walk.begin) % parts;
    const int begin = walk.begin + part * steps + min(part, more);
    return {begin, begin + steps + (part < more)};
}

// The keys of block `index` and the query tiles that see any of them, or the block's part of these. False when the block has no keys.
//
// Blocks of one head that run at the same time add to the same sums of dQ, so they should be at different query tiles. Under a causal mask
// each block starts at its own first tile, and these differ. Without a right edge, the starts are spread over the tiles, but no further
// apart than a block has keys: with more queries than keys, a tile would have left L2 before the next block comes to it (8192 queries on
// 2048 keys of 8 heads: 66 MB).
//
// Deterministic blocks add to every tile in the order of their keys, and a block may wait only for blocks of lower numbers, which have
// started before it. All begin with the last tile and go down; at every tile they go through all heads of the group. So a block follows the
// block before it at the distance at which it started, about one tile, and never overtakes it: with a causal mask, lower keys have more
// tiles, but the additional ones come last. This also puts the longest walks first, so that thread blocks end together. ladder/turns.py
// compares this with other orders.
template <int kBlockM, int kBlockN, typename Work>
FA_HOST_DEVICE bool find_key_block(const AttentionParams& p, const BackwardSchedule& schedule, int index, Work& w) {
    w.sums_k = 0;
    if (schedule.row_parts > 1) w.sums_k = index % schedule.row_parts, index /= schedule.row_parts;
    if (p.cu_seqlens_q) {
        const int slot = index / p.nheads_k;
        w.head_k = index - slot * p.nheads_k;
        // Sequence b owns the slots from (its first key) / N + b up to those of the next sequence. That is enough wherever the sequence
        // starts, and needs no prefix sum. Before the first of several parts, and between parts, slots may have no keys.
        const auto first_slot = [&](int b) { return first_block_of(p, kBlockN, b); };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_slot(middle) <= slot) low = middle;
            else high = middle - 1;
        }
        w.batch = low;
        w.key0 = (slot - first_slot(low)) * kBlockN;
        w.q_row = clamp_to(p.cu_seqlens_q[low], 0, p.total_q), w.k_row = first_key_row(p, low);
        w.first_tile = first_tile_of(p, kBlockM, low);
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
        if constexpr (std::is_same_v<Work, BackwardIntervalWork>)
            if (schedule.order.data) n = schedule.order.block(w.batch, w.head_k, n);
        w.key0 = n * kBlockN;
        w.q_row = w.k_row = w.first_tile = 0;
    }
    w.sums_k += w.head_k * schedule.row_parts;
    const Sequence s = sequence_of(p, w.batch);
    w.seqlen_q = s.seqlen_q, w.seqlen_k = s.seqlen_k, w.shift = s.shift;
    const VisibleBand band = visible_band(p, s);
    w.left = band.left, w.right = band.right;
    const Range tiles = query_tiles_of(band, w.key0, kBlockM, kBlockN);
    w.first_m = tiles.begin, w.end_m = tiles.end;
    forget_registers();                                  // the thread has only 32
    if constexpr (std::is_same_v<Work, BackwardWork>) {  // others take a part of the tiles that their masks leave
        if (schedule.row_parts > 1) {
            const Range own = own_part(schedule, w, {w.first_m, w.end_m});
            w.first_m = own.begin, w.end_m = own.end;
        }
        forget_registers();
    }
    w.in_order = schedule.in_order;
    w.waits = w.in_order && (!p.cu_seqlens_q || *schedule.tiles.has_order());
    if (w.in_order) {
        w.rounds = w.end_m - w.first_m, w.first_step = w.start_step = 0, w.end_step = w.width = p.group;
        w.start_place = w.wrap_place = w.end_m * w.width - 1, w.last_place = w.first_m * w.width;
    } else {
        w.rounds = w.first_m < w.end_m ? p.group : 0, w.first_step = w.start_step = w.first_m, w.end_step = w.end_m, w.width = 1;
        if (p.window_right < 0) {
            const int spread = int(int64_t(w.end_m - w.first_m) * w.key0 / (w.seqlen_k > 0 ? w.seqlen_k : 1));
            w.start_step += min(spread, w.key0 / kBlockM);
        }
        w.start_place = w.start_step, w.last_place = w.end_m - 1, w.wrap_place = w.first_m;
    }
    const int hidden_rows = min(w.key0 + kBlockN, w.seqlen_k) - 1 - w.right;
    w.mask_place = w.key0 + kBlockN > w.seqlen_k ? w.end_m : min(hidden_rows > 0 ? (hidden_rows + kBlockM - 1) / kBlockM : 0, w.end_m);
    w.mask_place *= w.width;
    return w.key0 >= 0 && w.key0 < w.seqlen_k;
}

// Query tiles that the block walks for these keys, over all heads of the group.
FA_HOST_DEVICE int count_tiles(const BackwardWork& w) { return w.rounds * (w.end_step - w.first_step); }

// The sets of keys that a block takes, in two slots that are used in turn. full: the slot is written. empty: every reader is done with it.
template <typename Work>
struct WorkListOf {
    static constexpr int kReaders = 3 + (kMainWarps + kDqWarps) * kWarpArrivals;  // three threads of the loading warpgroup, and the warps
    Work work[2];
    uint64_t full[2], empty[2];
    uint64_t asked;  // the loads of all query tiles have been issued: time to take the next keys
};
using WorkList = WorkListOf<BackwardWork>;
// Calls visit(work, n) for the n-th set of keys that the block takes, until there are no more.
template <typename Work, typename Visit>
__device__ __forceinline__ void for_each_work(const WorkListOf<Work>& list, const Visit& visit) {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        mbarrier_wait(shared_address(&list.full[n & 1]), n >> 1 & 1);
        const Work& w = list.work[n & 1];
        if (!uniform(w.valid)) return;
        visit(w, n);
    }
}
template <typename Work>
__device__ __forceinline__ void release_work(const WorkListOf<Work>& list, uint32_t n) {
    mbarrier_arrive(shared_address(&list.empty[n & 1]));
}

// The number in QueryTiles of the first query tile of the group's first head. A tile takes at least 16 KiB, so 32 bits suffice.
__device__ __forceinline__ uint32_t first_query_tile(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w) {
    return uint32_t((p.cu_seqlens_q ? 0 : w.batch) * p.nheads + w.head_k * p.group) * tiles.tiles + w.first_tile;
}
// Whether rows of the call may be large in a plan that corrects their tiles; and the bases of the large rows of a visited tile.
template <BackwardPlanId kId>
__device__ __forceinline__ bool corrects_large_rows(const QueryTiles& tiles) {
    return !kBackwardPlan<kId>.general && !kBackwardPlan<kId>.softcap && *tiles.some_large() == QueryTiles::kSomeLarge;
}
template <int kBlockM>
__device__ __forceinline__ const float2* large_rows_of(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w,
                                                       const Visited& at) {
    const int64_t tile = first_query_tile(p, tiles, w) + uint32_t(at.head * tiles.tiles + at.m);
    return reinterpret_cast<const float2*>(tiles.large) + tile * kBlockM;
}
// Calls visit(it, at, tile) for the block's query tiles in the order of the walk. it: the iteration, from it0 on. tile: its number in
// QueryTiles.
template <typename Work, typename Visit>
__device__ __forceinline__ void for_each_query_tile(const AttentionParams& p, const QueryTiles& tiles, const Work& w, const Visit& visit) {
    const uint32_t tile0 = first_query_tile(p, tiles, w);
    const int first = w.first_step, end = w.end_step, start = w.start_step;  // copies: shared memory is slow while products read it
    const bool in_order = w.in_order;
    uint32_t it = w.it0;
    int m = in_order ? w.end_m - 1 : start, head = 0;
#pragma unroll 1
    for (int left = count_tiles(w); left > 0; --left) {
        const auto at = visit_of_step(w, m, head);
        visit(it++, at, tile0 + uint32_t(head * tiles.tiles + at.m));
        if (in_order) {
            head = next_step(head, first, end);
            if (head == start) --m;
        } else {
            m = next_step(m, first, end);
            if (m == start) ++head;
        }
    }
}

}  // namespace fa
