// wgmma_sm90/intervals.cuh: masks by intervals in the loops of plans with options. The producer decides what becomes of a tile of keys,
// from the bounds that a small kernel has written (attention/common/interval_bounds.cu):
//
//     hidden  no row of the item sees any of its keys: the tile is not loaded, and the consumers never hear of it
//     whole   every row sees every key: the consumers treat it as in a call without a mask
//     cut     the producer writes beside the tile which rows of the item do not see each key. A consumer warp compares them, unless the
//             bounds say that its sixteen rows see everything. Keys that no row of the item sees have their V zeroed, as under a mask
//
// A window or causal hides what lies outside it, as in all plans with options.
#pragma once

#include <climits>

#include "attention/common/tile_intervals.h"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"

namespace fa {

// ---- the producer, a whole warp ----

// What the small kernels have written.
struct BoundsOfTiles {
    const IntervalBounds &bounds, &groups;
};

// Called by one thread for each item. Opaque: nothing of this is computed before, where registers would hold it.
template <int kBlockN>
__device__ __forceinline__ void describe_item(const AttentionParams& p, const BoundsOfTiles& written, const ForwardWork& w, int /* slot */,
                                              SeenKeyTiles& known) {
    const IntervalBounds &bounds = written.bounds, &groups = written.groups;
    const int entry = opaque(w.head / opaque(p.intervals.heads_of_entry));
    known.bounds = bounds.data + entry * bounds.head + bounds.first<kBlockN>(p, w.batch);
    known.groups = groups.data ? groups.data + entry * groups.head + groups.first<kBlockN * kBoundsOfGroup>(p, w.batch) : nullptr;
    known.numbers = opaque(row_indices_of(p, w.batch, 0)) + entry * p.intervals.head;
    known.from = INT_MAX;
}
// Writes to the entry of tile n which rows of the item its keys are hidden from.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ void read_tile_rows(const AttentionParams& p, const ForwardWork& w, int n, const SeenKeyTiles& known,
                                               IntervalKeyTile<kBlockN>& tile) {
    const int lane = opaque(int(threadIdx.x));
    const RowIndicesForm form = RowIndicesForm(opaque(int(p.intervals.form)));
    // Else the item sees nothing, and this is the one tile that it has; without keys that tile is past the end.
    const uint32_t looked = n - known.from;
    const bool is_known = looked < 32 && known.cut >> looked & 1;
    if (lane < int(sizeof tile.bounds / sizeof(int)) && n * kBlockN < w.seqlen_k)
        reinterpret_cast<int*>(&tile.bounds)[lane] =
            reinterpret_cast<const int*>(is_known ? known.of_tiles + looked : known.bounds + n)[lane];
    if (is_known && known.equal >> looked & 1) {  // as in documents, where an item may have rows of two
        __syncwarp();
        const HiddenRows all = {{tile.bounds.max_begin[0], tile.bounds.max_begin[1]}, {tile.bounds.max_end[0], tile.bounds.max_end[1]}};
        const uint32_t rows[2] = {rows_in_tile(all, 0, form, w.row0, kBlockM).packed(),
                                  rows_in_tile(all, 1, form, w.row0, kBlockM).packed()};
        for (int place = lane; place < kBlockN; place += 32) tile.rows[0][place] = rows[0], tile.rows[1][place] = rows[1];
        const int last = min(kBlockM, w.seqlen_q - w.row0) - 1, key0 = n * kBlockN, end = key0 + kBlockN;
        if (end - 1 <= w.row0 + w.right && key0 >= w.row0 + last + w.left && end <= w.seqlen_k) {  // no edge cuts the tile
            const TileRows of_keys[2] = {TileRows::from(rows[0]), TileRows::from(rows[1])};
            const bool hidden = hides_all(of_keys, 0, last);
            if (lane < 4) tile.hidden[lane] = hidden ? ~0u : 0u;
            tile.hides = hidden;
            return;
        }
    } else {
#pragma unroll 2
        for (int i = 0; i < (kBlockN + 31) / 32; ++i) {
            const int place = 32 * i + lane;
            if (place >= kBlockN || n * kBlockN + place >= w.seqlen_k) continue;
            const HiddenRows all = hidden_rows(p, known.numbers + (n * kBlockN + place) * p.intervals.key);
            tile.rows[0][place] = rows_in_tile(all, 0, form, w.row0, kBlockM).packed();
            tile.rows[1][place] = rows_in_tile(all, 1, form, w.row0, kBlockM).packed();
        }
    }
    __syncwarp();
    // Registers are few, so the rows are read again.
    uint32_t any = 0;
#pragma unroll 1
    for (int q = 0; q < 4; ++q) {  // the lane's key of word q: KeyTile::hidden
        const int place = lane / 2 * 8 + lane % 2 + 2 * q, key = n * kBlockN + place;
        bool hidden = false;
        if (lane / 2 * 8 < kBlockN && key < w.seqlen_k) {
            const TileRows rows[2] = {TileRows::from(tile.rows[0][place]), TileRows::from(tile.rows[1][place])};
            // The window leaves these rows of the item to the key.
            const int first = max(0, key - w.right - w.row0), last = min(min(kBlockM, w.seqlen_q - w.row0) - 1, key - w.left - w.row0);
            hidden = hides_all(rows, first, last);
        }
        const uint32_t word = __ballot_sync(~0u, hidden);
        if (lane == q) tile.hidden[q] = word;
        any |= word;
    }
    tile.hides = any != 0;
}

// Looks at 32 tiles of the item, one in each lane. They end with tile n, or with the last tile of the first group below it of which the
// item sees something. Returns where they end. Without such a group among the next 32: its first tile, and no tile is seen.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int look_at_tiles(const BoundsOfTiles&, const ForwardWork& w, int n, SeenKeyTiles& known) {
    const int lane = opaque(int(threadIdx.x)), last = min(w.row0 + kBlockM, w.seqlen_q) - 1;
    if (known.groups) {
        const int group = n / kBoundsOfGroup - 31 + lane;
        bool some = false;
        if (group >= w.first_tile / kBoundsOfGroup && group * kBoundsOfGroup * kBlockN < w.seqlen_k)
            some = load_bounds(known.groups + group).seen_by(w.row0, last) != Seen::kNothing;
        const uint32_t groups = __ballot_sync(~0u, some);
        if (groups == 0) {
            n = (n / kBoundsOfGroup - 31) * kBoundsOfGroup;
            known.from = n, known.seen = known.cut = 0;
            __syncwarp();
            return n;
        }
        n = min(n, (n / kBoundsOfGroup - __clz(groups) + 1) * kBoundsOfGroup - 1);
    }
    const int own = n - 31 + lane;
    Seen seen = Seen::kNothing;
    bool equal = false;
    if (own >= w.first_tile && own * kBlockN < w.seqlen_k) {
        const HiddenBounds bounds = load_bounds(known.bounds + own);
        seen = bounds.seen_by(w.row0, last), equal = bounds.are_equal();
        if (seen == Seen::kSome) known.of_tiles[lane] = bounds;
    }
    const uint32_t some = __ballot_sync(~0u, seen != Seen::kNothing), cut = __ballot_sync(~0u, seen == Seen::kSome);
    const uint32_t same = __ballot_sync(~0u, equal);
    known.from = n - 31, known.seen = some, known.cut = cut, known.equal = same;
    __syncwarp();
    return n;
}

template <int kBlockM, int kBlockN>
__device__ __forceinline__ void describe_tile(const AttentionParams& p, const BoundsOfTiles&, const ForwardWork& w, int n, bool cut,
                                              const SeenKeyTiles& known, IntervalKeyTile<kBlockN>& tile) {
    if (cut) read_tile_rows<kBlockM>(p, w, n, known, tile);
}

// ---- the consumers ----

// What intervals and windows do to the tiles of one item. The interface of TileOptions.
template <WgmmaPlanId kId>
struct TileIntervals {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr int kBlockN = kPlan.block_n;
    using Scores = float[kBlockN / 2];
    using Tile = KeyTileOf<kId>;
    const AttentionParams& p;
    const ForwardWork& w;
    const Consumer& me;
    const MaskedTiles masked;

    __device__ __forceinline__ bool has_edge(int n) const { return n >= masked.right_tile || n < masked.left_tile; }
    __device__ __forceinline__ bool is_plain(int cut, int n) const { return !(cut || has_edge(n)); }
    __device__ __forceinline__ void fetch(const Tile&, int /* n */) const {}
    // As me.rare(), but nothing of it is held in registers.
    static __device__ __forceinline__ Consumer rare() {
        const int thread = opaque(int(threadIdx.x)) - 128;
        return {thread / 128, thread % 128 / 32, thread % 32};
    }
    // What the bounds say that this warp's sixteen rows see of a tile.
    __device__ __forceinline__ Seen seen_of(const Tile& tile) const {
        if (!tile.cut) return Seen::kEverything;
        const int first = w.row0 + rare().row() / 16 * 16;
        return tile.bounds.seen_by(first, first + 15);
    }
    // Whether the tile must be compared for them.
    __device__ __forceinline__ bool is_cut(const Tile& tile) const { return seen_of(tile) != Seen::kEverything; }
    // Whether the maximum of the tile must be found: a row may see its first key.
    __device__ __forceinline__ bool is_exact(const Tile& tile, int n, int /* before */, const RowStatistics& rows) const {
        const Seen seen = seen_of(tile);
        if (seen == Seen::kSome || (seen == Seen::kEverything && n >= masked.right_tile)) return true;
        return __any_sync(~0u, rows.row_max[0] == -INFINITY || rows.row_max[1] == -INFINITY);
    }
    __device__ __forceinline__ void hide(Scores& S, const uint32_t (&rows)[kBlockN]) const {
        const Consumer at = rare();
        const uint32_t* pair = rows + 2 * at.quad();  // of two neighbouring keys
        const int row = at.row();
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 4) {
            const uint2 packed = *reinterpret_cast<const uint2*>(pair);
            pair = opaque(pair + 8);  // all loads at once would take too many registers
            const TileRows hidden[2] = {TileRows::from(packed.x), TileRows::from(packed.y)};
#pragma unroll
            for (int x = 0; x < 4; ++x)
                if (hidden[x % 2].hides(row + x / 2 * 8)) S[i + x] = -INFINITY;
        }
    }
    __device__ __forceinline__ void apply(Scores& S, const Tile& tile, int n) const {
        if (is_cut(tile)) {
            hide(S, tile.rows[0]);
            if (intervals_of_tile(p.intervals.form) > 1) hide(S, tile.rows[1]);
        }
        mask_scores<kId>(S, w, masked, n, me);
    }
    // Tiles that are not exact need no comparison but that of the left edge. Of some of them the warp sees nothing (kMask).
    __device__ __forceinline__ InExponent prepare(Scores& S, const Tile& tile, int n) const {
        if (seen_of(tile) == Seen::kNothing) return InExponent::kMask;
        mask_scores<kId>(S, w, masked, n, me);
        return InExponent::kNothing;
    }
    // Above an infinite maximum all P are 0, or NaN, and then the tile is computed again.
    template <typename Pack>
    __device__ __forceinline__ void take_exponentials(Scores& S, float scale, const RowStatistics& rows, const Tile&, int /* n */,
                                                      int /* before */, InExponent option, float (&sum)[2], const Pack& pack) const {
        const bool none = option == InExponent::kMask;
        const float base[2] = {none ? INFINITY : rows.row_max[0], none ? INFINITY : rows.row_max[1]};
        exponentials(S, exponent_of_products(scale), base, sum);
        pack();
    }
};

}  // namespace fa
