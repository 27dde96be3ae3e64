// wgmma_sm90/dropout.cuh: the random numbers of the Hopper backward. One Philox call decides 16 of 64 keys for a query
// (attention/common/dropout.h), and 64 keys are a warpgroup's. In the transposed S these 16 lie in all warps, four in each. So the
// warpgroup draws for all its keys together, and its warps exchange the bits through shared memory.
#pragma once

#include "attention/backward/wgmma_sm90/kept_bits.h"
#include "attention/common/dropout_pairs.cuh"
#include "device/prmt.cuh"
#include "device/ptx.cuh"

namespace fa {

// A tile's first query, head and sequence, and the number of the call for its first key, as Philox counts them.
struct alignas(16) DropoutTile {
    uint32_t row, head, sequence, call;
};

// Draws for 64 keys and the queries of a tile, as threads of one warpgroup. `first`: added to tile.call.
template <int kBlockM, bool kPairs>
__device__ __forceinline__ void draw_kept(const AttentionParams& p, const DropoutTile& tile, uint32_t first, uint16_t* kept) {
    const auto kept_of = [&](uint32_t word) {
        if constexpr (kPairs) return kept_halves(word, dropout_threshold_pair(p));
        else return (drops(p, word, false) ? 0u : 0xFFFFu) | (drops(p, word, true) ? 0u : 0xFFFF0000u);
    };
    const int thread = opaque(int(threadIdx.x)) % 128, query = thread % kBlockM;
    const auto draw = [&](uint32_t call, uint32_t row, uint16_t* to) {
        const Philox4 block = philox<kDropoutRounds>(call, row, tile.head, tile.sequence, p.dropout_key[0], p.dropout_key[1]);
        uint32_t bits = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w)
            bits |= kept_of(block.word[w]) & kept_mask(w, false), bits |= kept_of(swapped_halves(block.word[w])) & kept_mask(w, true);
        *to = uint16_t(bits | bits >> 16);
    };
    // One at a time: more take registers that the products need. The two forms are those that spill none.
    if constexpr (kBlockM == 64) {
        const uint32_t row = tile.row + query;
        uint32_t call = tile.call + first + thread / 64;
        uint16_t* to = kept + kept_place(query, thread / 64);
#pragma unroll 1
        for (int i = 0; i < kKeptCalls / 2; ++i, call += 2, to += kept_place(0, 2)) draw(call, row, to);
    } else {
        kept += kept_place(query, 0);
#pragma unroll 1
        for (int call = 0; call < kKeptCalls; ++call, kept += kept_place(0, 1)) draw(tile.call + first + call, tile.row + query, kept);
    }
}
// The bits of queries 16 i + 2 quad + {0, 1 | 8, 9}, shifted so that the signs of two bytes each are the bits of the lane's two keys.
__device__ __forceinline__ uint2 kept_signs(const uint16_t* kept, int i, int warp, int ln) {
    const uint2 bits = *reinterpret_cast<const uint2*>(kept + kept_place(16 * i + ln % 4 * 2, ln / 8));
    const int shift = 7 - kept_bit(16 * warp + ln / 4 % 2);
    return make_uint2(bits.x << shift, bits.y << shift);
}
// Zeroes a and b, queries `query` and query + 1 of key `key` of the 64, where they are dropped.
__device__ __forceinline__ void drop_pair(const uint16_t* kept, int query, int key, float& a, float& b) {
    const uint32_t both = *reinterpret_cast<const uint32_t*>(kept + kept_place(query, key % 8 / 2)) >> kept_bit(key);
    if (!(both & 1)) a = 0.0f;
    if (!(both >> 16 & 1)) b = 0.0f;
}

// The mask of the first (kQuery = 0) or second of two queries for the lane's key n, ones where it is kept; and of the packed pair.
template <int kQuery, int n>
__device__ __forceinline__ float keep_if(float x, uint32_t signs) {
    return __uint_as_float(__float_as_uint(x) & prmt_signs<0x8888u + (2 * kQuery + n) * 0x1111u>(signs));
}
template <int n>
__device__ __forceinline__ uint32_t keep_pair(uint32_t pair, uint32_t signs) {
    return pair & prmt_signs<0xAA88u + n * 0x1111u>(signs);
}

}  // namespace fa
