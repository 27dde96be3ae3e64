// prefix.h: the plan of a call with shared_prefix: which sequences begin with the same pages, and where the results for those keys lie.
// sharing.h makes it on the device. The prefix pass, the decode kernel that attends to the other keys, and combine.cu read it.
#pragma once

#include "common/types.h"

namespace fa {

// A shared prefix is whole steps of keys: whole tiles of every decode kernel.
constexpr int kPrefixStep = 128;

// Sequences that share their first `keys` keys. Their rows of a key head form one matrix: row `rank` * rows_of_key_head + r. It is cut into
// row_tiles tiles of 2^row_shift rows, and the keys into pieces of `each` tiles. Item first_item + piece * units + unit of the call is one
// piece for one unit, where units = nheads_k * row_tiles, and a unit is head_k * row_tiles + tile of rows.
struct PrefixGroup {
    int32_t leader;          // the first sequence of the group: its row of the block table is read
    int32_t begin, members;  // in PrefixPlan::order
    int32_t keys;
    int32_t each, pieces, row_tiles, first_item;
};

// In the workspace.
struct PrefixPlan {
    int32_t* counts;    // groups, items
    int32_t* keys;      // (batch) shared keys of each sequence; 0 = none. nullptr: the call looks for none
    int32_t* group_of;  // (batch) its group, and
    int32_t* rank;      // (batch) its place among the members: undefined where it shares nothing
    int32_t* order;     // (batch) the members of all groups, one group after the other
    PrefixGroup* groups;
    int32_t row_shift;  // a tile of the prefix pass has 2^row_shift rows
    // The results of the prefix pass: (items, 2^row_shift, headdim_v), and exponents of 2.
    float *partial, *partial_lse;
};

// One piece of a group's keys for one tile of rows of a key head.
struct PrefixItem {
    int32_t head_k, row_tile, begin, end;  // begin, end: tiles of keys
};
FA_HOST_DEVICE PrefixItem prefix_item(const PrefixGroup& group, int32_t item, int32_t nheads_k, int32_t tile_shift) {
    const int32_t units = nheads_k * group.row_tiles, at = item - group.first_item, piece = at / units, unit = at - piece * units;
    const int32_t begin = piece * group.each, tiles = group.keys >> tile_shift, end = begin + group.each;
    return {unit / group.row_tiles, unit % group.row_tiles, begin, end < tiles ? end : tiles};
}

// Where the results of a row lie: `count` pieces, in rows first + i * step of PrefixPlan::partial.
struct PrefixPieces {
    int32_t count;
    int64_t first, step;
};
FA_HOST_DEVICE PrefixPieces prefix_pieces(const PrefixPlan& plan, int32_t b, int32_t head_k, int32_t r, int32_t rows, int32_t nheads_k) {
    if (plan.keys[b] == 0) return {0, 0, 0};
    const PrefixGroup group = plan.groups[plan.group_of[b]];
    const int32_t row = plan.rank[b] * rows + r, tile = row >> plan.row_shift, unit = head_k * group.row_tiles + tile;
    return {group.pieces, ((int64_t(group.first_item) + unit) << plan.row_shift) + row - (tile << plan.row_shift),
            (int64_t(nheads_k) * group.row_tiles) << plan.row_shift};
}

}  // namespace fa
