// w4_bits.h: the order of the bits in a packed 4-bit weight (w4.h), for host and device, chosen so that w4.cuh turns a word into operands
// of a product in few instructions.
//
// A word holds eight codes, four in each 16-bit half. Code 2 i + h is half h of register i of mma.m16n8k16's operand A (device/mma.cuh):
// row g + 8 (i % 2) of the tile, column 16 q + 4 j + 2 (i / 2) + h. A half holds one code per register, with its bits where the operand
// needs them or one shift away:
//
//     E2M1, float16    Bits 15 and 11 .. 9 of a half read as code * 2^-14, including the subnormal 0.5. The code of register 0 is stored
//                      there, that of register 1 three bits lower. Registers 2 and 3 have their signs at bits 14 and 13, their other bits
//                      at 5 .. 3 and 2 .. 0.
//     E2M1, bfloat16   The same with bits 15 and 8 .. 6, which read as code * 2^-126. The other bits of register 2 are at 2 .. 0, those of
//                      register 3 at 11 .. 9.
//     int4             code + 8, register i at bits 4 i .. 4 i + 3. As mantissa bits of 1024 (128 in bfloat16) it reads as a number.
//
// The stored scale of E2M1 has a different exponent bias, so that code * 2^-14 times the scale is exact and in range in 16 bits:
//
//     nvfp4    Five bits of exponent (bias 15), three of mantissa, no sign: scale * 2^7. A product is code * scale * 2^-7.
//     mxfp4    An exponent of the product's type. The largest scale of the weight, 2^max, becomes the type's largest, 2^15 or 2^127. A
//              product is code * scale * 2^(1 - max). float16 is exact for scales down to 2^24 below the largest, and scales 2^30 or more
//              below it become zero; bfloat16 is exact over a range of 2^126.
//     int4     float16, unchanged; it multiplies the sums, or the codes, of a block.
//
// If a scale cannot be stored this way, the codes change. If the scale is 0 or too small, they become 0. A NaN scale is stored as
// infinity with codes of 0, so that the product is NaN. A negative scale flips the signs of its codes. PackedHeader::factor holds the
// powers of two and tensor_scale.
#pragma once

#include "transformer/w4/common/w4.h"

namespace fa::w4 {

constexpr int kWordCodes = 8;

// The position, in its word, of bit 0 .. 3 of code `at` (0 .. 7); bit 3 is the sign.
FA_HOST_DEVICE constexpr int bit_of(Format format, DType dtype, int at, int bit) {
    const int i = at / 2, half = 16 * (at % 2);
    if (format == Format::kInt4) return half + 4 * i + bit;
    if (bit == 3) return half + (i == 0 ? 15 : i == 1 ? 12 : i == 2 ? 14 : 13);
    if (dtype == DType::kFloat16) return half + 9 - 3 * i + bit;
    return half + (i < 3 ? 6 - 3 * i : 9) + bit;
}

// Packs codes 0 .. 15, as files hold them, into a word.
FA_HOST_DEVICE uint32_t pack_word(Format format, DType dtype, const uint8_t (&codes)[kWordCodes]) {
    uint32_t word = 0;
    for (int at = 0; at < kWordCodes; ++at) {
        const uint32_t code = format == Format::kInt4 ? codes[at] ^ 8u : codes[at];
        for (int bit = 0; bit < 4; ++bit) word |= (code >> bit & 1u) << bit_of(format, dtype, at, bit);
    }
    return word;
}
FA_HOST_DEVICE uint8_t unpack_code(Format format, DType dtype, uint32_t word, int at) {
    uint32_t code = 0;
    for (int bit = 0; bit < 4; ++bit) code |= (word >> bit_of(format, dtype, at, bit) & 1u) << bit;
    return uint8_t(format == Format::kInt4 ? code ^ 8u : code);
}

// The row and the column, within its tile, of code `at` of word j of lane 4 g + q.
FA_HOST_DEVICE constexpr int code_row(int lane, int at) { return lane / 4 + 8 * (at / 2 % 2); }
FA_HOST_DEVICE constexpr int code_column(int lane, int j, int at) { return 16 * (lane % 4) + 4 * j + 2 * (at / 4) + at % 2; }

// The stored form of a block of E2M1: the byte of its scale, and (code & keep) ^ flip for each code.
struct StoredBlock {
    uint8_t scale, keep, flip;
};
// `largest`: the largest scale byte of an mxfp4 weight, NaN excluded; nvfp4 does not use it.
FA_HOST_DEVICE constexpr StoredBlock stored_block(Format format, DType dtype, uint8_t scale, int largest = 0) {
    if (format == Format::kMxfp4) {
        const int top = dtype == DType::kFloat16 ? 30 : 254, exponent = top - (largest - scale);
        if (scale == 255) return {uint8_t(top + 1), 0, 0};
        return exponent > 0 ? StoredBlock{uint8_t(exponent), 15, 0} : StoredBlock{0, 0, 0};
    }
    const int magnitude = scale & 127;
    const uint8_t flip = scale & 128 ? 8 : 0;
    if (magnitude == 127) return {31 << 3, 0, 0};
    if (magnitude >= 8) return {uint8_t(magnitude + 120), 15, flip};
    if (magnitude == 0) return {0, 0, 0};
    const int log = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;  // a subnormal of e4m3, magnitude * 2^-9
    return {uint8_t((13 + log) << 3 | (magnitude << (3 - log) & 7)), 15, flip};
}

// PackedHeader::factor is tensor_scale times 2 to this exponent.
FA_HOST_DEVICE constexpr int factor_exponent(Format format, int largest = 0) {
    return format == Format::kNvfp4 ? 7 : format == Format::kMxfp4 ? largest - 128 : 0;
}

// The offset in bytes, within a tile, of the scale of row r and column c.
FA_HOST_DEVICE constexpr int scale_at(Format format, int r, int c) {
    const int g = r % 8, upper = r / 8;
    if (format == Format::kNvfp4) return kTileCodes + 2 * (4 * g + c / 16) + upper;
    if (format == Format::kMxfp4) return kTileCodes + 2 * (2 * g + c / 32) + upper;
    return kTileCodes + 2 * (2 * g + upper);
}

}  // namespace fa::w4
