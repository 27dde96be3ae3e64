// dropout.h: decides which elements of P are dropped; the same ones on every backend.
//
// One call of Philox4x32-7 (common/philox.h) yields 128 bits for 16 elements of one row, of which each takes 8. These are the elements of
// 64 columns that one lane of a quad holds in the accumulator of a tensor core: two neighbouring columns out of every eight.
//     key     = dropout_key(seed, offset)                              once per call, on the host
//     block   = philox<7>({column / 64 * 4 + column % 8 / 2, row, head, sequence}, key)
//     half    = 16 bits of block[column % 64 / 16], the low half for even columns; its two bytes swapped where column / 8 is odd
//     number  = half / 128 % 256
//     dropped = number < threshold,   threshold = round(256 * p)
// The number of a half and that of the swapped half have no bit in common: bits 7 .. 14, and bits 0 .. 6 and 15. Seven rounds and 8 bits,
// because random numbers are what dropout costs. They follow the first bit of a half, because a half without its first bit is a positive
// fp16 number, or a NaN above all numbers, and these have the order of their bits: one instruction compares two (dropout_pairs.cuh). Rows
// and columns count from the start of their whole sequence, heads and sequences from the first of the whole batch. A call on parts of
// sequences says where each part starts; the first column of a part is a multiple of 64.
#pragma once

#include "attention/common/params.h"
#include "common/philox.h"

namespace fa {

constexpr int kDropoutRounds = 7;
constexpr int kDropoutChances = 1 << 8;  // p is a number of these
constexpr int kDropoutShift = 7;         // from the number to its place in a half
// Up to this threshold (p = 0.96875), which is the infinity of fp16, the order of fp16 numbers is that of their bits.
constexpr uint32_t kDropoutPairsThreshold = 0x7C00 >> kDropoutShift;
inline bool drops_in_pairs(const AttentionParams& p) { return p.dropout_threshold && p.dropout_threshold <= kDropoutPairsThreshold; }

FA_HOST_DEVICE void dropout_key(uint64_t seed, uint64_t offset, uint32_t key[2]) {
    const Philox4 r = philox(uint32_t(offset), uint32_t(offset >> 32), 0, 0, uint32_t(seed), uint32_t(seed >> 32));
    key[0] = r.word[0], key[1] = r.word[1];
}

// The number of the call that decides `column`, among those of a row.
FA_HOST_DEVICE constexpr uint32_t dropout_call(uint32_t column) { return column / kDropoutColumns * 4 + column % 8 / 2; }
// The column's word in the block of that call, without an index that would move the block to memory.
FA_HOST_DEVICE uint32_t word_of(const Philox4& block, uint32_t column) {
    const uint32_t low = column & 16 ? block.word[1] : block.word[0], high = column & 16 ? block.word[3] : block.word[2];
    return column & 32 ? high : low;
}

// The position, in the whole batch, of row 0 and column 0 of sequence b and of head 0 of the call.
struct DropoutOrigin {
    uint32_t calls;  // the number of the first column's call
    uint32_t row, head, sequence;
};
FA_HOST_DEVICE DropoutOrigin dropout_origin(const AttentionParams& p, int32_t b) {
    if (!p.parts) return {0, 0, uint32_t(p.first_head), uint32_t(b)};
    const Part& part = p.parts[b];
    return {dropout_call(uint32_t(part.first_key)), uint32_t(part.first_row), uint32_t(p.first_head), uint32_t(part.sequence)};
}

// The random block that decides `column`, and 15 other columns of the same 64.
FA_HOST_DEVICE Philox4 dropout_block(const AttentionParams& p, int32_t b, int32_t head, int32_t row, int32_t column) {
    const DropoutOrigin o = dropout_origin(p, b);
    return philox<kDropoutRounds>(o.calls + dropout_call(uint32_t(column)), o.row + uint32_t(row), o.head + uint32_t(head), o.sequence,
                                  p.dropout_key[0], p.dropout_key[1]);
}

// A word as the columns of an odd eight read it: the two bytes of each half swapped.
FA_HOST_DEVICE uint32_t swapped_halves(uint32_t word) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(word, 0, 0x2301);
#else
    return (word & 0xFF00FFu) << 8 | (word >> 8 & 0xFF00FFu);
#endif
}
// Whether the element of the odd column, or of the even one, of a word is dropped. The shifts put the number above all other bits.
FA_HOST_DEVICE bool drops(const AttentionParams& p, uint32_t word, bool odd) {
    return (odd ? word << 1 : word << 17) < p.dropout_threshold << 24;
}
FA_HOST_DEVICE bool dropped(const AttentionParams& p, const Philox4& block, int32_t column) {
    const uint32_t word = word_of(block, uint32_t(column));
    return drops(p, column & 8 ? swapped_halves(word) : word, column & 1);
}

}  // namespace fa
