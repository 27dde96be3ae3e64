// wgmma_tiles_d128.cu: tiles of wgmma_sm90 at headdim 128. A consumer thread's registers: O 64, S block_n / 2, P block_n / 4, of 232 with
// two warpgroups, 160 with three, 112 with four.
#include "ladder/variants/wgmma_tiles.cuh"

namespace fa {

// consumer warpgroups of 64 rows, keys
#define FA_TILE(id, ...) \
    template <>          \
    inline constexpr WgmmaPlan kWgmmaPlan<WgmmaPlanId(id)> = tile_plan(128, __VA_ARGS__);
FA_TILE(301, 1, 64)
FA_TILE(302, 1, 128)
FA_TILE(303, 2, 32)
FA_TILE(304, 2, 64)
FA_TILE(305, 2, 96)
FA_TILE(306, 2, 128)
FA_TILE(307, 2, 192)
FA_TILE(308, 3, 64)
FA_TILE(309, 3, 80)
FA_TILE(310, 3, 96)
FA_TILE(311, 4, 32)
#undef FA_TILE

void add_wgmma_tile_variants_d128(Variants* variants) { add_wgmma_tiles<300>(variants, std::make_integer_sequence<int, 11>()); }

}  // namespace fa
