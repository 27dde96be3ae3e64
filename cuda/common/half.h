// half.h: 16-bit floats on the host, bit by bit. Rounds to nearest even; NaN stays NaN, overflow becomes infinity.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/types.h"

namespace fa::cpu {

inline float bits_to_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

inline float bfloat16_to_float(uint16_t x) { return bits_to_float(uint32_t(x) << 16); }
inline uint16_t float_to_bfloat16(float f) {
    const uint32_t bits = float_to_bits(f);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(bits >> 16 | 0x40u);
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline float float16_to_float(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000u) << 16, magnitude = x & 0x7FFFu;
    if (magnitude >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | magnitude << 13);  // infinity, NaN
    // Multiplying by 2^112 moves the exponent; it is exact, for subnormals too.
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(0x77800000u)));
}
inline uint16_t float_to_float16(float f) {
    const uint32_t bits = float_to_bits(f), magnitude = bits & 0x7FFFFFFFu;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
    if (magnitude > 0x7F800000u) return uint16_t(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u)                                    // below 2^-14: adding 1/2 leaves the subnormal's bits, rounded
        return uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000u));
    return uint16_t(sign | ((magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13));
}

inline float load(const void* data, int64_t index, DType dtype) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
    const uint16_t x = static_cast<const uint16_t*>(data)[index];
    return dtype == DType::kFloat16 ? float16_to_float(x) : bfloat16_to_float(x);
}
inline void store(void* data, int64_t index, DType dtype, float value) {
    if (dtype == DType::kFloat32) static_cast<float*>(data)[index] = value;
    else static_cast<uint16_t*>(data)[index] = dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
}

}  // namespace fa::cpu
