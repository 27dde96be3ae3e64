// lanes/options.cuh: the scores of decode_lanes_sm80 in natural units, with every option but dropout; float32. The arithmetic is that of
// transform_score in attention/common/mask.h: softmax_scale multiplies the product, and tanh is exact.
#pragma once

#include "attention/common/mask.h"
#include "attention/decode/lanes/softmax.cuh"

namespace fa {
namespace {

// Row j of the warp. Rows past the last one act like it.
template <typename Plan>
struct LaneRow {
    int query, head;
    __device__ __forceinline__ LaneRow(const LaneParams& p, const LanePlace<Plan>& place, const LaneUnit& unit, int j) {
        const int r = min(unit.row0 + place.tile_row + j, p.rows - 1);
        query = lane_query(p, r), head = lane_head(p, unit.head_k, r, query);
    }
};

// What is added to the lane's scores of the keys from key0 on: the bias, or -inf where a mask hides the key from the row. Nothing is read
// for keys after `last`; their addends are those of `last`.
template <typename Plan>
__device__ __forceinline__ void load_lane_addends(LaneScores<Plan>& addends, const AttentionParams& a, const LaneParams& p,
                                                  const LanePlace<Plan>& place, const LaneUnit& unit, int key0, int last) {
#pragma unroll
    for (int j = 0; j < Plan::kRows; ++j) {
        const LaneRow<Plan> row(p, place, unit, j);
        const auto each = [&](const auto& change) {
#pragma unroll
            for (int i = 0; i < Plan::kAtOnce; ++i) change(addends[i][j], min(key0 + i * place.key_step, last));
        };
        const auto row_in = [&](const ScoreView& x) { return unit.b * x.batch + row.head * x.head + row.query * x.row; };
        const auto hide = [](float& addend, bool hidden) { addend = hidden ? -INFINITY : addend; };
        if (a.bias.data) {
            const float* const from = static_cast<const float*>(a.bias.data) + row_in(a.bias);
            each([&](float& addend, int key) { addend = from[key]; });
        } else {
            each([](float& addend, int) { addend = 0; });
        }
        if (a.mask.data) {
            const uint8_t* const from = static_cast<const uint8_t*>(a.mask.data) + row_in(a.mask);
            each([&](float& addend, int key) { hide(addend, from[key] == 0); });
        }
        if (a.intervals.data) {
            const int32_t* const numbers = row_indices_of(a, unit.b, row.head);
            each([&](float& addend, int key) { hide(addend, hidden_rows(a, numbers + key * a.intervals.key).hides(row.query)); });
        }
        if (a.blocks.data) {
            const uint8_t* const from = blocks_of_row(a, unit.b, row.head, row.query);
            each([&](float& addend, int key) { hide(addend, from[key >> a.blocks.key_shift] == 0); });
        }
    }
}

// S = softcap(scale S) + alibi + addends. A score that is hidden is -inf even where the product is NaN.
template <typename Plan>
__device__ __forceinline__ void transform_lane_scores(LaneScores<Plan>& S, const LaneScores<Plan>& addends, const AttentionParams& a,
                                                      const LaneParams& p, const LanePlace<Plan>& place, const LaneUnit& unit, int shift,
                                                      int key0) {
#pragma unroll
    for (int j = 0; j < Plan::kRows; ++j) {
        const LaneRow<Plan> row(p, place, unit, j);
        const float slope = a.alibi_slopes ? a.alibi_slopes[unit.b * a.alibi_batch + row.head] : 0.0f;
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i) {
            float score = __fmul_rn(S[i][j], a.scale);
            if (a.softcap != 0) score = a.softcap * tanhf(score / a.softcap);
            if (a.alibi_slopes) score -= slope * fabsf(float(row.query + shift - key0 - i * place.key_step));
            S[i][j] = addends[i][j] == -INFINITY ? -INFINITY : score + addends[i][j];
        }
    }
}

// Which of the lane's keys some row of the warp sees. The others have P = 0, but 0 x NaN is NaN: their values are cleared.
template <typename Plan>
struct LaneSeen {
    bool key[Plan::kAtOnce];

    __device__ __forceinline__ explicit LaneSeen(const LaneScores<Plan>& S) {
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i) {
            key[i] = false;
#pragma unroll
            for (int j = 0; j < Plan::kRows; ++j) key[i] |= S[i][j] != -INFINITY;
        }
    }
    __device__ __forceinline__ void clear_others(LaneKeyBits<Plan>& values) const {
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i)
#pragma unroll
            for (int x = 0; x < Plan::kParts; ++x)
                if (!key[i]) values[i][x] = make_uint4(0, 0, 0, 0);
    }
};

}  // namespace
}  // namespace fa
