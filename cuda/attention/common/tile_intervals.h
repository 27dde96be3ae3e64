// tile_intervals.h: masks by intervals in the kernels of Hopper, for host and device: which tiles a walk leaves out, and the rows of one
// tile that do not see a key. mask.h has the rest of the arithmetic (HiddenRows, HiddenBounds).
#pragma once

#include "attention/common/mask.h"

namespace fa {

// Whether all of rows first .. last are hidden. So are no rows, with first > last.
FA_INLINED bool hides_all(const HiddenRows& rows, int32_t first, int32_t last) {
    for (int x = 0; x < 3; ++x)  // the first interval may go on where the second one ends
        if (rows.begin[x % 2] <= first && first < rows.end[x % 2]) first = rows.end[x % 2];
    return first > last;
}
// The bounds of two sets of keys together.
FA_INLINED void merge(HiddenBounds& bounds, const HiddenBounds& other) {
    for (int x = 0; x < 2; ++x) {
        if (other.max_begin[x] > bounds.max_begin[x]) bounds.max_begin[x] = other.max_begin[x];
        if (other.min_begin[x] < bounds.min_begin[x]) bounds.min_begin[x] = other.min_begin[x];
        if (other.max_end[x] > bounds.max_end[x]) bounds.max_end[x] = other.max_end[x];
        if (other.min_end[x] < bounds.min_end[x]) bounds.min_end[x] = other.min_end[x];
    }
}
// Adds a key to the bounds of a tile. If no row sees the key, not even outside its intervals, where causal or a window may hide it, the
// tile must never count as seen by everybody: a kernel has to zero the key's values, which may be NaN.
FA_HOST_DEVICE void add_key(HiddenBounds& bounds, const AttentionParams& p, const Sequence& s, const HiddenRows& rows, int32_t key) {
    bounds.add(rows);
    const QueryRange range = query_range(p, s, key);
    if (hides_all(rows, range.begin, range.end - 1)) bounds.min_begin[0] = INT32_MIN, bounds.max_end[0] = INT32_MAX;
}
// Whether there may be such a key.
FA_INLINED bool may_have_unseen_key(const HiddenBounds& bounds) {
    return bounds.min_begin[0] == INT32_MIN && bounds.max_end[0] == INT32_MAX;
}

// ---- a block of keys walks over tiles of rows ----

// The tiles of rows in which no row sees any of the keys, in at most two runs: a run for each of the intervals that all keys share. The
// runs are in order and do not overlap.
struct TileGaps {
    int32_t begin[2], count[2];

    FA_INLINED int32_t tiles() const { return count[0] + count[1]; }
    // The tile that step `step` of the walk visits. Steps count from the first tile on and pass over the gaps.
    FA_INLINED int32_t tile_of(int32_t step) const {
        if (step >= begin[0]) step += count[0];
        if (step >= begin[1]) step += count[1];
        return step;
    }
};
// Among tiles first .. end - 1 of block_m rows. bounds: of the keys.
FA_INLINED TileGaps tile_gaps(const HiddenBounds& bounds, int32_t first, int32_t end, int32_t block_m, int32_t seqlen_q) {
    TileGaps gaps;
    for (int x = 0; x < 2; ++x) {  // rows max_begin .. min_end - 1 are hidden from all keys
        const int32_t from = bounds.max_begin[x], to = bounds.min_end[x];
        gaps.begin[x] = clamp_to(from <= 0 ? 0 : (from - 1) / block_m + 1, first, end);
        gaps.count[x] = clamp_to(to >= seqlen_q ? end : to < 0 ? 0 : to / block_m, first, end) - gaps.begin[x];
        if (gaps.count[x] < 0) gaps.count[x] = 0;
    }
    if (gaps.begin[1] < gaps.begin[0]) {
        const TileGaps other = gaps;
        gaps = {{other.begin[1], other.begin[0]}, {other.count[1], other.count[0]}};
    }
    const int32_t shared = gaps.begin[0] + gaps.count[0] - gaps.begin[1];
    if (shared > 0) gaps.begin[1] += shared, gaps.count[1] = gaps.count[1] > shared ? gaps.count[1] - shared : 0;
    return gaps;
}

// ---- a tile ----

// The rows of a tile that do not see a key: begin .. begin + count - 1, counted from the tile's first row. With count < 0: all but those of
// begin + count .. begin - 1. One comparison decides either.
struct TileRows {
    int32_t begin, count;

    FA_INLINED bool hides(int32_t row) const { return uint32_t(row - begin) < uint32_t(count); }
    // The first row from `row` on that this interval does not hide, where it does not begin anew further down.
    FA_INLINED int32_t pass(int32_t row) const {
        if (!hides(row)) return row;
        return count >= 0 || row < begin ? begin + count : INT32_MAX;
    }
    // In 32 bits, for tiles of less than 2^15 rows.
    FA_INLINED uint32_t packed() const { return uint32_t(begin) | uint32_t(count) << 16; }
    static FA_INLINED TileRows from(uint32_t packed) { return {int32_t(packed & 0xFFFF), int32_t(packed) >> 16}; }
};
// Interval x of a key. RowIndicesForm::kOutside has the first alone, which stands for both.
FA_INLINED TileRows rows_in_tile(const HiddenRows& hidden, int x, RowIndicesForm form, int32_t row0, int32_t rows) {
    const bool outside = form == RowIndicesForm::kOutside;
    if (x == 1 && form != RowIndicesForm::kTwoIntervals) return {0, 0};
    const int32_t begin = clamp_to(hidden.begin[x], row0, row0 + rows) - row0;
    const int32_t end = clamp_to(outside ? hidden.end[1] : hidden.end[x], row0, row0 + rows) - row0;
    if (!outside) return {begin, end > begin ? end - begin : 0};
    return end >= begin ? TileRows{0, rows} : TileRows{begin, end - begin};  // rows before `end`, and rows from `begin` on
}
// Whether two intervals together hide all of rows first .. last. So are no rows, with first > last.
FA_INLINED bool hides_all(const TileRows (&rows)[2], int32_t first, int32_t last) {
    return rows[0].pass(rows[1].pass(rows[0].pass(first))) > last;  // either may go on where the other ends
}
FA_INLINED int intervals_of_tile(RowIndicesForm form) { return form == RowIndicesForm::kTwoIntervals ? 2 : 1; }

}  // namespace fa
