// wgmma_sm90/dropout.cuh: dropout in plans with options. The bits are those of attention/common/dropout.h: one Philox call decides 16
// elements of a row in 64 keys, and these are the elements that one lane holds. So nothing is exchanged between lanes.
//
// The numbers of a tile are drawn while its products run: they depend on its place alone. Drawn after the exponentials, in the time of the
// warpgroup's own softmax, they took 1.5 times as long as the whole bare call.
#pragma once

#include "attention/common/dropout_pairs.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "device/prmt.cuh"

namespace fa {

// The numbers of a lane's elements of a tile. Call 2 s + r decides row g + 8 r of keys 64 s .. 64 s + 63; pair x of the call is the lane's
// pair of keys in group 8 s + x of eight keys. Plans with registers left keep the random words, others a bit for each element: bit x of a
// half for pair x of an even call, bit 8 + x for an odd one, even keys in the low half.
template <WgmmaPlanId kId>
struct KeptPairs {
    static constexpr int kCalls = kWgmmaPlan<kId>.block_n / kDropoutColumns * 2;
    static constexpr bool kBits = kWgmmaPlan<kId>.dropout_bits();
    static constexpr int kWords = kBits ? kCalls / 2 : 4 * kCalls;
    static_assert(!kWgmmaPlan<kId>.dropout || kWgmmaPlan<kId>.block_n % kDropoutColumns == 0, "whole calls");
    uint32_t words[kWords > 0 ? kWords : 1];

    // Draws for tile n. For two rows of the same keys at a time: they share the first products.
    __device__ __forceinline__ void draw(const AttentionParams& p, const ForwardWork& w, int n, const Consumer& me) {
        const Consumer at = me.rare();
        const DropoutOrigin origin = dropout_origin(p, *static_cast<const volatile int*>(&w.batch));
        const uint32_t call0 = origin.calls + uint32_t(n) * (2 * kCalls) + at.quad(),
                       row0 = origin.row + uint32_t(*static_cast<const volatile int*>(&w.row0) + at.row());
        const uint32_t head = origin.head + uint32_t(*static_cast<const volatile int*>(&w.head)), threshold = dropout_threshold_pair(p);
        if constexpr (kBits) {
            static_assert(kWords <= 2, "a choice between two words");
            // A loop, because ptxas would move the wait before straight code.
#pragma unroll 1
            for (int s = 0; s < kCalls / 2; ++s) {
                uint32_t kept = 0;
                // Beside a bias one call at a time, for its registers; of two calls, too, for the loop.
#pragma unroll(kWgmmaPlan<kId>.bias || kCalls == 2 ? 1 : 2)
                for (int r = 1; r >= 0; --r) {
                    const Philox4 block = of_call(p, call0 + 4 * s, row0 + 8 * r, head, origin.sequence);
                    kept <<= 8;
#pragma unroll
                    for (int x = 0; x < 8; ++x) kept |= kept_pair(block.word[x / 2], x, threshold) & 0x10001u << x;
                }
                if (s == 0) words[0] = kept;
                else words[kWords - 1] = kept;
            }
        } else {
#pragma unroll
            for (int call = 0; call < kCalls; ++call) {
                const Philox4 block = of_call(p, call0 + call / 2 * 4, row0 + call % 2 * 8, head, origin.sequence);
#pragma unroll
                for (int x = 0; x < 4; ++x) words[4 * call + x] = block.word[x];
            }
        }
        // Here, before the wait for the products that follows.
#pragma unroll
        for (uint32_t& word : words) word = opaque(word);
    }

    // Zeroes the dropped elements of P, which is packed in pairs of keys: pair 2 i + r of group i is in row g + 8 r.
    template <int kPairs>
    __device__ __forceinline__ void apply(const AttentionParams& p, uint32_t (&P)[kPairs]) const {
        static_assert(kPairs == 8 * kCalls, "a tile");
#pragma unroll
        for (int x = 0; x < 4 * kCalls; ++x) {
            const int call = x / 8 * 2, pair = x % 8;
            uint32_t* both = P + 2 * (8 * (call / 2) + pair);  // of rows g and g + 8
            if constexpr (kBits) {
                const uint32_t signs = words[call / 2] << (7 - pair);  // the decisions are the signs of four bytes now
                both[0] &= prmt_signs<0xAA88>(signs), both[1] &= prmt_signs<0xBB99>(signs);
            } else {
                const uint32_t threshold = dropout_threshold_pair(p);
#pragma unroll
                for (int r = 0; r < 2; ++r) both[r] &= kept_pair(words[4 * (call + r) + pair / 2], pair, threshold);
            }
        }
    }

private:
    static __device__ __forceinline__ Philox4 of_call(const AttentionParams& p, uint32_t call, uint32_t row, uint32_t head,
                                                      uint32_t sequence) {
        return philox<kDropoutRounds>(call, row, head, sequence, p.dropout_key[0], p.dropout_key[1]);
    }
    static __device__ __forceinline__ uint32_t kept_pair(uint32_t word, int pair, uint32_t threshold) {
        return kept_halves(pair % 2 ? swapped_halves(word) : word, threshold);
    }
};

}  // namespace fa
