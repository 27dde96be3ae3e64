// float16_parts.h: the calls that wgmma_float32_sm90 and wgmma_float32_wide_sm90 serve faster than mma_float32_sm80.
#pragma once

#include "attention/common/params.h"

namespace fa {

// Writing the parts of q, k and v and starting the kernels takes about 10 us, in which mma_float32_sm80 makes 2^28 multiply-adds of the
// forward pass. Its backward pass is slower at everything, so there the parts pay earlier. With fewer keys than half a tile most of a
// tile's products are for nothing. Up to 64 queries, one tile of mma_float32_sm80, are multiplied before the parts of k and v are written.
// (H200, suite `dispatch`.)
inline bool float16_parts_are_faster(const AttentionParams& p, bool backward) {
    constexpr int kFewKeys = 64, kFewQueries = 64;
    const double worth = double(backward ? 1 << 24 : 1 << 27);  // multiply-adds of Q K^T
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (!backward && p.seqlen_q <= kFewQueries) return false;
    return p.deciding_keys() >= kFewKeys && double(p.deciding_batch()) * p.nheads * p.seqlen_q * p.deciding_keys() * d >= worth;
}

}  // namespace fa
