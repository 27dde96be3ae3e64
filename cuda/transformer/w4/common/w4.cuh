// w4.cuh: turns packed 4-bit weights (w4.h, w4_bits.h) into operand A of mma.m16n8k16, in the product's type T, __half or __nv_bfloat16.
// Eight E2M1 weights take 9 or 10 bit operations and 4 multiplications, all exact.
#pragma once

#include "device/mma.cuh"
#include "transformer/w4/common/w4_bits.h"

namespace fa::w4 {

template <typename T>
struct Pair;
template <>
struct Pair<__half> {
    using type = __half2;
    static __device__ __forceinline__ type of(float x) { return __float2half2_rn(x); }
};
template <>
struct Pair<__nv_bfloat16> {
    using type = __nv_bfloat162;
    static __device__ __forceinline__ type of(float x) { return __float2bfloat162_rn(x); }
};
template <typename T>
__device__ __forceinline__ typename Pair<T>::type as_pair(uint32_t bits) {
    return reinterpret_cast<const typename Pair<T>::type&>(bits);
}
template <typename P>
__device__ __forceinline__ uint32_t as_bits(P pair) {
    return reinterpret_cast<const uint32_t&>(pair);
}

// Eight codes before scaling: int4 as its value, E2M1 as its value times 2^-14 (float16) or 2^-126 (bfloat16).
template <Format kFormat, typename T>
__device__ __forceinline__ void unpack_word(uint32_t (&a)[4], uint32_t word) {
    constexpr bool kHalf = sizeof(T) == 2 && __is_same(T, __half);
    if constexpr (kFormat == Format::kInt4 && kHalf) {
        const uint32_t upper = word >> 8;  // as mantissa bits of 1024 a code u reads as 1024 + u or 1024 + 16 u
        const __half2 sixteenth = __float2half2_rn(1.0f / 16), eight = __float2half2_rn(1032.0f), rest = __float2half2_rn(-72.0f);
        a[0] = as_bits(__hsub2(as_pair<T>((word & 0x000F000Fu) | 0x64006400u), eight));
        a[1] = as_bits(__hfma2(as_pair<T>((word & 0x00F000F0u) | 0x64006400u), sixteenth, rest));
        a[2] = as_bits(__hsub2(as_pair<T>((upper & 0x000F000Fu) | 0x64006400u), eight));
        a[3] = as_bits(__hfma2(as_pair<T>((upper & 0x00F000F0u) | 0x64006400u), sixteenth, rest));
    } else if constexpr (kFormat == Format::kInt4) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // as mantissa bits of 128 a code u reads as 128 + u
            a[i] = as_bits(__hsub2(as_pair<T>((word >> 4 * i & 0x000F000Fu) | 0x43004300u), __float2bfloat162_rn(136.0f)));
    } else if constexpr (kHalf) {  // one multiplication does two shifts, and leaves the pipe for bit operations free
        constexpr uint32_t kMask = 0x8E008E00u;
        a[0] = word & kMask;
        a[1] = word * 8u & kMask;
        a[2] = (word & 0x40384038u) * 66u & kMask;
        a[3] = (word & 0x20072007u) * 516u & kMask;
    } else {
        constexpr uint32_t kMask = 0x81C081C0u;
        const uint32_t last = word & 0x2E002E00u;
        a[0] = word & kMask;
        a[1] = word * 8u & kMask;
        a[2] = (word & 0x40074007u) * 66u & kMask;
        a[3] = (last * 4u + (last >> 3)) & kMask;
    }
}

// A stored scale (E2M1: a byte; int4: a float16) in both halves of a register.
template <Format kFormat, typename T>
__device__ __forceinline__ uint32_t widen_scale(uint32_t stored) {
    constexpr bool kHalf = __is_same(T, __half);
    if constexpr (kFormat == Format::kNvfp4) return kHalf ? stored * 0x00800080u : stored * 0x00100010u + 0x70007000u;
    if constexpr (kFormat == Format::kMxfp4) return kHalf ? stored * 0x04000400u : stored * 0x00800080u;
    return kHalf ? stored * 0x00010001u : as_bits(Pair<T>::of(__half2float(__ushort_as_half(uint16_t(stored)))));
}

// The scales of rows g and g + 8, from the 16 bits (E2M1) or 32 bits (int4) that hold both.
template <Format kFormat, typename T>
__device__ __forceinline__ void widen_scales(uint32_t (&scale)[2], uint32_t stored) {
    constexpr int kBits = 8 * scale_bytes_of(kFormat);
    scale[0] = widen_scale<kFormat, T>(stored & ((1u << kBits) - 1));
    scale[1] = widen_scale<kFormat, T>(stored >> kBits);
}

// widen_scales as floats, for sums of products with unscaled codes.
template <Format kFormat, typename T>
__device__ __forceinline__ void float_scales(float& upper, float& lower, uint32_t stored) {
    if constexpr (kFormat == Format::kInt4) {
        upper = __half2float(__ushort_as_half(uint16_t(stored))), lower = __half2float(__ushort_as_half(uint16_t(stored >> 16)));
    } else {
        uint32_t scale[2];
        widen_scales<kFormat, T>(scale, stored);
        float pair[2];
        unpack_16<T>(pair, scale[0]);
        upper = pair[1];
        unpack_16<T>(pair, scale[1]);
        lower = pair[1];
    }
}

// A lane's part of a tile, in shared or global memory.
__device__ __forceinline__ uint4 load_codes(const uint8_t* tile, int lane) { return reinterpret_cast<const uint4*>(tile)[lane]; }
template <Format kFormat>
__device__ __forceinline__ uint32_t load_scales(const uint8_t* tile, int lane) {
    if constexpr (kFormat == Format::kNvfp4) return reinterpret_cast<const uint16_t*>(tile + kTileCodes)[lane];
    if constexpr (kFormat == Format::kMxfp4) return reinterpret_cast<const uint16_t*>(tile + kTileCodes)[lane / 2];
    return reinterpret_cast<const uint32_t*>(tile + kTileCodes)[lane / 4];
}

// The scaled operand of one step: registers 0 and 2 hold row g, registers 1 and 3 row g + 8.
template <Format kFormat, typename T>
__device__ __forceinline__ void dequantize_word(uint32_t (&a)[4], uint32_t word, const uint32_t (&scale)[2]) {
    unpack_word<kFormat, T>(a, word);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = as_bits(__hmul2(as_pair<T>(a[i]), as_pair<T>(scale[i % 2])));
}

// Adds a tile of W times kCount tiles of 8 rows of x to sums. columns[n] holds lane (g, q)'s part of row g of tile n: first the columns of
// steps 0 and 1, then those of steps 2 and 3. kScalesSums (int4 only, whose rows have one scale per tile): the scale multiplies a row's
// sums instead of its weights, which is cheaper and exact.
template <Format kFormat, typename T, bool kScalesSums, int kCount>
__device__ __forceinline__ void multiply_tile(float (&sums)[kCount][4], uint4 codes, uint32_t stored, const uint4 (&columns)[kCount][2]) {
    static_assert(!kScalesSums || kFormat == Format::kInt4, "the other formats have several scales for a row of a tile");
    uint32_t scale[2];
    if constexpr (!kScalesSums) widen_scales<kFormat, T>(scale, stored);
    float unscaled[kCount][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        const uint32_t word = (&codes.x)[j];
        if constexpr (kScalesSums) unpack_word<kFormat, T>(a, word);
        else dequantize_word<kFormat, T>(a, word, scale);
#pragma unroll
        for (int n = 0; n < kCount; ++n)
            mma<T>(kScalesSums ? unscaled[n] : sums[n], a, (&columns[n][j / 2].x)[j % 2 * 2], (&columns[n][j / 2].x)[j % 2 * 2 + 1]);
    }
    if constexpr (kScalesSums) {
        float upper, lower;  // scales of rows g and g + 8
        float_scales<kFormat, T>(upper, lower, stored);
#pragma unroll
        for (int n = 0; n < kCount; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][e] += unscaled[n][e] * (e < 2 ? upper : lower);
    }
}
template <Format kFormat, typename T, bool kScalesSums, int kCount>
__device__ __forceinline__ void multiply_tile(float (&sums)[kCount][4], const uint8_t* tile, const uint4 (&columns)[kCount][2], int lane) {
    multiply_tile<kFormat, T, kScalesSums>(sums, load_codes(tile, lane), load_scales<kFormat>(tile, lane), columns);
}

}  // namespace fa::w4
