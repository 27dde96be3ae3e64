// wgmma_tiles.cuh: the wgmma_sm90 kernel in tiles of other sizes than the library's: lazy maximum, two stages, turns where there are
// two or three consumer warpgroups. A tile is a specialisation of the kernel's table of plans; the kernel is the library's.
#pragma once

#include <utility>

#include "ladder/variants/wgmma_roles.cuh"

namespace fa {

constexpr WgmmaPlan tile_plan(int headdim, int warpgroups, int block_n) {
    WgmmaPlan plan;
    plan.headdim = plan.headdim_v = headdim, plan.block_n = block_n, plan.warpgroups = warpgroups;
    plan.ping_pong = warpgroups == 2 || warpgroups == 3, plan.paged = false;
    return plan;
}

template <WgmmaPlanId kId>
void add_wgmma_tile(Variants* variants, int order) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    const std::string groups = kPlan.warpgroups == 1 ? "1 consumer warpgroup" : std::to_string(kPlan.warpgroups) + " consumer warpgroups";
    Variant v = wgmma_variant<kId>("block-size", order, groups + ", 2 stages", forward_wgmma_kernel<Bf16, kId, KeyLoads::kTilesOrRows>);
    v.name = "wgmma_sm90_" + tile_text(kPlan.headdim, kPlan.block_m(), kPlan.block_n);
    v.workspace = [](const AttentionParams& p, int multiprocessors) {
        return work_list_workspace(p, kWgmmaPlan<kId>.block_m(), multiprocessors);
    };
    v.launch = launch_wgmma<Bf16, kId>;
    variants->push_back(std::move(v));
}
// The tiles of numbers kBase + 1, kBase + 2, ...
template <int kBase, int... kIndex>
void add_wgmma_tiles(Variants* variants, std::integer_sequence<int, kIndex...>) {
    (add_wgmma_tile<WgmmaPlanId(kBase + 1 + kIndex)>(variants, 1 + kIndex), ...);
}

}  // namespace fa
