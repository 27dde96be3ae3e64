// interval_bounds.h: where the bounds of masks by intervals lie in a workspace, for the host and interval_bounds.cuh.
#pragma once

#include "attention/common/mask.h"

namespace fa {

// Bounds are those of `keys` neighbouring keys. Kernels of one tile have bounds of that tile; mma_sm80, which has many, those of
// kBoundsKeys keys, of which each tile has several.
constexpr int kBoundsKeys = 32;

// The number of bounds of one head. In a varlen call each sequence begins with new ones.
FA_HOST_DEVICE int64_t interval_bounds_of_head(const AttentionParams& p, int keys) {
    return p.cu_seqlens_k ? p.total_k / keys + p.batch : (int64_t(p.seqlen_k) + keys - 1) / keys * p.batch;
}
constexpr size_t kBoundsAlignment = 16;
inline size_t interval_bounds_bytes(const AttentionParams& p, int keys) {
    if (!p.intervals.data) return 0;
    return size_t(interval_bounds_of_head(p, keys)) * (p.nheads / p.intervals.heads_of_entry) * sizeof(HiddenBounds) + kBoundsAlignment;
}

// Long sequences also have bounds of each kBoundsOfGroup bounds, by which a warp passes over as many groups at once.
constexpr int kBoundsOfGroup = 32;
inline bool has_bounds_of_groups(const AttentionParams& p, int keys) { return p.seqlen_k > 2 * kBoundsOfGroup * keys; }
// The bytes of both.
inline size_t grouped_interval_bounds_bytes(const AttentionParams& p, int keys) {
    return interval_bounds_bytes(p, keys) + (has_bounds_of_groups(p, keys) ? interval_bounds_bytes(p, keys * kBoundsOfGroup) : 0);
}

}  // namespace fa
