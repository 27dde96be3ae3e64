// linear_w4_tile.h: the interface between linear_w4.cpp and linear_w4_tile_kernel.h, which is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "transformer/w4/common/params.h"

namespace fa::cpu {

constexpr int kW4Rows = 32;  // rows of x at a time

// sums[m][r] = x[m] . row r of a packed row tile, without the header's factor.
struct W4RowTile {
    const uint8_t* tiles;  // `count` adjacent tiles of 16 rows x 64 columns
    int64_t count;
    w4::Format format;
    DType dtype;
    const float* x;  // (rows, count, 4, 16): the 64 columns of a tile, grouped by column modulo 4
    int32_t rows;    // 1 .. kW4Rows
    float sums[kW4Rows][w4::kTileRows];
};

using W4Kernel = void (*)(W4RowTile& tile);
extern const W4Kernel kLinearW4Portable, kLinearW4Avx2, kLinearW4Avx512, kLinearW4Neon;

}  // namespace fa::cpu
