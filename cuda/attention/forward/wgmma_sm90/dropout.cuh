// wgmma_sm90/dropout.cuh: dropout in plans with options. The bits are those of attention/common/dropout.h: one Philox call decides eight
// keys of a row, of which a lane has two. So the lane makes the call for one of four groups of keys, and the quad exchanges the decisions.
//
// The numbers of a tile are drawn while its products run: they depend on its place alone. Drawn after the exponentials, in the time of the
// warpgroup's own softmax, they took 1.5 times as long as the whole bare call.
#pragma once

#include "attention/common/dropout_pairs.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "device/prmt.cuh"

namespace fa {

// Which elements of a tile are kept, for the groups of eight keys that this lane draws: call c of the lane decides group 4 c + quad of its
// row g or, past the last group, of its row g + 8. Each call has eight bits of a word, four calls share one: bit 4 c + x for the even key
// of lane x of the quad, bit 4 c + x + 16 for the odd one.
template <WgmmaPlanId kId>
struct KeptPairs {
    static constexpr int kGroups = kWgmmaPlan<kId>.block_n / 8;  // in each of the thread's two rows
    static constexpr int kCalls = kGroups / 2, kWords = (kCalls + 3) / 4;
    static_assert(2 * kGroups % 4 == 0, "the lanes of a quad make equally many calls");
    static_assert(kWords <= 2, "draw() chooses between two words");
    uint32_t words[2];

    // Draws for tile n. Two calls at a time, where that is possible: more take registers that the products need. One beside a bias.
    __device__ __forceinline__ void draw(const AttentionParams& p, const ForwardWork& w, int n, const Consumer& me) {
        const Consumer at = me.rare();
        const int quad = at.quad();
        const DropoutOrigin origin = dropout_origin(p, *static_cast<const volatile int*>(&w.batch));
        const uint32_t column0 = origin.columns + uint32_t(n) * kGroups,
                       row0 = origin.row + uint32_t(*static_cast<const volatile int*>(&w.row0) + at.row());
        const uint32_t head = origin.head + uint32_t(*static_cast<const volatile int*>(&w.head)), threshold = dropout_threshold_pair(p);
        words[0] = words[1] = 0;
#pragma unroll(kCalls % 2 == 0 && !kWgmmaPlan<kId>.bias ? 2 : 1)
        for (int call = 0; call < kCalls; ++call) {
            const int own = 4 * call + quad;
            const bool second = own >= kGroups;
            const Philox4 block = philox<kDropoutRounds>(column0 + uint32_t(second ? own - kGroups : own), row0 + (second ? 8u : 0u), head,
                                                         origin.sequence, p.dropout_key[0], p.dropout_key[1]);
            uint32_t kept = 0;
#pragma unroll
            for (int x = 0; x < 4; ++x) kept |= kept_halves(block.word[x], threshold) & 0x10001u << x;
            kept <<= 4 * (call % 4);
            if (call < 4) words[0] |= kept;
            else words[1] |= kept;
        }
        // Here, before the wait for the products that follows.
        words[0] = opaque(words[0]), words[1] = opaque(words[1]);
    }

    // Zeroes the dropped elements of P, which is packed in pairs of keys: pair 2 i + r of group i is in row g + 8 r.
    template <int kPairs>
    __device__ __forceinline__ void apply(uint32_t (&P)[kPairs], const Consumer& me) const {
        static_assert(kPairs == 2 * kGroups, "a tile");
        const int quad = me.rare().quad();
#pragma unroll
        for (int word = 0; word < kWords; ++word)
#pragma unroll
            for (int lane = 0; lane < 4; ++lane) {
                const uint32_t kept = __shfl_sync(~0u, words[word], lane, 4) << (3 - quad);
#pragma unroll
                for (int call = 4 * word; call < 4 * word + 4 && call < kCalls; ++call) {
                    const int own = 4 * call + lane, row = own / kGroups, group = own % kGroups;
                    // The decisions are the signs of two bytes now.
                    const uint32_t signs = call % 2 ? kept : kept << 4;
                    P[2 * group + row] &= call % 4 < 2 ? prmt_signs<0xAA88>(signs) : prmt_signs<0xBB99>(signs);
                }
            }
    }
};

}  // namespace fa
