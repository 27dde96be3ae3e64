// row_products.h: products of a few rows of queries with rows of keys, along headdim. Like rows.h, it is included inside the namespace of
// an instruction set. Forward and backward pass of few rows use it, so that both have the same scores.
#pragma once

#include "cpu/attention/rows.h"

template <bool b>
struct Flag {
    static constexpr bool value = b;
};

// s[n][j] = factor * (k[j] . q[n]), in whole vectors; lanes past the last key repeat it. scale: factors of the rows of 8-bit keys.
// Calls prefetch(j) when row j is begun.
template <DType dtype, int kQueries, typename Prefetch>
FA_INLINE void row_products(const char* const* k, const float* scale, int keys, const float* const* q, int headdim, float factor,
                            float* const* s, const Prefetch& prefetch) {
    constexpr int size = int(element_size(dtype)), kMost = 4 * kVectors / kQueries;  // as many sums as there are registers for
    constexpr int kRows = L < 8 ? (L < kMost ? L : kMost) : (8 < kMost ? 8 : kMost);
    for (int j = 0; j < keys; j += L) {
        Vec sum[kQueries][L];
        for (int part = 0; part < L; part += kRows) {
            const char* row[kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                const int key = j + part + i < keys ? j + part + i : keys - 1;
                row[i] = k[key];
                prefetch(key);
            }
            Vec acc[kQueries][kRows] = {};
            const auto add = [&](int d, auto whole) __attribute__((always_inline)) {
                Vec query[kQueries];
#pragma GCC unroll 4
                for (int n = 0; n < kQueries; ++n) query[n] = *(const Vec*)(q[n] + d);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) {
                    const char* const from = row[i] + d * size;
                    const Vec key = decltype(whole)::value ? load_vector<dtype>(from) : load_partial<dtype>(from, headdim - d);
#pragma GCC unroll 4
                    for (int n = 0; n < kQueries; ++n) acc[n][i] += key * query[n];
                }
            };
            int d = 0;
            for (; d + L <= headdim; d += L) add(d, Flag<true>());
            if (d < headdim) add(d, Flag<false>());
#pragma GCC unroll 4
            for (int n = 0; n < kQueries; ++n)
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) sum[n][part + i] = acc[n][i];
        }
        for (int n = 0; n < kQueries; ++n) {
            Vec score = sum_from<1, L>(sum[n]);
            if (is_8bit(dtype)) score *= load_unaligned<Vec>(scale + j);
            *(Vec*)(s[n] + j) = score * factor;
        }
    }
}
