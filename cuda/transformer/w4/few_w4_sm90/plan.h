// few_w4_sm90/plan.h: how few_w4_sm90/kernel.cuh divides a product among blocks and warps. Host only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transformer/w4/common/product.h"
#include "transformer/w4/kernels.h"

namespace fa::w4 {

constexpr int kFewRows = 32;                                    // rows of x, at most
constexpr int kFewChunk = 4;                                    // column tiles per copy
constexpr int kFewWarps = 16, kFewStages = 16, kFewSlots = 16;  // at most: warps that multiply, stages of a warp's ring, slots of x
constexpr int kFewStatic = 3072;                                // bytes of static shared memory, at most

struct FewPlan {
    int32_t row_tiles, column_tiles;  // of W
    int32_t cluster, clusters;        // blocks that divide K; clusters in the grid
    int32_t warps, groups;            // warps of a block that multiply; warps that share a row tile
    int32_t group_columns;            // column tiles per warp, at most
    int32_t pairs, slots;             // pairs of rows of x; slots of four sums per row tile
    int32_t x_slots, stages;          // slots in the ring of x; stages in the ring of a warp, 0 if too few fit
    int32_t early;                    // stages that are filled before the kernel waits for x
    int32_t ring_at, bytes;           // offset in and size of shared memory. x is at 0; at the end the inbox of sums replaces it
    int32_t blocks_per_sm;            // blocks that fit into the shared memory of an SM: 1 or 2
};

// Rows of x in a TMA box, and the most warps whose registers suffice to multiply so many rows.
inline int few_tokens(const W4LinearParams& p) { return int(ceil_div(p.rows, 8)) * 8; }
FA_HOST_DEVICE constexpr int few_warps(int tokens) { return tokens <= 16 ? kFewWarps : kFewWarps - 1; }

// The plan for `clusters` clusters, or more if W needs them, in `room` bytes of shared memory.
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

// TMA loads x in boxes of whole tiles.
inline bool few_reads_x(const W4LinearParams& p) { return fetches_x(p) && p.in_features % kTileColumns == 0; }

// Measured on an H200, in plain and programmatic launches. Two blocks per SM are faster if x needs no launch of its own. They are also
// faster for a taller W, so that no second round is left half empty. Otherwise, after round_x, one block per SM is faster: with one row
// tile per warp, most weights take one round of blocks. Such a block queues two copies of weights before it asks for x, because each copy
// ahead of x delays x. All warps are used, as long as each has at least one whole copy of columns.
inline FewPlan few_plan_of(const W4LinearParams& p, const DeviceInfo& gpu) {
    constexpr int kSystem = 1024;  // bytes of shared memory that the system takes for each block
    const int warps = few_warps(few_tokens(p)), columns = int(column_tiles(p.in_features)), cluster = columns >= 2 ? 2 : 1;
    const int clusters = std::max(1, gpu.multiprocessors / cluster), tiles = int(ceil_div(used_row_tiles(p), clusters));
    const bool halves = tiles > warps || few_reads_x(p);
    const int room = int(gpu.shared_memory) / (halves ? 2 : 1) - (halves ? kSystem : 0) - kFewStatic;
    for (int groups = warps; groups >= 1; --groups) {
        if (groups > 1 && (tiles * groups > warps || ceil_div(columns, cluster) < groups * kFewChunk)) continue;
        FewPlan plan = few_plan(p, cluster, clusters, groups, room);
        plan.blocks_per_sm = halves ? 2 : 1;
        plan.early = halves ? plan.stages : std::min(plan.stages, 2);
        if (plan.stages > 0) return plan;
    }
    return {};
}

}  // namespace fa::w4
