// wgmma_tiles_d64.cu: tiles of wgmma_sm90 at headdim 64. A consumer thread's registers: O 32, S block_n / 2, P block_n / 4, of 232 with two
// warpgroups, 160 with three, 112 with four.
#include "ladder/variants/wgmma_tiles.cuh"

namespace fa {

// consumer warpgroups of 64 rows, keys
#define FA_TILE(id, ...) \
    template <>          \
    inline constexpr WgmmaPlan kWgmmaPlan<WgmmaPlanId(id)> = tile_plan(64, __VA_ARGS__);
FA_TILE(201, 1, 64)
FA_TILE(202, 1, 128)
FA_TILE(203, 2, 32)
FA_TILE(204, 2, 64)
FA_TILE(205, 2, 128)
FA_TILE(206, 2, 192)
FA_TILE(207, 2, 256)
FA_TILE(208, 3, 64)
FA_TILE(209, 3, 128)
FA_TILE(210, 4, 64)
#undef FA_TILE

void add_wgmma_tile_variants_d64(Variants* variants) {
    add_wgmma_tile<WgmmaPlanId(201)>(variants, 1);
    add_wgmma_tile<WgmmaPlanId(202)>(variants, 2);
    add_wgmma_tile<WgmmaPlanId(203)>(variants, 3);
    add_wgmma_tile<WgmmaPlanId(204)>(variants, 4);
    add_wgmma_tile<WgmmaPlanId(205)>(variants, 5);
    add_wgmma_tile<WgmmaPlanId(206)>(variants, 6);
    add_wgmma_tile<WgmmaPlanId(207)>(variants, 7);
    add_wgmma_tile<WgmmaPlanId(208)>(variants, 8);
    add_wgmma_tile<WgmmaPlanId(209)>(variants, 9);
    add_wgmma_tile<WgmmaPlanId(210)>(variants, 10);
}

}  // namespace fa
