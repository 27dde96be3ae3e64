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

void add_wgmma_tile_variants_d64(Variants* variants) { add_wgmma_tiles<200>(variants, std::make_integer_sequence<int, 10>()); }

}  // namespace fa
