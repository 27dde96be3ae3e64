// few_w4_plan.h: how a product with 4-bit weights is cut for few_w4_sm90.cuh. Host only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/kernels.h"
#include "linear/mma_w4_plan.h"

namespace fa::w4 {

constexpr int kFewRows = 32, kFewChunk = 4;                     // of x, at most; tiles beside each other that a copy brings
constexpr int kFewWarps = 16, kFewStages = 16, kFewSlots = 16;  // at most: warps that multiply, stages of a warp's ring, slots of x
constexpr int kFewStatic = 3072;                                // bytes of shared memory beside the plan's, at most

struct FewPlan {
    int32_t row_tiles, column_tiles;  // of W
    int32_t cluster, clusters;        // blocks that share K; clusters of the grid
    int32_t warps, groups;            // of a block; warps that share a row tile
    int32_t group_columns;            // column tiles of a warp, at most
    int32_t pairs, slots;             // of rows of x; four sums a slot, of a row tile
    int32_t x_slots, stages;          // of the ring of x; of a warp's ring, 0: nothing fits
    int32_t early;                    // stages that are filled before x is asked for
    int32_t ring_at, bytes;           // of shared memory; x is at 0, and so is the inbox when x has been read
};

// Rows of x in a box of the copy engine, and the warps that multiply with so many: as many as there are registers for.
inline int few_tokens(const W4LinearParams& p) { return int(ceil_div(p.rows, 8)) * 8; }
FA_HOST_DEVICE constexpr int few_warps(int tokens) { return tokens <= 16 ? kFewWarps : kFewWarps - 1; }

// The plan for `clusters` clusters, or as many as W needs, in `room` bytes of shared memory.
inline FewPlan few_plan(const W4LinearParams& p, int cluster, int clusters, int groups, int room) {
    FewPlan plan{};
    plan.row_tiles = used_row_tiles(p), plan.column_tiles = int(column_tiles(p.in_features));
    plan.cluster = cluster, plan.groups = groups;
    plan.clusters = std::max(std::min(plan.row_tiles, clusters), int(ceil_div(plan.row_tiles, few_warps(few_tokens(p)) / groups)));
    const int tiles = int(ceil_div(plan.row_tiles, plan.clusters)), columns = int(ceil_div(plan.column_tiles, cluster));
    plan.warps = tiles * groups, plan.group_columns = int(ceil_div(columns, groups));
    plan.pairs = int(ceil_div(p.rows, 2)), plan.slots = 8 * plan.pairs;

    constexpr int kLeastSlots = 3;
    const int steps = int(ceil_div(plan.group_columns, kFewChunk)), most = std::min(steps, kFewSlots);
    const int stage = plan.warps * kFewChunk * tile_bytes(p.format), x_slot = groups * kFewChunk * few_tokens(p) * 2 * kTileColumns;
    plan.x_slots = std::min(most, kLeastSlots);
    if (plan.x_slots * x_slot + 2 * stage > room) plan.x_slots = std::min(most, 2);
    plan.stages = std::clamp((room - plan.x_slots * x_slot) / stage, 0, std::min(std::max(steps, 2), kFewStages));
    if (plan.stages < 2 || cluster > plan.column_tiles) plan.stages = 0;
    plan.x_slots = std::clamp((room - plan.stages * stage) / x_slot, plan.x_slots, most);
    plan.ring_at = plan.x_slots * x_slot;
    const int inbox = int(ceil_div(tiles, cluster)) * cluster * groups * plan.slots * 16;
    plan.bytes = std::max(plan.ring_at + plan.stages * stage, inbox);
    return plan;
}

// x as the copy engine can fetch it: nothing to be done to it before.
inline bool few_reads_x(const W4LinearParams& p) {
    return !p.norm_weight && p.dtype == p.compute_dtype && p.in_features % kTileColumns == 0 &&
           reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 && (p.rows == 1 || (p.x.row % 8 == 0 && p.x.row >= p.in_features));
}

// Blocks of half an SM (`half`), or of all of it. Measured on an H200: as many warps as there are, each with at least one whole copy of
// columns. Copies that are queued before x delay it, which is not there yet only when the launch before runs beside this one.
inline FewPlan few_plan_of(const W4LinearParams& p, const GpuSize& gpu, bool half) {
    constexpr int kSystem = 1024;  // bytes of shared memory that each block takes beside its own
    const int room = (half ? int(gpu.shared_memory) / 2 - kSystem : int(gpu.shared_memory)) - kFewStatic;
    const int columns = int(column_tiles(p.in_features)), cluster = columns >= 2 ? 2 : 1;
    const int clusters = std::max(1, gpu.multiprocessors / cluster);
    for (int groups = few_warps(few_tokens(p)); groups >= 1; --groups) {
        const bool wanted =
            ceil_div(used_row_tiles(p), clusters) * groups <= few_warps(few_tokens(p)) && ceil_div(columns, cluster) >= groups * kFewChunk;
        if (!wanted && groups > 1) continue;
        FewPlan plan = few_plan(p, cluster, clusters, groups, room);
        plan.early = half ? plan.stages : std::min(plan.stages, 2);
        if (plan.stages > 0) return plan;
    }
    return {};
}

}  // namespace fa::w4
