// widen.cuh: 8-bit values of a cache, converted exactly to the fp16 values that the tensor cores multiply. The four bytes of a register
// become two registers, paired as neighbours (bytes 0, 1 and 2, 3) or as even and odd bytes (0, 2 and 1, 3).
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fa {

struct Float8 {  // e4m3
    uint8_t bits;
};
struct Int8 {
    int8_t value;
};

template <typename T>
__device__ __forceinline__ void widen_neighbours(uint32_t (&to)[2], uint32_t bytes);
template <typename T>
__device__ __forceinline__ void widen_even_odd(uint32_t& even, uint32_t& odd, uint32_t bytes);

// Two e4m3 to two fp16, for GPUs without an instruction for it. The sign moves to the top bit of its half; exponent and mantissa move to
// fp16's exponent and mantissa bits. Multiplying by 2^8 corrects the difference of the biases, 15 - 7, also for subnormal numbers. All 7
// bits set is NaN.
__host__ __device__ __forceinline__ uint32_t widen_pair_e4m3_by_bits(uint32_t two_bytes) {
    const uint32_t tops = (two_bytes & 0xFFu) << 8 | (two_bytes & 0xFF00u) << 16, magnitudes = tops & 0x7F007F00u;
    const uint32_t places = (tops & 0x80008000u) | magnitudes >> 1;
    const __half2_raw x{uint16_t(places), uint16_t(places >> 16)}, factor{0x5C00, 0x5C00};
    const __half2_raw y = __hmul2(__half2(x), __half2(factor));
    const uint32_t nan = (magnitudes + 0x01000100u) & 0x80008000u;  // the carry out of seven set bits
    return (y.x | uint32_t(y.y) << 16) | (nan - (nan >> 15));
}
__device__ __forceinline__ uint32_t widen_pair_e4m3(uint32_t two_bytes) {
#if __CUDA_ARCH__ >= 890
    const __half2_raw x = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two_bytes), __NV_E4M3);
    return x.x | uint32_t(x.y) << 16;
#else
    return widen_pair_e4m3_by_bits(two_bytes);
#endif
}
template <>
__device__ __forceinline__ void widen_neighbours<Float8>(uint32_t (&to)[2], uint32_t bytes) {
    to[0] = widen_pair_e4m3(bytes & 0xFFFFu), to[1] = widen_pair_e4m3(bytes >> 16);
}
template <>
__device__ __forceinline__ void widen_even_odd<Float8>(uint32_t& even, uint32_t& odd, uint32_t bytes) {
    const uint32_t sorted = __byte_perm(bytes, 0, 0x3120);
    even = widen_pair_e4m3(sorted & 0xFFFFu), odd = widen_pair_e4m3(sorted >> 16);
}

// A byte below the high byte 0x64 is the fp16 number 1024 + byte, exactly. The byte is the int8 value plus 128, so subtracting 1152 gives
// the value.
__device__ __forceinline__ uint32_t widen_pair_int8(uint32_t biased, uint32_t selector) {
    const uint32_t x = __byte_perm(biased, 0x64646464u, selector);
    const __half2 y = __hsub2(reinterpret_cast<const __half2&>(x), __half2half2(__ushort_as_half(0x6480)));
    return reinterpret_cast<const uint32_t&>(y);
}
template <>
__device__ __forceinline__ void widen_neighbours<Int8>(uint32_t (&to)[2], uint32_t bytes) {
    bytes ^= 0x80808080u;
    to[0] = widen_pair_int8(bytes, 0x4140), to[1] = widen_pair_int8(bytes, 0x4342);
}
template <>
__device__ __forceinline__ void widen_even_odd<Int8>(uint32_t& even, uint32_t& odd, uint32_t bytes) {
    bytes ^= 0x80808080u;
    even = widen_pair_int8(bytes, 0x4240), odd = widen_pair_int8(bytes, 0x4341);
}

}  // namespace fa
