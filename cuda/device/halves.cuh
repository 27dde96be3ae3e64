// halves.cuh: pairs of fp16 numbers in a register.
#pragma once

#include <cstdint>

namespace fa {

// For each half: 0xFFFF where |x| >= bound or one of them is a NaN, else 0.
__device__ __forceinline__ uint32_t magnitudes_reach(uint32_t x, uint32_t bound) {
    uint32_t reached;
    asm("{\n"
        ".reg .b32 magnitudes;\n"
        "abs.f16x2 magnitudes, %1;\n"
        "set.geu.u32.f16x2 %0, magnitudes, %2;\n"
        "}"
        : "=r"(reached)
        : "r"(x), "r"(bound));
    return reached;
}

}  // namespace fa
