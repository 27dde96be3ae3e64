// wgmma_sm90/dropout.cuh: dropout in plans with options. The bits are those of attention/common/dropout.h: one Philox call decides eight
// keys of a row. A lane has two of the eight. So it makes the call for one of four groups of keys, and the quad exchanges words.
//
// A score takes about five operations of Philox, half of them multiplications of 64 bits, which issue at half the rate, and four to
// exchange and compare. That is as much as the tensor cores' time at head dim 64, and half of it at 128. Both run at the same time: while
// one warpgroup draws, the products of the others go on. The three idle warps of the producer could not do it alone: 3072 calls for a tile
// of 192 x 128 would take them longer than its products.
#pragma once

#include "attention/common/dropout.h"
#include "attention/forward/wgmma_sm90/consume.cuh"

namespace fa {

// Zeroes the dropped probabilities of tile n.
template <WgmmaPlanId kId, int kCount>
__device__ __forceinline__ void drop_probabilities(float (&P)[kCount], const AttentionParams& p, const ForwardWork& w, int n,
                                                   const Consumer& me) {
    constexpr int kGroups = kCount / 4;  // groups of eight keys, in each of the thread's two rows
    static_assert(2 * kGroups % 4 == 0, "the lanes of a quad make equally many calls");
    const Consumer at = me.rare();
    const int quad = at.quad();
    const DropoutOrigin origin = dropout_origin(p, *static_cast<const volatile int*>(&w.batch));
    const uint32_t column0 = origin.columns + uint32_t(n) * (kWgmmaPlan<kId>.block_n / 8),
                   row0 = origin.row + uint32_t(*static_cast<const volatile int*>(&w.row0) + at.row());
    const uint32_t head = origin.head + uint32_t(*static_cast<const volatile int*>(&w.head)), threshold = p.dropout_threshold << 16;
#pragma unroll
    for (int call = 0; call < kGroups / 2; ++call) {
        const int own = 4 * call + quad;  // group `own` of row g, or group own - kGroups of row g + 8
        const bool second = own >= kGroups;
        Philox4 block = philox(column0 + uint32_t(second ? own - kGroups : own), row0 + (second ? 8u : 0u), head, origin.sequence,
                               p.dropout_key[0], p.dropout_key[1]);
        transpose_quad(block.word, quad);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int group = 4 * call + x, r = group / kGroups, i = group % kGroups * 4 + 2 * r;
            if (block.word[x] << 16 < threshold) P[i] = 0.0f;
            if (block.word[x] < threshold) P[i + 1] = 0.0f;
        }
    }
}

}  // namespace fa
