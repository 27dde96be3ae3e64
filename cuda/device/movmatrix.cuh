// movmatrix.cuh: the transpose of a matrix in registers, from sm_75 on.
#pragma once

#include <cstdint>

namespace fa {

// movmatrix: of 8 x 8 elements of 16 bits. Lane 4 g + q holds elements 2 q and 2 q + 1 of row g.
__device__ __forceinline__ uint32_t transposed_8x8(uint32_t pair) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(d) : "r"(pair));
    return d;
}

}  // namespace fa
