// dropout_pairs.cuh: compares two random numbers of dropout.h in one instruction, for thresholds up to kDropoutPairsThreshold.
#pragma once

#include "attention/common/dropout.h"

namespace fa {

__device__ __forceinline__ uint32_t dropout_threshold_pair(const AttentionParams& p) { return p.dropout_threshold * 0x10001u; }

// The two elements of a word of random bits: 0xFFFF in the half of each that is kept, 0 in that of a dropped one. 15 bits above those
// of infinity are a NaN, for which the unordered comparison is true, too.
__device__ __forceinline__ uint32_t kept_halves(uint32_t word, uint32_t threshold_pair) {
    uint32_t kept;
    asm("{\n"
        ".reg .b32 bits;\n"
        "abs.f16x2 bits, %1;\n"
        "set.geu.u32.f16x2 %0, bits, %2;\n"
        "}"
        : "=r"(kept)
        : "r"(word), "r"(threshold_pair));
    return kept;
}

}  // namespace fa
