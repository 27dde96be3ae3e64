// quantize_fp8.h: quantization of a tensor to e4m3 with one factor per head; shared by the GPU and the CPU kernel.
//
// Scaling      out = round(448 x / max |x|), descale = max |x| / 448 over the rows of one head of one batch entry.
// Rotation     every row is first multiplied by random signs and a Hadamard matrix over its head dims, which spreads an outlier over
//              the row. The matrix is orthonormal, so rotating both q and k, with the same seed, leaves q k^T as it is.
#pragma once

#include "attention/common/params.h"
#include "common/philox.h"

namespace fa {

constexpr int kMaxQuantizedHeadDim = 512;
constexpr float kE4M3Max = 448.0f;

struct QuantizeParams {
    TensorView x, out;  // (batch, seqlen, nheads, headdim)
    float* descale;     // (batch, nheads)
    DType dtype;
    int32_t batch, nheads, headdim, seqlen;
    bool hadamard;
    float norm;       // headdim ** -0.5
    uint32_t key[2];  // seed of the random signs
    int32_t num_threads;
};

// Bit i % 32 of word i / 32 says whether head dim i changes its sign. Returns four words at a time.
FA_HOST_DEVICE Philox4 sign_words(const QuantizeParams& p, int block) { return philox(uint32_t(block), 0, 0, 0, p.key[0], p.key[1]); }

// The factor for x, and the one that undoes it, in a head whose largest magnitude is amax. The floor on amax keeps the factor finite.
FA_HOST_DEVICE float quantize_scale(float amax) { return amax > 0 ? kE4M3Max / (amax > 0x1p-100f ? amax : 0x1p-100f) : 1.0f; }
FA_HOST_DEVICE float quantize_descale(float amax) { return amax > 0 ? (amax > 0x1p-100f ? amax : 0x1p-100f) / kE4M3Max : 1.0f; }

}  // namespace fa
