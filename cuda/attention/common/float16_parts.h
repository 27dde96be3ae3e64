// float16_parts.h: the calls that wgmma_float32_sm90 serves faster than mma_float32_sm80, in both passes.
#pragma once

#include "attention/common/params.h"

namespace fa {

// Writing the parts of q, k and v and starting three more kernels takes about 10 us, in which mma_float32_sm80 makes 2^28 multiply-adds.
inline bool float16_parts_are_faster(const AttentionParams& p) {
    constexpr double kWorthParts = double(1 << 27);  // multiply-adds of Q K^T
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    return double(p.deciding_batch()) * p.nheads * p.seqlen_q * p.deciding_keys() * d >= kWorthParts;
}

}  // namespace fa
