// tile_load.cuh: the copy engine loads a tile of a strided tensor into shared memory.
#pragma once

#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// One thread copies `rows` rows, from `row` on, to shared address `tile`, in `loads` boxes (the number that encode_tiles returned). Rows
// out of bounds arrive as zeros. The barrier receives the bytes of the whole tile. `policy`: kEvictFirst, kEvictLast or nothing.
template <typename... Policy>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, int loads, uint32_t tile, uint32_t rows, uint32_t barrier, int row,
                                          int head, int batch, Policy... policy) {
#pragma unroll 1
    for (int c = 0; c < loads; ++c)
        tma_load(tile + c * rows * kChunkRowBytes, &map, barrier, c * kChunkColumns, row, 0, head, batch, policy...);
}

}  // namespace fa
