// linear_w4_tile.h: the border between linear_w4.cpp and linear_w4_tile_kernel.h, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "transformer/w4/params.h"

namespace fa::cpu {

constexpr int kW4Rows = 32;  // of x at a time

// sums[m][r] = x[m] . row r of a packed row tile, without the header's factor.
struct W4RowTile {
    const uint8_t* tiles;  // `count` tiles of 16 rows x 64 columns beside each other
    int64_t count;
    w4::Format format;
    DType dtype;
    const float* x;  // (rows, count, 4, 16): of a tile's 64 columns those that are c modulo 4, one c after the other
    int32_t rows;    // 1 .. kW4Rows
    float sums[kW4Rows][w4::kTileRows];
};

using W4Kernel = void (*)(W4RowTile& tile);
extern const W4Kernel kLinearW4Portable, kLinearW4Avx2, kLinearW4Avx512, kLinearW4Neon;

}  // namespace fa::cpu
