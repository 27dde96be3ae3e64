// row.h: the softmax of a row of scores, in loops that the compiler turns into vectors. They contain no calls, and keep sums and maxima in
// 16 lanes, as many as the widest vector has.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { kLanes = 16 };  // the length of a row is a multiple of this

// e^x for x <= 0. x = n ln 2 + r with n whole and |r| <= ln 2 / 2. e^r is a polynomial, and 2^n is added to the exponent's bits. Error: 1.5
// units in the last place. Below -87 it is 0; so are hidden keys, whose score is -inf.
static inline float exponential(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves n in the lowest bits, rounded
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped * 1.44269504f + magic, n = shifted - magic;
    const float r = clamped - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two parts: n times the first is exact
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    int32_t bits, power;
    memcpy(&bits, &y, 4), memcpy(&power, &shifted, 4);
    bits += (int32_t)((uint32_t)power << 23);
    memcpy(&y, &bits, 4);
    return x < -87.0f ? 0.0f : y;
}

static inline float largest_of(const float* s, int count, float most) {
    float max[kLanes];
    for (int l = 0; l < kLanes; ++l) max[l] = most;
    for (int j = 0; j < count; j += kLanes)
        for (int l = 0; l < kLanes; ++l) max[l] = s[j + l] > max[l] ? s[j + l] : max[l];
    for (int l = 0; l < kLanes; ++l) most = max[l] > most ? max[l] : most;
    return most;
}

// s becomes e^(s - shift); returns the sum.
static inline float exponentials(float* s, int count, float shift) {
    float sum[kLanes] = {0};
    for (int j = 0; j < count; j += kLanes)
        for (int l = 0; l < kLanes; ++l) {
            s[j + l] = exponential(s[j + l] - shift);
            sum[l] += s[j + l];
        }
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
    return sum[0];
}

// sum[0 .. n - 1] += the sum of weight[r] * (row r), with row r at rows + r * stride. Takes four rows at a time, so that `sum` is loaded
// and stored once for all four.
static inline void add_rows(float* restrict sum, int n, const float* weight, const float* restrict rows, size_t stride, int count) {
    int r = 0;
    for (; r + 4 <= count; r += 4, rows += 4 * stride)
        for (int i = 0; i < n; ++i)
            sum[i] += (weight[r] * rows[i] + weight[r + 1] * rows[stride + i]) +
                      (weight[r + 2] * rows[2 * stride + i] + weight[r + 3] * rows[3 * stride + i]);
    for (; r < count; ++r, rows += stride)
        for (int i = 0; i < n; ++i) sum[i] += weight[r] * rows[i];
}
