// sampling.h: defines a draw from logits, in arithmetic that gives the same token on every device: CPU and GPU, one block per row or a
// cluster per row.
//
//     order    Tokens by decreasing logit; of equal logits the lower index first. Each token has its own 64-bit rank.
//     weight   About floor(2^43 exp((logit - largest) / temperature)): an integer, so that a sum does not depend on its order. The
//              exponential is a polynomial of separately rounded multiplications and additions, which no compiler may fuse.
//     top_k    keeps the first k tokens in that order.
//     top_p    keeps the fewest of these, from the first on, whose weights reach top_p of their sum.
//     draw     With `mass` the sum of the kept weights and u 64 random bits: the first token at which the running sum of weights
//              exceeds floor(u mass / 2^64).
//
// Each of the last three steps looks for the first token, in order, at which a running sum of counts or weights reaches a target.
// A histogram over bins of (largest - logit) / temperature finds the bin of that token, and a search over the ranks in the bin
// finds the token.
#pragma once

#include "common/philox.h"
#include "transformer/common/rounded.h"
#include "transformer/ops/ops.h"

namespace fa {

struct SampleParams {
    MatrixView logits;  // (batch, vocab)
    int32_t* out;       // (batch)
    const int64_t* seeds;
    const int32_t* step;
    int64_t step_stride;
    uint64_t seed, offset;
    DType dtype;
    int32_t batch, vocab, top_k;  // top_k 0 keeps all
    bool greedy;
    float scale;     // log2(e) / temperature
    uint64_t top_p;  // top_p times 2^32; 2^32 keeps all tokens
    bool programmatic;
    int32_t num_threads;
};

constexpr int32_t kMaxVocab = 1 << 20;  // so that a sum of weights stays below 2^64
constexpr int kWeightBits = 43;
constexpr int kBinsPerOctave = 22, kBins = 1024;  // 44 octaves have weights above 0; the last bin takes everything below

// The upper half of a 128-bit product.
FA_HOST_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    return uint64_t(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// Larger for a larger logit and, among equal logits, for the lower index. NaN ranks above all other values; no token has rank 0.
FA_HOST_DEVICE uint64_t rank_of(float logit, uint32_t index) {
    const uint32_t bits = bits_of(add(logit, 0.0f));  // -0 becomes 0
    const uint32_t key = logit != logit ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(key) << 32 | (0xFFFFFFFFu - index);
}
FA_HOST_DEVICE uint32_t index_of(uint64_t rank) { return 0xFFFFFFFFu - uint32_t(rank); }
FA_HOST_DEVICE float logit_of(uint64_t rank) {
    const uint32_t key = uint32_t(rank >> 32);
    return key == ~0u ? float_of(0x7FC00000u) : float_of(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// log2 of the token's likelihood relative to the likeliest token: 0 down to -infinity.
FA_HOST_DEVICE float exponent_of(float logit, float largest, float scale) {
    return logit == largest ? 0.0f : multiply(add(logit, -largest), scale);  // infinity - infinity would be NaN
}

FA_HOST_DEVICE int bin_of(float exponent) {
    const float bin = multiply(exponent, -float(kBinsPerOctave));
    return bin < float(kBins - 1) ? int(bin) : kBins - 1;
}

// floor(2^(43 + exponent)), up to the relative error of the polynomial, 2^-22.
FA_HOST_DEVICE uint64_t weight_of(float exponent) {
    if (!(exponent > -float(kWeightBits) - 1)) return 0;
    const float nearest = add(exponent, 0.5f);
    const int whole = int(nearest) - (nearest < float(int(nearest)));  // floor
    const float f = add(exponent, -float(whole));                      // -1/2 .. 1/2
    float y = 1.5403530e-4f;                                           // 2^f, Taylor coefficients ln(2)^n / n!
    y = add(multiply(y, f), 1.3333558e-3f);
    y = add(multiply(y, f), 9.6181291e-3f);
    y = add(multiply(y, f), 5.5504109e-2f);
    y = add(multiply(y, f), 2.4022651e-1f);
    y = add(multiply(y, f), 6.9314718e-1f);
    y = add(multiply(y, f), 1.0f);
    const uint64_t mantissa = uint64_t(multiply(y, 8388608.0f));  // 2^22.5 .. 2^23.5
    const int shift = kWeightBits - 23 + whole;
    return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

// 64 random bits for row b of the batch: from its own seed, or from the call's seed and the row's place in the batch.
FA_HOST_DEVICE uint64_t sample_bits(const SampleParams& p, int32_t b) {
    const uint64_t seed = p.seeds ? uint64_t(load_fresh(p.seeds + b)) : p.seed;
    const uint32_t step = p.step ? uint32_t(load_fresh(p.step + b * p.step_stride)) : 0, place = p.seeds ? 0 : uint32_t(b);
    const Philox4 r = philox(step, place, uint32_t(p.offset), uint32_t(p.offset >> 32), uint32_t(seed), uint32_t(seed >> 32));
    return uint64_t(r.word[1]) << 32 | r.word[0];
}

// ceil(mass * top_p / 2^32), at least 1.
FA_HOST_DEVICE uint64_t nucleus_target(uint64_t mass, uint64_t top_p) {
    if (top_p >> 32) return mass;
    const uint64_t target = multiply_high(mass, top_p << 32) + (mass * (top_p << 32) != 0);
    return target ? target : 1;
}

}  // namespace fa
