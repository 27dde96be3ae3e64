// epilogue.cuh: finishes the softmax of a row after its last key: the factor for its sum of P V, and its lse.
#pragma once

#include <cmath>

#include "attention/common/params.h"
#include "common/constants.h"
#include "device/mma.cuh"

namespace fa {

// The unit of a row's maximum. The exponentials of a row are 2^(score - maximum) or e^(score - maximum).
enum class ScoreUnit { kLog2, kNatural };
template <ScoreUnit kUnit>
__device__ __forceinline__ float exponential_of(float x) {
    return exp2_approx(kUnit == ScoreUnit::kNatural ? x * kLog2e : x);
}

struct RowEnd {
    float inverse;  // out = inverse * sum of P V; 0 for a row without keys and sink
    float lse;      // log of the sum of exponentials, in the unit of the maximum; -inf for a row without keys and sink
    bool empty;     // the row has seen no key: out = 0, although the sum of P V may be NaN, from 0 times a NaN that other rows see

    __device__ __forceinline__ float output(float sum) const { return empty ? 0.0f : sum * inverse; }
    __device__ __forceinline__ float4 output(float4 sum) const {
        return make_float4(output(sum.x), output(sum.y), output(sum.z), output(sum.w));
    }
};

// The sink of a head: a logit in natural units that is added to the denominator only; -inf = no sink.
__device__ __forceinline__ float sink_of(const float* sinks, int head) { return sinks ? sinks[head] : -INFINITY; }

// `row_sum` is the sum over the whole row. The division rounds correctly; the logarithm is off by at most 2e-7. A row without keys has the
// sum 0; its maximum may be -inf or the lowest finite number.
template <ScoreUnit kUnit>
__device__ __forceinline__ RowEnd finish_row(float row_max, float row_sum, float sink = -INFINITY) {
    constexpr bool kNatural = kUnit == ScoreUnit::kNatural;
    const auto exponential = [](float x) { return exp2_approx(kNatural ? x * kLog2e : x); };
    const bool empty = row_sum == 0.0f;
    float factor = 1.0f;
    if (sink != -INFINITY) {
        const float logit = kNatural ? sink : sink * kLog2e, raised = fmaxf(row_max, logit);
        factor = exponential(row_max - raised);
        row_sum = row_sum * factor + exponential(logit - raised);
        row_max = raised;
    }
    if (row_sum == 0.0f) return {0.0f, -INFINITY, empty};
    return {factor / row_sum, row_max + (kNatural ? __logf(row_sum) : __log2f(row_sum)), empty};
}

}  // namespace fa
