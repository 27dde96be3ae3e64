// dropout_pairs.cuh: compares two random numbers of dropout.h in one instruction, for thresholds up to kDropoutPairsThreshold.
#pragma once

#include "attention/common/dropout.h"
#include "device/halves.cuh"

namespace fa {

__device__ __forceinline__ uint32_t dropout_threshold_pair(const AttentionParams& p) {
    return (p.dropout_threshold << kDropoutShift) * 0x10001u;
}

// The two elements of a word of random bits, or of swapped_halves of it: 0xFFFF in the half of each that is kept, 0 in that of a dropped
// one. The seven bits after the number change nothing, because those of the threshold are 0. Halves above that of infinity are NaN, for
// which the unordered comparison is true, too.
__device__ __forceinline__ uint32_t kept_halves(uint32_t word, uint32_t threshold_pair) { return magnitudes_reach(word, threshold_pair); }

}  // namespace fa
