// interval_bounds.h: where the bounds of masks by intervals lie in a workspace, for the host and interval_bounds.cuh.
#pragma once

#include "attention/common/mask.h"

namespace fa {

constexpr int kBoundsKeys = 32;

// The number of bounds of one head. In a varlen call each sequence begins with new ones.
FA_HOST_DEVICE int64_t interval_bounds_of_head(const AttentionParams& p) {
    return p.cu_seqlens_k ? p.total_k / kBoundsKeys + p.batch : (int64_t(p.seqlen_k) + kBoundsKeys - 1) / kBoundsKeys * p.batch;
}
FA_HOST_DEVICE int64_t first_bounds_of(const AttentionParams& p, int32_t b) {
    return p.cu_seqlens_k ? first_key_row(p, b) / kBoundsKeys + b : (int64_t(p.seqlen_k) + kBoundsKeys - 1) / kBoundsKeys * b;
}
inline size_t interval_bounds_bytes(const AttentionParams& p) {
    if (!p.intervals.data) return 0;
    return size_t(interval_bounds_of_head(p)) * (p.nheads / p.intervals.heads_of_entry) * sizeof(HiddenBounds) + alignof(HiddenBounds);
}

}  // namespace fa
