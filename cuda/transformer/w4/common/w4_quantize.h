// w4_quantize.h: rounds a block of elements to 4-bit codes and a scale, in arithmetic that gives the same bytes on every device
// (transformer/common/rounded.h) and in NumPy (reference_w4.py).
//
//     tensor_scale  nvfp4: the largest magnitude of the weight / (6 * 448), so that the largest scale is e4m3's largest
//     scale         from a block's largest magnitude m. nvfp4: m / 6 / tensor_scale, rounded to e4m3; mxfp4: the power of two that scales m
//                   to 4 .. 8; int4: m / 7, rounded to float16
//     code          x / (scale * tensor_scale), rounded to the nearest code, ties to even
//     search        tries several scales and takes the first with the least squared error. nvfp4: from 2 steps of e4m3 below to 6 above,
//                   where m becomes 4 instead of 6; mxfp4: also the next power of two, which clips nothing; int4: the scales that map m
//                   to 7, 7.5 .. 11
#pragma once

#include "transformer/common/rounded.h"
#include "transformer/w4/common/params.h"
#include "transformer/w4/common/w4_bits.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif
#include "common/float8.h"

namespace fa::w4 {

FA_HOST_DEVICE uint16_t to_float16(float x) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#else
    return cpu::float_to_float16(x);
#endif
}
FA_HOST_DEVICE float from_float16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return cpu::float16_to_float(bits);
#endif
}

// Rounds x >= 0; values above 448, the largest number, become 448.
FA_HOST_DEVICE uint8_t to_e4m3(float x) {
    if (!(x < 448.0f)) return 0x7E;
    if (x < 0.015625f)
        return uint8_t(bits_of(add(x, 16384.0f)) - 0x46800000u);  // the low bits of the sum are x in multiples of 2^-9, rounded
    const uint32_t bits = bits_of(x);
    return uint8_t((bits + 0x7FFFFu + (bits >> 20 & 1u) - 0x3C000000u) >> 20);
}
FA_HOST_DEVICE float from_e4m3(uint8_t x) {
    const uint32_t sign = uint32_t(x & 0x80u) << 24, magnitude = x & 0x7Fu;
    if (magnitude == 0x7F) return float_of(0x7FC00000u);
    return float_of(sign | bits_of(multiply(float_of(magnitude << 20), 0x1p120f)));  // changes the exponent, exactly
}
FA_HOST_DEVICE float from_e8m0(uint8_t x) { return float_of(x == 255 ? 0x7FC00000u : x == 0 ? 0x00400000u : uint32_t(x) << 23); }

// A scale as files hold it, in the low bits of `stored`.
template <Format format>
FA_HOST_DEVICE float decode_scale(uint16_t stored) {
    if (format == Format::kInt4) return from_float16(stored);
    return format == Format::kNvfp4 ? from_e4m3(uint8_t(stored)) : from_e8m0(uint8_t(stored));
}
template <Format format>
FA_HOST_DEVICE uint16_t load_scale(const void* scales, int64_t at) {
    return format == Format::kInt4 ? static_cast<const uint16_t*>(scales)[at] : static_cast<const uint8_t*>(scales)[at];
}
template <Format format>
FA_HOST_DEVICE void store_scale(void* scales, int64_t at, uint16_t stored) {
    if (format == Format::kInt4) static_cast<uint16_t*>(scales)[at] = stored;
    else static_cast<uint8_t*>(scales)[at] = uint8_t(stored);
}

// The magnitude of E2M1 nearest to a >= 0; a tie goes to the even code.
FA_HOST_DEVICE float nearest_e2m1(float a) {
    return (a > 0.25f ? 0.5f : 0) + (a >= 0.75f ? 0.5f : 0) + (a > 1.25f ? 0.5f : 0) + (a >= 1.75f ? 0.5f : 0) + (a > 2.5f ? 1.0f : 0) +
           (a >= 3.5f ? 1.0f : 0) + (a > 5.0f ? 2.0f : 0);
}
FA_HOST_DEVICE uint8_t encode_e2m1(float x) {
    const float a = float_of(bits_of(x) & 0x7FFFFFFFu);
    const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return uint8_t(code | (bits_of(x) >> 31 << 3));
}
FA_HOST_DEVICE float decode_e2m1(uint8_t code) {
    const int magnitude = code & 7;
    const float x = magnitude < 4 ? 0.5f * float(magnitude) : float(magnitude < 6 ? magnitude - 2 : 2 * magnitude - 8);
    return code & 8 ? -x : x;
}

// The integer -8 .. 7 nearest to x.
FA_HOST_DEVICE float nearest_int4(float x) {
    const float inside = x < -8.0f ? -8.0f : x > 7.0f ? 7.0f : x, magic = 12582912.0f;  // the sum has no bits for a fraction
    return add(add(inside, magic), -magic);
}

template <Format format>
FA_HOST_DEVICE uint8_t encode(float x) {
    return format == Format::kInt4 ? uint8_t(int(nearest_int4(x)) & 15) : encode_e2m1(x);
}
template <Format format>
FA_HOST_DEVICE float decode(uint8_t code) {
    return format == Format::kInt4 ? float(int(code ^ 8u) - 8) : decode_e2m1(code);
}

// ---- scales ----

FA_HOST_DEVICE float tensor_scale_of(float largest) {
    if (largest == 0) return 1.0f;
    const float scale = divide(largest, 2688.0f), smallest = 0x1p-126f;  // the smallest normal number
    return scale > smallest ? scale : smallest;
}

template <Format format>
FA_HOST_DEVICE constexpr int tries() {
    return format == Format::kMxfp4 ? 2 : 9;
}
// The index of the scale that is used without a search.
template <Format format>
FA_HOST_DEVICE constexpr int unsearched() {
    return format == Format::kNvfp4 ? 2 : 0;
}
// Scale number i to try, for a block with this largest magnitude.
template <Format format>
FA_HOST_DEVICE uint16_t scale_to_try(float largest, float tensor_scale, int i) {
    if (format == Format::kNvfp4) {
        const int byte = to_e4m3(divide(largest, multiply(6.0f, tensor_scale))) + i - unsearched<format>();
        return uint16_t(byte < 0 ? 0 : byte > 126 ? 126 : byte);
    }
    if (format == Format::kMxfp4) {
        const int byte = int(bits_of(largest) >> 23) - 2;
        return uint16_t((byte < 0 ? 0 : byte) + i);
    }
    const uint16_t half = to_float16(divide(largest, 7.0f + 0.5f * float(i)));
    return half > 0x7BFF ? uint16_t(0x7BFF) : half;  // float16's largest number instead of infinity
}
template <Format format>
FA_HOST_DEVICE constexpr uint16_t not_a_number() {
    return format == Format::kNvfp4 ? 0x7F : format == Format::kMxfp4 ? 0xFF : 0x7E00;
}

// The power of two that scales a block to about 1. Errors are multiplied by it before they are squared, so that no square overflows.
FA_HOST_DEVICE float error_unit(float largest) {
    const int exponent = 254 - int(bits_of(largest) >> 23);
    return float_of(uint32_t(exponent < 1 ? 1 : exponent) << 23);
}

// The scale for the elements x of a block, padded with zeros; NaN if one of them is not finite.
template <Format format>
FA_HOST_DEVICE uint16_t block_scale(const float (&x)[block_of(format)], float tensor_scale, bool search) {
    constexpr int kBlock = block_of(format), kSums = 8;
    uint32_t most = 0;
    for (int i = 0; i < kBlock; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFFu;
        most = magnitude > most ? magnitude : most;
    }
    if (most >= 0x7F800000u) return not_a_number<format>();
    const float largest = float_of(most);
    if (!search) return scale_to_try<format>(largest, tensor_scale, unsearched<format>());
    const float unit = error_unit(largest);
    uint16_t best = 0;
    float least = 0;
    for (int t = 0; t < tries<format>(); ++t) {
        const uint16_t scale = scale_to_try<format>(largest, tensor_scale, t);
        const float factor = multiply(decode_scale<format>(scale), tensor_scale), value_unit = multiply(factor, unit);
        float sums[kSums] = {};
        for (int i = 0; i < kBlock; i += kSums)
            for (int j = 0; j < kSums; ++j) {
                const float number = format == Format::kInt4 ? x[i + j] : float_of(bits_of(x[i + j]) & 0x7FFFFFFFu);
                const float ratio = factor > 0 ? divide(number, factor) : 0.0f;
                const float value = format == Format::kInt4 ? nearest_int4(ratio) : nearest_e2m1(ratio);
                const float distance = add(multiply(number, unit), -multiply(value, value_unit));
                sums[j] = add(sums[j], multiply(distance, distance));
            }
        const float error = add(add(add(sums[0], sums[4]), add(sums[2], sums[6])), add(add(sums[1], sums[5]), add(sums[3], sums[7])));
        if (t == 0 || error < least) best = scale, least = error;  // NaN for a scale that is far too large
    }
    return best;
}

template <Format format>
FA_HOST_DEVICE uint8_t encode_in(float x, float factor) {
    return encode<format>(factor > 0 ? divide(x, factor) : 0.0f);  // false for NaN
}

// ---- packing ----

// The inputs of packing besides the weight.
struct Packing {
    DType dtype;
    bool pair;
    int largest;  // the largest scale byte of an mxfp4 weight, NaN excluded; otherwise 0
};

// The row of the weight that is row r of row tile `tile`; -1 for a padding row.
FA_HOST_DEVICE int64_t weight_row(int64_t tile, int r, int32_t out_features, bool pair) {
    if (!pair) {
        const int64_t row = tile * kTileRows + r;
        return row < out_features ? row : -1;
    }
    const int64_t half = out_features / 2, row = tile * 8 + r % 8;
    return row < half ? row + (r / 8) * half : -1;
}

template <Format format>
FA_HOST_DEVICE uint16_t scale_of(const W4View& w, int64_t row, int64_t column) {
    return row < 0 || column >= w.in_features ? uint16_t(0)
                                              : load_scale<format>(w.scales, row * w.blocks_of_a_row() + column / block_of(format));
}

// Writes lane `lane`'s part of tile (row_tile, column_tile), which starts at `to`: four words, and the scales of the blocks that start at
// the lane's columns.
template <Format format>
FA_HOST_DEVICE void pack_lane(const W4View& w, const Packing& packing, int64_t row_tile, int64_t column_tile, int lane, uint8_t* to) {
    const int64_t row_bytes = (int64_t(w.in_features) + 1) / 2, column0 = column_tile * kTileColumns;
    uint8_t keep[2] = {15, 15}, flip[2] = {0, 0};
    const int own = 16 * (lane % 4), c = own - own % block_of(format);  // the lane's columns, and the first of their block in the tile
    for (int upper = 0; upper < 2; ++upper) {
        const int r = lane / 4 + 8 * upper;
        const uint16_t scale = scale_of<format>(w, weight_row(row_tile, r, w.out_features, packing.pair), column0 + c);
        uint8_t* const at = to + scale_at(format, r, c);
        if (format == Format::kInt4) {
            if (c == own) *reinterpret_cast<uint16_t*>(at) = scale;
        } else {
            const StoredBlock stored = stored_block(format, packing.dtype, uint8_t(scale), packing.largest);
            if (c == own) *at = stored.scale;
            keep[upper] = stored.keep, flip[upper] = stored.flip;
        }
    }
    for (int j = 0; j < 4; ++j) {
        uint8_t codes[kWordCodes];
        for (int at = 0; at < kWordCodes; ++at) {
            const int r = code_row(lane, at);
            const int64_t row = weight_row(row_tile, r, w.out_features, packing.pair), column = column0 + code_column(lane, j, at);
            const bool inside = row >= 0 && column < w.in_features;
            const uint8_t code = inside ? uint8_t(w.codes[row * row_bytes + column / 2] >> (column % 2 * 4) & 15) : uint8_t(0);
            codes[at] = uint8_t((code & keep[r / 8]) ^ (inside ? flip[r / 8] : 0));
        }
        reinterpret_cast<uint32_t*>(to)[4 * lane + j] = pack_word(format, packing.dtype, codes);
    }
}

FA_HOST_DEVICE PackedHeader header_of(const W4View& w, const Packing& packing) {
    PackedHeader header{};
    const int exponent = factor_exponent(w.format, packing.largest);  // in two steps, because float32 may not hold 2^exponent
    const float half = float_of(uint32_t(exponent / 2 + 127) << 23), rest = float_of(uint32_t(exponent - exponent / 2 + 127) << 23);
    header.factor = multiply(multiply(w.tensor_scale ? *w.tensor_scale : 1.0f, half), rest);
    header.format = int32_t(w.format), header.dtype = int32_t(packing.dtype), header.paired = packing.pair;
    header.out_features = w.out_features, header.in_features = w.in_features;
    return header;
}

}  // namespace fa::w4
