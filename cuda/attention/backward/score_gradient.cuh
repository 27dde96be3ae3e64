// score_gradient.cuh: one pair (i, j) of a query and a key: its weight in the output, and the gradient of its score. The arithmetic of
// simple.cu and scores.cu; cpu/attention/backward_naive.cpp is its twin on the host.
#pragma once

#include "attention/common/dropout.h"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"

namespace fa {

// The weight of a pair that is hidden. It is zero in a product, and its sign tells it from a probability that underflowed.
constexpr float kHidden = -0.0f;
__device__ __forceinline__ bool hidden(float weight) { return __float_as_uint(weight) == 0x80000000u; }

struct PairWeight {
    float weight;  // the factor of V: P, with dropout 0 or P / (1 - p)
    float P;
    float slope;  // d S / d (scale q . k): 1, less with softcap
};

// The weight of a pair that causal and window leave visible, with every option of a score. Out of line: as a call, the rare path takes no
// registers from the common one. Of the Sequence only `shift` is read.
inline __device__ __noinline__ PairWeight general_weight(const AttentionParams& p, int shift, int b, int head, int i, int j, float dot,
                                                         float max, float rest) {
    Sequence s{};
    s.shift = shift;
    const float score = transform_score(p, s, b, head, i, j, dot);
    if (score == -INFINITY) return {kHidden, 0, 0};
    const float P = exp_nonpositive((score - max) - rest);
    PairWeight pair = {P, P, 1};
    if (p.softcap != 0) {
        const float t = tanhf(dot * p.scale / p.softcap);
        pair.slope = 1 - t * t;
    }
    if (p.dropout_threshold) pair.weight = dropped(p, dropout_block(p, b, head, i, j), j) ? 0.0f : P * p.dropout_scale;
    return pair;
}

// factor (dP - delta), or 0 for a hidden pair, whatever dP is. dP = dout . v before dropout. With P as the factor this is dS, the gradient
// of the score; with P slope it is the gradient of scale q . k.
__device__ __forceinline__ float score_gradient(const AttentionParams& p, float weight, float factor, float dP, float delta) {
    if (hidden(weight)) return 0;
    if (p.dropout_threshold) dP = weight == 0 ? 0.0f : dP * p.dropout_scale;
    return factor * (dP - delta);
}

}  // namespace fa
