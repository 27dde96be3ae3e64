// linear_w4_tile_kernel.h: dot products of rows of x with 16 rows of packed 4-bit weights (linear/w4.h), the inner part of the CPU's
// w4_linear. Compiled once per instruction set by tiles_<isa>.cpp, which also says
//     FA_LINEAR_W4  the W4Kernel to define
//
// Word i of the 16 of rows g and g + 8 has their columns 4 i .. 4 i + 3. So lane i of a vector of words gives, code after code, columns
// that x brings in the same order, and a lane stays in one block of the weight: widening is shifts and masks in every lane alike. Bound by
// the widening for few rows of x, by the products for many.
#include "linear/w4_bits.h"
#include "linear_w4_tile.h"

namespace fa::cpu::FA_ISA {
namespace {

constexpr int kWords = 16, kVectorsOfWords = kWords / L;  // of two rows in a tile

// Codes `at` of the words of L lanes, as numbers.
template <w4::Format format, DType dtype, int at>
FA_INLINE Vec widen_code(UVec words) {
    constexpr int low = w4::bit_of(format, dtype, at, 0);
    if constexpr (format == w4::Format::kInt4) return __builtin_convertvector((IVec)(words >> low & 15u), Vec) - 8.0f;
    else {
        constexpr int sign = w4::bit_of(format, dtype, at, 3);
        const UVec magnitude = words >> low & 7u;
        // As the low exponent bits and the first of the mantissa the magnitude is 2 code: where the exponent is not 0. There it is 1 too
        // many.
        const Vec number = (Vec)((magnitude << 22) + 0x3F800000u);
        const Vec halved = magnitude < 2u ? number - 1.0f : number * 0.5f;
        return (Vec)((UVec)halved | (words >> sign << 31));
    }
}

// Bytes from the start of a tile to the scale of row r at each 16 columns. (The functions of w4.h are called at compile time alone: see
// simd.h for why nothing may be shared between object files.)
template <w4::Format format>
struct ScalePlaces {
    int at[w4::kTileRows][4];
    constexpr ScalePlaces() : at{} {
        for (int r = 0; r < w4::kTileRows; ++r)
            for (int q = 0; q < 4; ++q) at[r][q] = w4::scale_at(format, r, 16 * q);
    }
};

FA_INLINE float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// A stored scale, with the power of two that the products have beside a code (linear/w4_bits.h).
template <w4::Format format, DType dtype>
FA_INLINE float widen_scale(const uint8_t* at) {
    const uint32_t bits = *at;
    if constexpr (format == w4::Format::kInt4) {  // float16
        const uint32_t half = bits | uint32_t(at[1]) << 8, magnitude = (half & 0x7FFFu) << 13;
        const float value = magnitude >= 0x0F800000u ? as_float(magnitude | 0x7F800000u) : as_float(magnitude) * 0x1p112f;
        return half & 0x8000u ? -value : value;
    } else if constexpr (format == w4::Format::kNvfp4) {  // 5 bits exponent, 3 mantissa
        if (bits < 8) return 0;
        return as_float(bits >= 31u << 3 ? 0x7FC00000u : (bits << 20) + ((127u - 15 - 14) << 23));
    } else {  // an exponent of the products' type; what float32 does not have counts nothing
        constexpr int top = dtype == DType::kFloat16 ? 31 : 255, bias = dtype == DType::kFloat16 ? 15 + 14 : 127 + 126;
        const int exponent = int(bits) - bias + 127;
        if (bits == top) return as_float(0x7FC00000u);
        return bits == 0 || exponent <= 0 ? 0 : as_float(uint32_t(exponent) << 23);
    }
}

// Of row r, a lane each word.
template <w4::Format format, DType dtype>
FA_INLINE void scales_of(const uint8_t* tile, int r, Vec (&scale)[kVectorsOfWords]) {
    constexpr ScalePlaces<format> places;
    float s[4];
    for (int q = 0; q < 4; ++q) s[q] = q % (w4::block_of(format) / 16) == 0 ? widen_scale<format, dtype>(tile + places.at[r][q]) : s[q - 1];
    for (int v = 0; v < kVectorsOfWords; ++v) {
        float lanes[L];
        for (int l = 0; l < L; ++l) lanes[l] = s[(v * L + l) / 4];
        scale[v] = load_unaligned<Vec>(lanes);
    }
}

template <w4::Format format, DType dtype, int upper>
FA_INLINE void widen_row(const uint8_t* tile, int g, const UVec (&words)[kVectorsOfWords], Vec (&w)[4][kVectorsOfWords]) {
    Vec scale[kVectorsOfWords];
    scales_of<format, dtype>(tile, g + 8 * upper, scale);
    for (int v = 0; v < kVectorsOfWords; ++v) {
        w[0][v] = widen_code<format, dtype, 2 * upper>(words[v]) * scale[v];
        w[1][v] = widen_code<format, dtype, 2 * upper + 1>(words[v]) * scale[v];
        w[2][v] = widen_code<format, dtype, 2 * upper + 4>(words[v]) * scale[v];
        w[3][v] = widen_code<format, dtype, 2 * upper + 5>(words[v]) * scale[v];
    }
}

template <w4::Format format, DType dtype>
void w4_rows(W4RowTile& t) {
    constexpr int kTile = w4::tile_bytes(format);
    const int64_t x_row = t.count * w4::kTileColumns;
    Vec sums[kW4Rows][8][2];
    for (int m = 0; m < t.rows; ++m)
        for (int g = 0; g < 8; ++g) sums[m][g][0] = sums[m][g][1] = Vec{};
    for (int64_t tile = 0; tile < t.count; ++tile) {
        const uint8_t* const from = t.tiles + tile * kTile;
        for (int g = 0; g < 8; ++g) {
            UVec words[kVectorsOfWords];
            for (int v = 0; v < kVectorsOfWords; ++v) words[v] = load_unaligned<UVec>(from + 4 * (kWords * g + v * L));
            Vec w[2][4][kVectorsOfWords];
            widen_row<format, dtype, 0>(from, g, words, w[0]);
            widen_row<format, dtype, 1>(from, g, words, w[1]);
            const float* x = t.x + tile * w4::kTileColumns;
            for (int m = 0; m < t.rows; ++m, x += x_row) {
                Vec low = sums[m][g][0], high = sums[m][g][1];
                for (int c = 0; c < 4; ++c)
                    for (int v = 0; v < kVectorsOfWords; ++v) {
                        const Vec a = load_unaligned<Vec>(x + c * kWords + v * L);
                        low += w[0][c][v] * a, high += w[1][c][v] * a;
                    }
                sums[m][g][0] = low, sums[m][g][1] = high;
            }
        }
    }
    for (int m = 0; m < t.rows; ++m)
        for (int g = 0; g < 8; ++g)
            for (int upper = 0; upper < 2; ++upper) {
                float sum = 0;
                for (int l = 0; l < L; ++l) sum += sums[m][g][upper][l];
                t.sums[m][g + 8 * upper] = sum;
            }
}

template <w4::Format format>
void w4_rows_of(W4RowTile& t) {
    if (t.dtype == DType::kFloat16) w4_rows<format, DType::kFloat16>(t);
    else w4_rows<format, DType::kBFloat16>(t);
}

void run_linear_w4(W4RowTile& t) {
    if (t.format == w4::Format::kNvfp4) w4_rows_of<w4::Format::kNvfp4>(t);
    else if (t.format == w4::Format::kMxfp4) w4_rows_of<w4::Format::kMxfp4>(t);
    else w4_rows_of<w4::Format::kInt4>(t);
}

}  // namespace
}  // namespace fa::cpu::FA_ISA

namespace fa::cpu {
const W4Kernel FA_LINEAR_W4 = FA_ISA::run_linear_w4;
}
