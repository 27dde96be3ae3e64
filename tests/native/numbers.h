// numbers.h: 16- and 8-bit floats, random numbers and Philox for the native tests. They are written from the definitions of the formats,
// independently of the library's code: if two such implementations agree bit for bit, both are probably right.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "flash_attn.h"

inline size_t element_size(int32_t dtype) { return dtype == FA_FLOAT32 ? 4 : dtype == FA_FLOAT8_E4M3 ? 1 : 2; }

constexpr int32_t kTf32 = 99;  // the rounding of operands by tf32 tensor cores; never the dtype of an array

inline const char* dtype_name(int32_t dtype) {
    return dtype == FA_FLOAT32 ? "fp32" : dtype == FA_FLOAT16 ? "fp16" : dtype == FA_BFLOAT16 ? "bf16" : "e4m3";
}

inline int significand_bits(int32_t dtype) {
    return dtype == FA_FLOAT32 ? 24 : dtype == FA_FLOAT16 || dtype == kTf32 ? 11 : dtype == FA_BFLOAT16 ? 8 : 4;
}

// The nearest value of the format, ties to even. It scales one unit in the last place to 1, rounds, and scales back.
inline double round_to(int32_t dtype, double x) {
    if (x == 0 || !std::isfinite(x)) return x;
    const bool half = dtype == FA_FLOAT16, e4m3 = dtype == FA_FLOAT8_E4M3;
    const int precision = significand_bits(dtype), smallest = half ? -14 : e4m3 ? -6 : -126, largest = half ? 15 : 127;
    int exponent;
    std::frexp(x, &exponent);  // 2^(exponent - 1) <= |x| < 2^exponent
    const int ulp = std::max(exponent - 1, smallest) - (precision - 1);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -ulp)), ulp);
    if (e4m3) return std::copysign(std::min(std::fabs(rounded), 448.0), x);  // e4m3 has no infinity: larger values become 448
    return std::fabs(rounded) >= std::ldexp(1.0, largest + 1) ? std::copysign(INFINITY, x) : rounded;
}

inline float bits_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint32_t float_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

// A fast round_to, for the many probabilities of the plain implementation: it rounds the bits of a normal number.
inline float round_fast(int32_t dtype, float x) {
    const int cut = 24 - significand_bits(dtype);
    const float magnitude = std::fabs(x);
    if (cut == 0) return x;
    const bool e4m3 = dtype == FA_FLOAT8_E4M3;
    if (!(magnitude > (e4m3 ? 0x1p-6f : 1e-4f) && magnitude < (e4m3 ? 256.0f : 6e4f))) return float(round_to(dtype, x));
    const uint32_t bits = float_bits(x), half = (1u << (cut - 1)) - 1;
    return bits_float((bits + half + (bits >> cut & 1u)) & ~((1u << cut) - 1));
}

inline uint16_t encode16(int32_t dtype, double x) {
    if (dtype == FA_BFLOAT16) return uint16_t(float_bits(float(round_to(dtype, x))) >> 16);
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::fabs(round_to(dtype, x));
    if (std::isnan(x)) return 0x7E00;
    if (std::isinf(magnitude)) return uint16_t(sign | 0x7C00);
    if (magnitude < std::ldexp(1.0, -14)) return uint16_t(sign | int(std::ldexp(magnitude, 24)));
    int exponent;
    const double fraction = std::frexp(magnitude, &exponent);  // [0.5, 1)
    return uint16_t(sign | (exponent + 14) << 10 | (int(std::ldexp(fraction, 11)) - 1024));
}
inline float decode16(int32_t dtype, uint16_t bits) {
    if (dtype == FA_BFLOAT16) return bits_float(uint32_t(bits) << 16);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                            : exponent == 0 ? std::ldexp(float(fraction), -24)
                                            : std::ldexp(float(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

// e4m3: a sign, four bits of exponent with bias 7, three bits of fraction. The two patterns with all exponent and fraction
// bits set are NaN.
inline uint8_t encode8(double x) {
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (!std::isfinite(x)) return uint8_t(sign | 0x7F);
    const double magnitude = std::fabs(round_to(FA_FLOAT8_E4M3, x));
    if (magnitude < 0x1p-6) return uint8_t(sign | int(std::ldexp(magnitude, 9)));
    int exponent;
    const double fraction = std::frexp(magnitude, &exponent);  // [0.5, 1)
    return uint8_t(sign | (exponent + 6) << 3 | (int(std::ldexp(fraction, 4)) - 8));
}
inline float decode8(uint8_t bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float magnitude = (bits & 0x7F) == 0x7F ? NAN
                            : exponent == 0       ? std::ldexp(float(fraction), -9)
                                                  : std::ldexp(float(fraction + 8), exponent - 10);
    return bits & 0x80 ? -magnitude : magnitude;
}

inline void put(void* data, int64_t index, int32_t dtype, double value) {
    if (dtype == FA_FLOAT32) static_cast<float*>(data)[index] = float(value);
    else if (dtype == FA_FLOAT8_E4M3) static_cast<uint8_t*>(data)[index] = encode8(value);
    else static_cast<uint16_t*>(data)[index] = encode16(dtype, value);
}
inline float get(const void* data, int64_t index, int32_t dtype) {
    return dtype == FA_FLOAT32       ? static_cast<const float*>(data)[index]
           : dtype == FA_FLOAT8_E4M3 ? decode8(static_cast<const uint8_t*>(data)[index])
                                     : decode16(dtype, static_cast<const uint16_t*>(data)[index]);
}

inline uint64_t hash_name(const std::string& text) {
    uint64_t h = 1469598103934665603u;
    for (const unsigned char c : text) h = (h ^ c) * 1099511628211u;
    return h;
}

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits() {  // splitmix64
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
    double uniform() { return double(bits() >> 11) * 0x1p-53; }                                              // [0, 1)
    int64_t integer(int64_t low, int64_t high) { return low + int64_t(bits() % uint64_t(high - low + 1)); }  // low .. high
    bool chance(double p) { return uniform() < p; }
    double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
    template <typename T>
    T pick(const std::vector<T>& choices) {
        return choices[size_t(integer(0, int64_t(choices.size()) - 1))];
    }

private:
    uint64_t state_;
};

// Philox4x32: ten rounds, or fewer, on four words of counter. After each round both keys grow by a constant.
struct Counter {
    uint32_t x[4];
};
inline Counter philox4x32(int rounds, Counter c, uint32_t key_a, uint32_t key_b) {
    for (int round = 0; round < rounds; ++round) {
        const uint64_t first = uint64_t(c.x[0]) * 0xD2511F53u, second = uint64_t(c.x[2]) * 0xCD9E8D57u;
        c = {{uint32_t(second >> 32) ^ c.x[1] ^ key_a, uint32_t(second), uint32_t(first >> 32) ^ c.x[3] ^ key_b, uint32_t(first)}};
        key_a += 0x9E3779B9u;
        key_b += 0xBB67AE85u;
    }
    return c;
}

// The elements that dropout removes. For each element 8 bits of a block of seven rounds decide, under a key drawn from seed and offset.
// Four blocks serve 64 columns of a row: block i columns 2 i and 2 i + 1 of each eight.
class Dropout {
public:
    Dropout(double p, uint64_t seed, uint64_t offset) {
        if (p <= 0) return;
        threshold_ = uint32_t(std::min(255L, std::max(1L, std::lround(p * 256))));
        const Counter k = philox4x32(10, {{uint32_t(offset), uint32_t(offset >> 32), 0, 0}}, uint32_t(seed), uint32_t(seed >> 32));
        key_a_ = k.x[0], key_b_ = k.x[1];
    }
    bool on() const { return threshold_ != 0; }
    double scale() const { return 256.0 / (256.0 - threshold_); }
    bool drops(int64_t batch, int64_t head, int64_t row, int64_t column) const {
        const uint32_t call = uint32_t(column / 64 * 4 + column % 8 / 2);
        const Counter block = philox4x32(7, {{call, uint32_t(row), uint32_t(head), uint32_t(batch)}}, key_a_, key_b_);
        const uint32_t word = block.x[column % 64 / 16], half = column % 2 == 0 ? word & 0xFFFF : word >> 16;
        const uint32_t turned = (half << 1 | half >> 15) & 0xFFFF;  // two numbers, that of the even eight in the upper byte
        return (column / 8 % 2 == 0 ? turned >> 8 : turned & 0xFF) < threshold_;
    }

private:
    uint32_t threshold_ = 0, key_a_ = 0, key_b_ = 0;
};
