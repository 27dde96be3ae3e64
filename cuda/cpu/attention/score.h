// score.h: the score of one (query, key) pair on the host, written to be read. The tile kernels do the same arithmetic on whole vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/common/mask.h"
#include "common/float8.h"

namespace fa::cpu {

template <typename Real>
struct Score {
    Real value;  // natural units; -inf = a mask or a bias of -inf hides the pair, whatever its product
    Real slope;  // d value / d (q . k)
};

// The score of a pair that causal and window leave visible, in the order of the contract: scale, softcap, ALiBi, bias, the
// masks.
template <typename Real>
Score<Real> transform(const AttentionParams& p, const Sequence& s, int32_t b, int32_t head, int32_t i, int32_t j, Real dot) {
    Score<Real> score{dot * p.scale, p.scale};
    if (p.softcap != 0) {
        const Real t = std::tanh(score.value / p.softcap);
        score = {p.softcap * t, p.scale * (1 - t * t)};
    }
    if (p.alibi_slopes) score.value -= p.alibi_slopes[b * p.alibi_batch + head] * std::fabs(float(int64_t(i) + s.shift - j));
    if (p.bias.data) {
        const float bias = load(p.bias.data, b * p.bias.batch + head * p.bias.head + i * p.bias.row + j, p.bias_dtype);
        score.value = bias == -INFINITY ? bias : score.value + bias;
    }
    if (p.mask.data && !static_cast<const uint8_t*>(p.mask.data)[b * p.mask.batch + head * p.mask.head + i * p.mask.row + j])
        score.value = -INFINITY;
    if (p.intervals.data && interval_hides(p, b, head, i, j)) score.value = -INFINITY;
    if (p.blocks.data && block_hides(p, b, head, i, j)) score.value = -INFINITY;
    if (p.tree.rows && !tree_shows(p, s, b, i, j)) score.value = -INFINITY;
    return score;
}

// An element of K or V.
template <DType dtype>
float element(const void* data, int64_t index) {
    if constexpr (dtype == DType::kFloat8E4M3) return e4m3_to_float(static_cast<const uint8_t*>(data)[index]);
    else if constexpr (dtype == DType::kInt8) return static_cast<const int8_t*>(data)[index];
    else return load(data, index, dtype);
}

// A dot product in eight partial sums, which the compiler may keep in one vector without changing the order of any addition.
template <DType dtype>
float dot_product(const float* q, const void* k, int64_t k0, int32_t headdim) {
    float part[8] = {}, sum = 0;
    int32_t d = 0;
    for (; d + 8 <= headdim; d += 8)
        for (int32_t l = 0; l < 8; ++l) part[l] += q[d + l] * element<dtype>(k, k0 + d + l);
    for (; d < headdim; ++d) sum += q[d] * element<dtype>(k, k0 + d);
    for (float x : part) sum += x;
    return sum;
}

}  // namespace fa::cpu
