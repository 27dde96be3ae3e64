// prmt.cuh: the byte permutation in the form that __byte_perm lacks.
#pragma once

#include <cstdint>

namespace fa {

// prmt.b32 in its sign form: byte n of the result is eight copies of the sign of the byte of `x` that nibble n of kSelector, 8 to 11,
// names.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t prmt_signs(uint32_t x) {
    uint32_t y;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kSelector));
    return y;
}

}  // namespace fa
