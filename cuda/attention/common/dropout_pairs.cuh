// dropout_pairs.cuh: compares two random numbers of dropout.h in one instruction, for thresholds up to kDropoutPairsThreshold.
#pragma once

#include "attention/common/dropout.h"
#include "device/halves.cuh"

namespace fa {

__device__ __forceinline__ uint32_t dropout_threshold_pair(const AttentionParams& p) { return p.dropout_threshold * 0x10001u; }

// The two elements of a word of random bits: 0xFFFF in the half of each that is kept, 0 in that of a dropped one. 15 bits above those
// of infinity are a NaN, for which the unordered comparison is true, too.
__device__ __forceinline__ uint32_t kept_halves(uint32_t word, uint32_t threshold_pair) { return magnitudes_reach(word, threshold_pair); }

}  // namespace fa
