// float8.h: e4m3 on the host, bit by bit: 4 exponent bits with bias 7, 3 mantissa bits, no infinity, NaN is 0x7F. Rounds to nearest even.
#pragma once

#include "common/half.h"

namespace fa::cpu {

inline float e4m3_to_float(uint8_t x) {
    const uint32_t sign = uint32_t(x & 0x80u) << 24, magnitude = x & 0x7Fu;
    if (magnitude == 0x7Fu) return bits_to_float(sign | 0x7FC00000u);
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 20) * 0x1p120f));  // moves the exponent, exactly
}

// The largest number is 448; the next one would be 480. Magnitudes above 464, half way between them, become NaN.
inline uint8_t float_to_e4m3(float f) {
    const uint32_t bits = float_to_bits(f), magnitude = bits & 0x7FFFFFFFu;
    const uint8_t sign = uint8_t(bits >> 24 & 0x80u);
    if (magnitude > 0x43E80000u) return uint8_t(sign | 0x7Fu);
    if (magnitude < 0x3C800000u)  // below 2^-6: adding 2^14 leaves multiples of 2^-9 in the low bits, rounded
        return uint8_t(sign | (float_to_bits(bits_to_float(magnitude) + 16384.0f) - 0x46800000u));
    return uint8_t(sign | ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u) - 0x3C000000u) >> 20));
}

// Saturates at +-448.
inline uint8_t float_to_e4m3_saturating(float f) { return float_to_e4m3(f > 448.0f ? 448.0f : f < -448.0f ? -448.0f : f); }

}  // namespace fa::cpu
