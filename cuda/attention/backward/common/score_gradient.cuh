// score_gradient.cuh: the weight in the output of a pair (i, j) of a query and a key, and the gradient of its score. Used by simple.cu and
// scores.cu; cpu/attention/backward_naive.cpp does the same on the host.
#pragma once

#include "attention/common/dropout.h"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"

namespace fa {

// The weight of a hidden pair. It acts as zero in a product; its sign distinguishes it from a probability that underflowed to +0.
constexpr float kHidden = -0.0f;
__device__ __forceinline__ bool hidden(float weight) { return __float_as_uint(weight) == 0x80000000u; }

struct PairWeight {
    float weight;  // the factor of V: P, with dropout 0 or P / (1 - p)
    float P;
    float slope;  // d S / d (scale q . k): 1; with softcap 1 - tanh^2
};

// The weight, with every option of a score, of a pair that causal and window leave visible. Not inlined: the call on the rare path leaves
// the registers to the common path. Of the Sequence only `shift` is read.
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

// factor (dP - delta), or 0 for a hidden pair, whatever dP is. dP = dout . v before dropout. With factor = P this is dS, the gradient of
// the score; with factor = P slope it is the gradient of scale q . k.
__device__ __forceinline__ float score_gradient(const AttentionParams& p, float weight, float factor, float dP, float delta) {
    if (hidden(weight)) return 0;
    if (p.dropout_threshold) dP = weight == 0 ? 0.0f : dP * p.dropout_scale;
    return factor * (dP - delta);
}

}  // namespace fa
