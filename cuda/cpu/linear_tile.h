// linear_tile.h: the border between linear.cpp and linear_tile_kernel.h, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace fa::cpu {

constexpr int kLinearRows = 4;        // of x at a time
constexpr int kLinearColumns = 2048;  // of x and weight at a time
constexpr int kLinearOutputs = 32;    // rows of weight a task takes

// sums[m][n] += x[m] . weight[n] over some columns.
struct LinearTile {
    const char* weight;  // (outputs, columns), rows weight_bytes apart
    int64_t weight_bytes;
    DType dtype;
    int32_t rows, outputs, columns;
    float x[kLinearRows][kLinearColumns];  // zero from `columns` to the next multiple of 16
    float sums[kLinearRows][kLinearOutputs];
};

using LinearKernel = void (*)(LinearTile& tile);
extern const LinearKernel kLinearPortable, kLinearAvx2, kLinearAvx512, kLinearNeon;

}  // namespace fa::cpu
