// score_gradient.cuh: of one pair (i, j), what its score does to the output and what comes back. The arithmetic of backward_simple.cu
// and backward_scores.cu; cpu/backward_naive.cpp says the same on the host.
#pragma once

#include "attention/mask.h"
#include "attention/online_softmax.cuh"
#include "attention/philox.h"

namespace fa {

// The weight of a pair that no score is computed for: zero in a product, told by its sign from a probability that underflowed.
constexpr float kHidden = -0.0f;
__device__ __forceinline__ bool hidden(float weight) { return __float_as_uint(weight) == 0x80000000u; }

struct PairWeight {
    float weight;  // what V is multiplied by: P, with dropout 0 or P / (1 - p)
    float P;
    float slope;  // d S / d (scale q . k): 1, less with softcap
};

// Of a pair that causal and window leave visible; every option of a score. Out of line: a call on the rare path leaves the common one its
// registers. A Sequence knows more than its shift, but no more is read.
inline __device__ __noinline__ PairWeight general_weight(const AttentionParams& p, int shift, int b, int head, int i, int j, float dot,
                                                         float lse) {
    Sequence s{};
    s.shift = shift;
    const float score = transform_score(p, s, b, head, i, j, dot);
    if (score == -INFINITY) return {kHidden, 0, 0};
    const float P = exp_nonpositive(score - lse);
    PairWeight pair = {P, P, 1};
    if (p.softcap != 0) {
        const float t = tanhf(dot * p.scale / p.softcap);
        pair.slope = 1 - t * t;
    }
    if (p.dropout_threshold) pair.weight = dropped(p, dropout_block(p, b, head, i, j), j) ? 0.0f : P * p.dropout_scale;
    return pair;
}

// factor (dP - delta), 0 for a hidden pair whatever dP is; dP = dout . v as if nothing had been dropped. With P as the factor this is
// dS, the gradient of the score; with P slope that of scale q . k.
__device__ __forceinline__ float score_gradient(const AttentionParams& p, float weight, float factor, float dP, float delta) {
    if (hidden(weight)) return 0;
    if (p.dropout_threshold) dP = weight == 0 ? 0.0f : dP * p.dropout_scale;
    return factor * (dP - delta);
}

}  // namespace fa
