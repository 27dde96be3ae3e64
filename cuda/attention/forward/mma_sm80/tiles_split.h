// tiles_split.h: the tiles of mma_sm80/kernel.cuh for float32 in split products (device/split_tf32.cuh).
#pragma once

#include "attention/common/tiles_mma_sm80.h"

namespace fa {

constexpr size_t kSplitWideBytes = 166144;  // shared memory of the smallest tile for head dims above 256

constexpr MmaTile with_column_parts(MmaTile tile, int parts) {
    tile.column_parts = parts;
    return tile;
}
// Elements of S that each thread of warps that share rows exchanges at a time. The smaller tile leaves no room for more.
constexpr int exchanged_at_once(const MmaTile& tile) {
    const int elements = tile.block_m * tile.column_parts / tile.warps * tile.block_n / 32;
    return tile.block_m < 64 ? 2 : elements;
}

// A warp splits what it reads into parts, 3 instructions a value; three mma.sync for
// each that tf32 takes leave shared memory time, so 16 rows of a warp suffice where 32 do not fit into the registers.
constexpr MmaTile mma_tile_split(int d, int dv, MmaSm sm) {
    if (d > 256) {                                                              // a row of Q, of K and of V takes 2 KB each
        if (sm == MmaSm::kAny) return with_column_parts({16, 32, 4, 1, 1}, 4);  // 162 KB; O at most 64 + S 16. Dropout takes 32 keys
        if (d <= 384) return with_column_parts({64, 32, 8, 1, 1}, 2);           // 225 KB; O 96 + S 16
        return with_column_parts({64, 16, 8, 1, 1}, 2);                         // 208 KB; O 128 + S 8
    }
    if (sm == MmaSm::k228) {
        if (d <= 64) return {128, 32, 4, 2, 2};            // O 64 + S 32; 64 KB
        if (d > 96 && d <= 128) return {64, 32, 4, 1, 3};  // O 64 + S 16; 64 KB: three blocks
        if (dv > 192) return {128, 32, 8, 1, 1};           // O 128 + S 16; 192 KB
    }
    if (sm != MmaSm::kAny) {
        if (d <= 64) return {128, 32, 4, 2, 2};   // 64 KB
        if (d <= 96) return {64, 32, 4, 2, 2};    // O 48 + S 16; 72 KB
        if (d <= 128) return {64, 32, 4, 1, 2};   // 64 KB
        if (d <= 192) return {128, 32, 8, 1, 1};  // 144 KB
        return {64, 32, 4, 1, 1};                 // 128 KB
    }
    return mma_tile_tf32(d, dv, sm);
}

}  // namespace fa
