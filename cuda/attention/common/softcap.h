// softcap.h: tanh for softcap in the Hopper forward pass, on the GPU, and on the host for its test. A score, softcap tanh(x), is wrong by
// softcap times the error of tanh, and lse by the mean error of its row: at softcap 50 by at most 4e-6 while |x| < 0.6, and 1.2e-5 above.
//
// Operations of a score, where a multiprocessor issues 128 a clock, 16 of them to the special function unit (MUFU). Without softcap a score
// takes one of MUFU and about four others. The tensor cores take 1/16 clock for it at head dim 64, 1/8 at 128.
//     CappedExponent     5 more:           in all 1/13 clock
//     tanh_polynomial    7:                in all 1/11 clock
//     tanh_any          14 and 2 of MUFU:  in all 3/16 clock, which MUFU takes
#pragma once

#include <cfloat>
#include <cmath>

#include "common/constants.h"
#include "common/types.h"

namespace fa {

// tanh x for |x| <= kTanhLimit, to 1.6e-7 of itself: x + x y P(y), with y = x^2 and the P whose largest relative error is least, 8.3e-8.
// Its rounding matters little, because y is small. NaN stays NaN.
constexpr float kTanhLimit = 0.6f;
constexpr float kTanh3 = -0.33332598f, kTanh5 = 0.13313116f, kTanh7 = -0.052211806f, kTanh9 = 0.015612633f;  // of x^3 to x^9
FA_HOST_DEVICE float tanh_polynomial(float x) {
    const float y = x * x;
    return fmaf(x * y, fmaf(fmaf(fmaf(kTanh9, y, kTanh7), y, kTanh5), y, kTanh3), x);
}

// The same polynomial of a product s = q . k that is neither scaled nor capped yet: softcap log2(e) tanh(s scale / softcap) = s of(s^2), to
// 2e-7 of itself.
struct CappedExponent {
    float factor[5];

    FA_HOST_DEVICE float of(float y) const {
        return fmaf(fmaf(fmaf(fmaf(factor[4], y, factor[3]), y, factor[2]), y, factor[1]), y, factor[0]);
    }
    FA_HOST_DEVICE bool is_exact() const { return factor[4] != 0; }
};
inline CappedExponent capped_exponent(float scale, float softcap) {
    const double inverse = double(scale) / softcap;
    CappedExponent exponent{{1.0f, kTanh3, kTanh5, kTanh7, kTanh9}};
    double power = double(scale) * kLog2e;
    bool exact = true;  // with a small or a large scale / softcap the last factors would lose bits or be infinite
    for (float& factor : exponent.factor) {
        const double exactly = factor * power;
        exact = exact && std::fabs(exactly) >= FLT_MIN && std::fabs(exactly) <= FLT_MAX;
        factor = float(exactly), power *= inverse * inverse;
    }
    if (!exact) exponent.factor[4] = 0;
    return exponent;
}

// tanh x for every x: the polynomial, or 1 - 2 / (1 + e^2x) to 2.5e-7 if `exp2` is right to 2^-22 of itself and `reciprocal` to 2^-23. That
// formula takes |x|, because 2 / (1 + e^2x) and its error grow on the other side.
template <typename Exp2, typename Reciprocal>
FA_HOST_DEVICE float tanh_any(float x, const Exp2& exp2, const Reciprocal& reciprocal) {
    const float large = copysignf(fmaf(-2.0f, reciprocal(1.0f + exp2(fabsf(x) * (2 * kLog2e))), 1.0f), x);
    return fabsf(x) < kTanhLimit ? tanh_polynomial(x) : large;
}

}  // namespace fa
