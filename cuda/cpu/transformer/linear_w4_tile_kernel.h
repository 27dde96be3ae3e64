// linear_w4_tile_kernel.h: dot products of rows of x with 16 rows of packed 4-bit weights (transformer/w4/common/w4.h), the inner part of
// the CPU's w4_linear. Compiled once per instruction set by tiles_<isa>.cpp, which also defines
//     FA_LINEAR_W4  the W4Kernel to define
//
// Rows g and g + 8 have 16 words; word i holds columns 4 i .. 4 i + 3 of both rows. So lane i of a vector of words yields, one code
// after another, columns that x stores in the same order. A lane stays in one block of the weight, so widening is the same shifts and masks
// in every lane. Bound by the widening for few rows of x, by the products for many.
#include "cpu/transformer/linear_w4_tile.h"
#include "transformer/w4/common/w4_bits.h"

namespace fa::cpu::FA_ISA {
namespace {

constexpr int kWords = 16, kVectorsOfWords = kWords / L;  // words of two rows in a tile

// The magnitude of the E2M1 code in the low 3 bits; higher bits are ignored.
FA_INLINE Vec magnitude_of(UVec code) {
#if defined(__AVX512F__)
    const Vec table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return (Vec)_mm512_maskz_permutexvar_ps(__mmask16(-1), (__m512i)code, (__m512)table);
#elif defined(__AVX2__)
    const Vec table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return (Vec)_mm256_permutevar8x32_ps((__m256)table, (__m256i)code);
#else
    // The code as low exponent bits and first mantissa bit is twice the number, if its exponent is not 0. Otherwise it is 1 too many.
    const UVec bits = code & 7u;
    const Vec number = (Vec)((bits << 22) + 0x3F800000u);
    return bits < 2u ? number - 1.0f : number * 0.5f;
#endif
}

// Code `at` of each word, as a number.
template <w4::Format format, DType dtype, int at>
FA_INLINE Vec widen_code(UVec words) {
    constexpr int low = w4::bit_of(format, dtype, at, 0);
    if constexpr (format == w4::Format::kInt4) return __builtin_convertvector((IVec)(words >> low & 15u), Vec) - 8.0f;
    constexpr int sign = w4::bit_of(format, dtype, at, 3);
    return (Vec)((UVec)magnitude_of(words >> low) | (words << (31 - sign) & 0x80000000u));
}

// A tile's scales are stored by g, then by block of columns, then for rows g and g + 8 (w4::scale_at). (The functions of w4.h are only
// called at compile time: simd.h says why object files may not share a function.)
template <w4::Format format>
constexpr int kWordsOfBlock = w4::block_of(format) / 4 < kWords ? w4::block_of(format) / 4 : kWords;
template <w4::Format format>
constexpr int kScales = 8 * (kWords / kWordsOfBlock<format>)*2;
template <w4::Format format>
constexpr bool in_order() {
    for (int i = 0; i < kScales<format>; ++i) {
        const int blocks = kWords / kWordsOfBlock<format>, g = i / 2 / blocks, block = i / 2 % blocks;
        if (w4::scale_at(format, g + i % 2 * 8, block * 4 * kWordsOfBlock<format>) != w4::kTileCodes + i * w4::scale_bytes_of(format))
            return false;
    }
    return true;
}

// Converts all scales of a tile, including the power of two that the products apply to each code (transformer/w4/common/w4_bits.h).
template <w4::Format format, DType dtype>
FA_INLINE void widen_scales(const uint8_t* tile, float* scale) {
    static_assert(in_order<format>(), "scales are widened in the order they lie in");
    for (int i = 0; i < kScales<format>; i += L) {
        const uint8_t* const from = tile + w4::kTileCodes + i * w4::scale_bytes_of(format);
        if constexpr (format == w4::Format::kInt4) {
            *(Vec*)(scale + i) = float16_to_float(load_unaligned<HalfVec>(from));
            continue;
        }
        const UVec bits = __builtin_convertvector(__builtin_convertvector(load_unaligned<ByteVec>(from), HalfVec), UVec);
        const IVec nan = splat(0x7FC00000);
        if constexpr (format == w4::Format::kNvfp4) {  // 5 bits exponent, 3 mantissa
            const IVec number = (IVec)((bits << 20) + ((127u - 15 - 14) << 23));
            *(IVec*)(scale + i) = bits < 8u ? IVec{} : bits >= 31u << 3 ? nan : number;
        } else {  // an exponent of the products' type; what float32 cannot hold becomes 0
            constexpr int top = dtype == DType::kFloat16 ? 31 : 255, bias = dtype == DType::kFloat16 ? 15 + 14 : 127 + 126;
            const IVec exponent = (IVec)bits - (bias - 127);
            *(IVec*)(scale + i) = (IVec)bits == top ? nan : ((IVec)bits == 0) | (exponent <= 0) ? IVec{} : exponent << 23;
        }
    }
}

// The scales of row g (or g + 8): one lane per word of vector v.
template <int words, int upper, int... l>
FA_INLINE Vec spread(Vec scales, Lanes<l...>) {
    return __builtin_shufflevector(scales, scales, (2 * (l / words) + upper)...);
}
template <w4::Format format, int upper>
FA_INLINE Vec scales_of(const float* scale, int g, int v) {
    constexpr int words = kWordsOfBlock<format>;
    return spread<words, upper>(load_unaligned<Vec>(scale + 2 * (kWords / words * g + v * L / words)), typename MakeLanes<L>::Type());
}

template <w4::Format format, DType dtype, int upper>
FA_INLINE void widen_row(const float* scales, int g, const UVec (&words)[kVectorsOfWords], Vec (&w)[4][kVectorsOfWords]) {
    for (int v = 0; v < kVectorsOfWords; ++v) {
        const Vec scale = scales_of<format, upper>(scales, g, v);
        w[0][v] = widen_code<format, dtype, 2 * upper>(words[v]) * scale;
        w[1][v] = widen_code<format, dtype, 2 * upper + 1>(words[v]) * scale;
        w[2][v] = widen_code<format, dtype, 2 * upper + 4>(words[v]) * scale;
        w[3][v] = widen_code<format, dtype, 2 * upper + 5>(words[v]) * scale;
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
        alignas(64) float scales[kScales<format> + L] = {};  // whole vectors are read past the end
        widen_scales<format, dtype>(from, scales);
        for (int g = 0; g < 8; ++g) {
            UVec words[kVectorsOfWords];
            for (int v = 0; v < kVectorsOfWords; ++v) words[v] = load_unaligned<UVec>(from + 4 * (kWords * g + v * L));
            Vec w[2][4][kVectorsOfWords];
            widen_row<format, dtype, 0>(scales, g, words, w[0]);
            widen_row<format, dtype, 1>(scales, g, words, w[1]);
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
#pragma GCC unroll 1  // otherwise GCC 12 vectorises over the eight rows: 50 KB of shuffles that take 8 s to compile
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
