// read_scores.cuh: the options that decode_split_sm80 and decode_wide_sm80 read from memory for each score: bias, masks of every form, and
// dropout.
//
// A thread reads what its own scores need, 8 or 16 elements: in decode_split_sm80 before the products of a part of keys, during which they
// arrive, in decode_wide_sm80 after them. Rows of a warp that share a row of the mask read the same sectors.
#pragma once

#include "attention/common/dropout.h"
#include "attention/common/mask.h"
#include "attention/decode/common/scores.cuh"
#include "common/element.cuh"
#include "device/mma.cuh"

namespace fa {
namespace {

__device__ __forceinline__ ScoreOptions natural_options_of(const DecodeParams& d) {
    const AttentionParams& p = d.attention;
    return {p.softcap, p.alibi_slopes, p.seqlen_q, p.group, p.window_left, p.window_right};
}

// Row r of the rows that share a key head.
struct RowPlace {
    int query, head;
    __device__ __forceinline__ RowPlace(const DecodeParams& d, int head_k, int r) {
        query = d.group.divide(r), head = head_k * d.attention.group + d.group.remainder(r, query);
    }
};

// What is added to the thread's scores of the keys from key0 on: the bias, or -inf where a mask hides the key from the row. Nothing is read
// for keys after `last`; their addends are those of `last`. The loads of an option are in flight at once, those of kAtOnce rows.
template <typename T, int kAtOnce, int kTilesN, typename RowOf>
__device__ __forceinline__ void load_addends(const DecodeParams& d, int b, int head_k, int key0, int last, int lane, const RowOf& row_of,
                                             float (&addends)[kTilesN][4]) {
    const AttentionParams& p = d.attention;
#pragma unroll
    for (int first = 0; first < 2; first += kAtOnce) {
        const RowPlace rows[2] = {RowPlace(d, head_k, row_of(first)), RowPlace(d, head_k, row_of(first + kAtOnce - 1))};
        // place(row): where an option's elements for a row are.
        const auto each = [&](const auto& place, const auto& change) {
            const decltype(place(rows[0])) places[2] = {place(rows[0]), place(rows[1])};
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2 * kAtOnce; ++e)
                    change(addends[n][2 * first + e], places[e / 2], min(key0 + 8 * n + mma_column(lane, e % 2), last), rows[e / 2]);
        };
        const auto row_in = [&](const auto* data, const ScoreView& x) {
            return [=](const RowPlace& at) { return data + (b * x.batch + at.head * x.head + at.query * x.row); };
        };
        const auto add = [](float& addend, const auto* row, int key, const RowPlace&) { addend = to_float(row[key]); };
        const auto hide = [](float& addend, bool hidden) { addend = hidden ? -INFINITY : addend; };
        if (!p.bias.data) {
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2 * kAtOnce; ++e) addends[n][2 * first + e] = 0;
        } else if (p.bias_dtype == DType::kFloat32) {
            each(row_in(static_cast<const float*>(p.bias.data), p.bias), add);
        } else {
            each(row_in(static_cast<const T*>(p.bias.data), p.bias), add);
        }
        if (p.mask.data)
            each(row_in(static_cast<const uint8_t*>(p.mask.data), p.mask),
                 [&](float& addend, const uint8_t* row, int key, const RowPlace&) { hide(addend, row[key] == 0); });
        if (p.intervals.data)
            each([&](const RowPlace& at) { return row_indices_of(p, b, at.head); },
                 [&](float& addend, const int32_t* numbers, int key, const RowPlace& at) {
                     hide(addend, hidden_rows(p, numbers + key * p.intervals.key).hides(at.query));
                 });
        if (p.blocks.data)
            each([&](const RowPlace& at) { return blocks_of_row(p, b, at.head, at.query); },
                 [&](float& addend, const uint8_t* row, int key, const RowPlace&) { hide(addend, row[key >> p.blocks.key_shift] == 0); });
    }
}

// A score that is hidden is -inf even where the product is NaN.
template <int kTilesN>
__device__ __forceinline__ void add_addends(float (&S)[kTilesN][4], const float (&addends)[kTilesN][4]) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[n][e] = addends[n][e] == -INFINITY ? -INFINITY : S[n][e] + addends[n][e];
}

// Which keys of a part some row of the warp sees. The others have P = 0, but 0 x NaN is NaN: add_values takes zeros for their values.
template <int kTilesN>
struct SeenKeys {
    uint32_t bits;  // bit 8 n + e: key mma_column(lane, e) of tile n

    __device__ __forceinline__ SeenKeys(const float (&S)[kTilesN][4], int lane) : bits(0) {
        static_assert(kTilesN <= 4, "a bit for each key of a part");
#pragma unroll
        for (int n = 0; n < kTilesN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) bits |= unsigned(S[n][e] != -INFINITY || S[n][2 + e] != -INFINITY) << (8 * n + e);
        bits = __reduce_or_sync(kFullWarp, bits << mma_column(lane, 0)) >> mma_column(lane, 0);
    }
    __device__ __forceinline__ uint32_t operator()(uint32_t values, int n) const {
        return values & ((bits >> 8 * n & 1 ? 0xFFFFu : 0u) | (bits >> (8 * n + 1) & 1 ? 0xFFFF0000u : 0u));
    }
};

// Zeroes the dropped probabilities. The two neighbouring keys that a thread has in a tile share a Philox call.
template <int kTilesN, typename RowOf>
__device__ __forceinline__ void drop_scores(const DecodeParams& d, int b, int head_k, int key0, int lane, const RowOf& row_of,
                                            float (&P)[kTilesN][4]) {
    const AttentionParams& p = d.attention;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const RowPlace at(d, head_k, row_of(half));
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            const int key = key0 + 8 * n + mma_column(lane, 0);
            const Philox4 block = dropout_block(p, b, at.head, at.query, key);
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (dropped(p, block, key + e)) P[n][2 * half + e] = 0;
        }
    }
}

}  // namespace
}  // namespace fa
