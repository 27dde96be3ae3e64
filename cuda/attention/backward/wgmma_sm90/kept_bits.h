// wgmma_sm90/kept_bits.h: where the Hopper backward keeps the dropout bits of a warpgroup's 64 keys and a tile of queries. Each call of
// Philox (attention/common/dropout.h) has one number of 16 bits, which its thread writes and lanes of all four warps read.
#pragma once

#include "attention/common/dropout.h"

namespace fa {

constexpr int kKeptCalls = 4;  // for a query
// The index of a call's number. The calls of four queries that one lane of a fragment has, 16 i + 2 quad + {0, 1, 8, 9}, are neighbours.
FA_HOST_DEVICE constexpr int kept_place(int query, int call) {
    return query / 16 * 64 + call * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
}
// The bit of a key, one of 64, in the number of its call: keys of the first eight of a warp's 16 keys in the low byte.
FA_HOST_DEVICE constexpr int kept_bit(int key) { return key % 16 / 8 * 8 + key / 16 * 2 + key % 2; }
// The bits of a pair of keys before the halves are joined: that of the even key in the low half, that of the odd key in the high half.
// `word`, `odd`: the pair's word in the block of random numbers, and whether it belongs to an odd eight of keys.
FA_HOST_DEVICE constexpr uint32_t kept_mask(int word, bool odd) { return 0x20001u << (2 * word + (odd ? 8 : 0)); }

}  // namespace fa
