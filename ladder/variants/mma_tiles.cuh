// mma_tiles.cuh: the mma_sm80 kernel in tiles of other sizes than the library's. A tile is a specialisation of the template's table for an
// unused number; the kernel is the library's.
#pragma once

#include "attention/forward/mma_sm80/kernel.cuh"
#include "ladder/variants/variant.h"

namespace fa {
namespace {

inline size_t no_workspace(const AttentionParams&, int) { return 0; }

template <int kD, int kId>
void add_mma_tile(Variants* variants, int order) {
    using T = __nv_bfloat16;
    constexpr MmaSm kSm = MmaSm(kId);
    constexpr const MmaTile& kTile = kTileOf<T, kD, kD, kSm>;
    Variant v;
    v.name = "mma_sm80_" + tile_text(kD, kTile.block_m, kTile.block_n), v.experiment = "block-size", v.kernel = "mma_sm80";
    v.about = std::to_string(kTile.warps) + " warps of " + std::to_string(kTile.block_m / kTile.warps) + " rows, " +
              std::to_string(kTile.stages) + (kTile.stages == 1 ? " stage" : " stages");
    v.order = order, v.headdim = kD, v.tile_m = kTile.block_m, v.tile_n = kTile.block_n, v.stages = kTile.stages;
    v.threads = kTile.warps * 32, v.shared_bytes = sizeof(Smem<T, kTileOf<T, kD, kD, kSm>, kD, kD>), v.compute = 80;
    v.function = reinterpret_cast<const void*>(attention_kernel<T, kD, kD, kSm, Options::kNone, KeyRows::kStrided>);
    v.workspace = no_workspace;
    v.launch = [](const AttentionParams& p, int, cudaStream_t stream) {
        MmaParams params = mma_params<T>(p);
        return launch_tile<T, kD, kD, kSm, Options::kNone, KeyRows::kStrided>(params, stream);
    };
    variants->push_back(std::move(v));
}

}  // namespace
}  // namespace fa
