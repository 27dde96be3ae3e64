// dropout.h: decides which elements of P are dropped; the same ones on every backend.
//
// One call of Philox4x32-7 (common/philox.h) yields 128 bits for 8 neighbouring columns of one row, of which each takes 15:
//     key     = dropout_key(seed, offset)                              once per call, on the host
//     block   = philox<7>({column / 8, row, head, sequence}, key)
//     half    = 16 bits of block[(column % 8) / 2], the low half for even columns
//     dropped = half % 32768 < threshold,   threshold = round(32768 * p)
// Seven rounds, because random numbers are what dropout costs. 15 bits, because a half without its first bit is a positive fp16 number, or
// a NaN above all numbers, and these have the order of their bits: one instruction compares two (dropout_pairs.cuh). Rows and columns count
// from the start of their whole sequence, heads and sequences from the first of the whole batch. A call on parts of sequences says where
// each part starts; the first column of a part is a multiple of 8. A tensor-core accumulator gives each thread of a quad two of the eight
// columns, which is exactly one word: the four threads of a quad can share four calls over four column groups.
#pragma once

#include "attention/common/params.h"
#include "common/philox.h"

namespace fa {

constexpr int kDropoutRounds = 7;
constexpr int kDropoutChances = 1 << 15;  // p is a number of these
// Up to this threshold (p = 0.96875), which is the infinity of fp16, the order of fp16 numbers is that of their bits.
constexpr uint32_t kDropoutPairsThreshold = 0x7C00;
inline bool drops_in_pairs(const AttentionParams& p) { return p.dropout_threshold && p.dropout_threshold <= kDropoutPairsThreshold; }

FA_HOST_DEVICE void dropout_key(uint64_t seed, uint64_t offset, uint32_t key[2]) {
    const Philox4 r = philox(uint32_t(offset), uint32_t(offset >> 32), 0, 0, uint32_t(seed), uint32_t(seed >> 32));
    key[0] = r.word[0], key[1] = r.word[1];
}

// The position, in the whole batch, of row 0 and column 0 of sequence b and of head 0 of the call.
struct DropoutOrigin {
    uint32_t columns;  // the first column / 8
    uint32_t row, head, sequence;
};
FA_HOST_DEVICE DropoutOrigin dropout_origin(const AttentionParams& p, int32_t b) {
    if (!p.parts) return {0, 0, uint32_t(p.first_head), uint32_t(b)};
    const Part& part = p.parts[b];
    return {uint32_t(part.first_key) / 8, uint32_t(part.first_row), uint32_t(p.first_head), uint32_t(part.sequence)};
}

// The random block that decides the eight columns from 8 * (column / 8) on.
FA_HOST_DEVICE Philox4 dropout_block(const AttentionParams& p, int32_t b, int32_t head, int32_t row, int32_t column) {
    const DropoutOrigin o = dropout_origin(p, b);
    return philox<kDropoutRounds>(o.columns + uint32_t(column) / 8, o.row + uint32_t(row), o.head + uint32_t(head), o.sequence,
                                  p.dropout_key[0], p.dropout_key[1]);
}

// Whether the element of the odd column, or of the even one, of a word is dropped. The shifts put its 15 bits above all others.
FA_HOST_DEVICE bool drops(const AttentionParams& p, uint32_t word, bool odd) {
    return (odd ? word << 1 : word << 17) < p.dropout_threshold << 17;
}
FA_HOST_DEVICE bool dropped(const AttentionParams& p, const Philox4& block, int32_t column) {
    return drops(p, block.word[(column % 8) / 2], column % 2);
}

}  // namespace fa
