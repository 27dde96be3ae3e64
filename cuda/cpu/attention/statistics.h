// statistics.h: the maximum and the sum of a row's softmax, apart, where float32 cannot hold them in one lse.
//
// A second pass over the scores computes P = exp(S - lse). lse has an ulp of 0.008 at 1e5 and of 1 at 1e7, so P of a row would not sum
// to 1. Where |lse| is large, the pass first finds row_max and row_sum again, from S as it adds S up itself, and uses P = exp(S - row_max -
// log row_sum).
#pragma once

#include <cmath>

#include "common/older_glibc.h"

FA_FIRST_VERSION(log);  // of double

namespace fa::cpu {

struct RowStatistics {
    float row_max, log_sum;  // lse and 0, or apart
};

constexpr float kLargeLse = 4096;  // an ulp is 2^-11 from here on

inline bool is_large(float lse) { return std::fabs(lse) > kLargeLse && std::fabs(lse) < INFINITY; }

// The statistics to use for a row with a large lse; row_max and row_sum are those over the keys of this call. A caller's lse may stand for
// more keys than the call has. Then lse is above the statistics by more than it can be off, and is used. No caller's lse is below them.
inline RowStatistics apart(float lse, float row_max, float row_sum) {
    if (!(row_sum > 0)) return {lse, 0};
    const double log_sum = std::log(double(row_sum)), off = std::fabs(double(lse)) * 0x1p-20;  // 4 to 8 ulp
    if (row_max + log_sum < lse - off) return {lse, 0};
    return {row_max, float(log_sum)};
}

// P of a score, never above 1: where another pass added the product up in another order, the score may be larger here.
inline float probability(float score, const RowStatistics& row) {
    const float x = score - row.row_max - row.log_sum;
    return std::exp(x > 0 ? 0 : x);
}

}  // namespace fa::cpu
