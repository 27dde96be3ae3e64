// linear_tile.h: the interface between linear.cpp and linear_tile_kernel.h, which is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "transformer/ops/ops.h"

namespace fa::cpu {

constexpr int kLinearOutputs = 32;    // columns of out per block, whose weights stay in the cache while the rows of x pass by
constexpr int kLinearRows = 16;       // rows of x that are prepared at a time, if they fit into kLinearFloats
constexpr int kLinearFloats = 8192;   // floats of prepared x, on the stack
constexpr int kLinearColumns = 2048;  // columns summed in one register before the sum is added to the total

// Columns first .. last - 1 of out, for every row of x.
struct LinearTask {
    const LinearParams* params;
    int32_t columns;  // of out
    int32_t first, last;
};

using LinearKernel = void (*)(const LinearTask& task);
extern const LinearKernel kLinearPortable, kLinearAvx2, kLinearAvx512, kLinearNeon;

}  // namespace fa::cpu
