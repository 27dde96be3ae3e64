// empty_rows.cuh: dq of rows that see no key is 0. A sum of dS K may be NaN there: 0 times a NaN in K, which other rows see.
#pragma once

#include "attention/common/mask.h"
#include "device/mma.cuh"

namespace fa {

// Whether row i, with this lse, sees no key. A sink hides that from lse: then the window and the lengths decide.
__device__ __forceinline__ bool is_empty_row(const AttentionParams& p, const Sequence& s, int i, float lse) {
    if (!p.sinks) return lse == -INFINITY;
    const KeyRange range = key_range(p, s, i);
    return range.begin >= range.end || lse == -INFINITY;
}

// Clears the sums of such rows. The thread's first row is row0 + lane / 4.
template <int kMmas, int kTiles>
__device__ __forceinline__ void clear_empty_rows(float (&C)[kMmas][kTiles][4], const AttentionParams& p, const Sequence& s, int head,
                                                 int row0, int lane) {
#pragma unroll
    for (int r = 0; r < 2 * kMmas; ++r) {
        const int row = row0 + r / 2 * 16 + mma_row(lane, r % 2 * 2);
        if (row >= s.seqlen_q || !is_empty_row(p, s, row, p.lse[lse_offset(p, s, head) + row])) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) C[r / 2][n][r % 2 * 2] = C[r / 2][n][r % 2 * 2 + 1] = 0.0f;
    }
}

}  // namespace fa
