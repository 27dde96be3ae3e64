// philox.h: the random bits of dropout, the same on every backend. Philox4x32-10 (Salmon et al., SC 2011).
//
// One call yields 128 bits for 8 neighbouring columns of one row, 16 bits each:
//     key     = first two words of philox({offset_lo, offset_hi, 0, 0}, {seed_lo, seed_hi})      once per call, on the host
//     block   = philox({column / 8, row, head, batch}, key)
//     bits    = 16 bits of block[(column % 8) / 2], the low half for even columns
//     dropped = bits < threshold,   threshold = round(65536 * p)
// Rows and columns count from the start of their sequence. A tensor-core accumulator gives each thread of a quad two of the
// eight columns, that is exactly one word: the quad can share four calls over four column groups.
#pragma once

#include "params.h"

namespace fa {

struct Philox4 {
    uint32_t word[4];
};

FA_HOST_DEVICE Philox4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(b >> 32) ^ c1 ^ k0, c1 = uint32_t(b);
        c2 = uint32_t(a >> 32) ^ c3 ^ k1, c3 = uint32_t(a);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

FA_HOST_DEVICE void dropout_key(uint64_t seed, uint64_t offset, uint32_t key[2]) {
    const Philox4 r = philox(uint32_t(offset), uint32_t(offset >> 32), 0, 0, uint32_t(seed), uint32_t(seed >> 32));
    key[0] = r.word[0], key[1] = r.word[1];
}

// The random block that decides columns 8 * (column / 8) .. + 7.
FA_HOST_DEVICE Philox4 dropout_block(const AttentionParams& p, int32_t b, int32_t head, int32_t row, int32_t column) {
    return philox(uint32_t(column) / 8, uint32_t(row), uint32_t(head), uint32_t(b), p.dropout_key[0], p.dropout_key[1]);
}

FA_HOST_DEVICE bool dropped(const AttentionParams& p, const Philox4& block, int32_t column) {
    const uint32_t word = block.word[(column % 8) / 2];
    return (column % 2 ? word >> 16 : word & 0xFFFFu) < p.dropout_threshold;
}

}  // namespace fa
