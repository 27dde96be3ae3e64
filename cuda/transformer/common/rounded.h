// rounded.h: float32 arithmetic in which every operation is rounded and none are fused, so that host and device agree bit for bit. On the
// host the files that rely on it are compiled with -ffp-contract=off.
#pragma once

#include <cstring>

#include "common/types.h"

namespace fa {

FA_HOST_DEVICE float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
FA_HOST_DEVICE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}
FA_HOST_DEVICE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}
FA_HOST_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}
FA_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

}  // namespace fa
