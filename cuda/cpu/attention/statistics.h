// statistics.h: row_max and the log of row_sum as separate numbers, for rows whose lse is too large for the precision of float32.
//
// A second pass over the scores computes P = exp(S - lse). lse has an ulp of 0.008 at 1e5 and of 1 at 1e7, so P of a row would not sum to
// 1. Where |lse| is large, the pass first recomputes row_max and row_sum, from the S that it computes itself, and uses P = exp(S - row_max
// - log row_sum).
#pragma once

#include <cmath>

#include "common/older_glibc.h"

FA_FIRST_VERSION(log);  // of double

namespace fa::cpu {

struct RowStatistics {
    float row_max, log_sum;  // lse and 0, or the two parts of lse
};

constexpr float kLargeLse = 4096;  // an ulp is at least 2^-11 from here on

inline bool is_large(float lse) { return std::fabs(lse) > kLargeLse && std::fabs(lse) < INFINITY; }

// The statistics to use for a row with a large lse; row_max and row_sum are over the keys of this call. The caller's lse may cover more
// keys than the call has. It then exceeds these statistics by more than rounding explains, and is used instead. It is never below them.
inline RowStatistics apart(float lse, float row_max, float row_sum) {
    if (!(row_sum > 0)) return {lse, 0};
    const double log_sum = std::log(double(row_sum)), off = std::fabs(double(lse)) * 0x1p-20;  // 4 to 8 ulp
    if (row_max + log_sum < lse - off) return {lse, 0};
    return {row_max, float(log_sum)};
}

// P of a score, never above 1: if another pass summed the product in another order, the score may be larger here.
inline float probability(float score, const RowStatistics& row) {
    const float x = score - row.row_max - row.log_sum;
    return std::exp(x > 0 ? 0 : x);
}

}  // namespace fa::cpu
