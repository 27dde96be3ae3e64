// mma_tiles_d64.cu: tiles of mma_sm80 at headdim 64. A thread's registers: O 16 or 32, S block_n / 2 or block_n (warps of 16 or 32 rows).
#include "ladder/variants/mma_tiles.cuh"

namespace fa {
namespace {

// rows, keys, warps, stages, blocks on a multiprocessor that the compiler may assume
#define FA_TILE(id, ...) \
    template <>          \
    inline constexpr MmaTile kTileOf<__nv_bfloat16, 64, 64, MmaSm(id)> = {__VA_ARGS__};
FA_TILE(101, 16, 64, 1, 2, 4)
FA_TILE(102, 32, 64, 2, 2, 4)
FA_TILE(104, 64, 32, 4, 2, 4)
FA_TILE(105, 64, 64, 4, 2, 4)
FA_TILE(106, 64, 128, 4, 2, 2)
FA_TILE(107, 64, 256, 4, 1, 2)
FA_TILE(108, 128, 32, 4, 2, 2)
FA_TILE(109, 128, 64, 4, 2, 2)
FA_TILE(110, 128, 128, 4, 2, 2)
FA_TILE(111, 256, 64, 8, 2, 1)
FA_TILE(112, 256, 128, 8, 2, 1)
#undef FA_TILE

}  // namespace

void add_mma_tile_variants_d64(Variants* variants) {
    add_mma_tile<64, 101>(variants, 1), add_mma_tile<64, 102>(variants, 2);
    add_mma_tile<64, 104>(variants, 4), add_mma_tile<64, 105>(variants, 5), add_mma_tile<64, 106>(variants, 6);
    add_mma_tile<64, 107>(variants, 7), add_mma_tile<64, 108>(variants, 8), add_mma_tile<64, 109>(variants, 9);
    add_mma_tile<64, 110>(variants, 10), add_mma_tile<64, 111>(variants, 11), add_mma_tile<64, 112>(variants, 12);
}

}  // namespace fa
