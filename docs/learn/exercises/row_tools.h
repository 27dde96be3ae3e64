// row_tools.h: the two products of a row that the exercises in C share, and the codes that their kernels return.
#pragma once
#include "attention.h"

enum { kNotWritten = 77, kWroteTooMuch = 78, kWrongItems = 79, kNoSuchItem = 80, kTooManyScores = 84 };
enum { kLanes = 16 };  // headdim is a multiple of kLanes

// s[j] = scale * (q . key j), for `count` keys.
static inline void scores(const float* q, const float* k, size_t stride, int count, int n, float scale, float* s) {
    for (int j = 0; j < count; ++j, k += stride) {
        float sum[kLanes] = {0};
        for (int d = 0; d < n; d += kLanes)
            for (int l = 0; l < kLanes; ++l) sum[l] += q[d + l] * k[d + l];
        for (int half = kLanes / 2; half > 0; half /= 2)
            for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
        s[j] = scale * sum[0];
    }
}

// out += the sum of p[j] * (row j of v), for `count` rows.
static inline void add_values(float* restrict out, const float* restrict p, const float* restrict v, size_t stride, int count, int n) {
    for (int j = 0; j < count; ++j, v += stride)
        for (int d = 0; d < n; ++d) out[d] += p[j] * v[d];
}
