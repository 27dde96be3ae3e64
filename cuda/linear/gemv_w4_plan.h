// gemv_w4_plan.h: how a product with 4-bit weights is cut for gemv_w4_sm90.cuh. Host only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/kernels.h"
#include "linear/mma_w4_plan.h"

namespace fa::w4 {

constexpr int kGemvRows = 8, kGemvWarps = 16, kGemvStages = 16;  // at most; of a block; of a warp's ring, at most
constexpr int kGemvStatic = 3072;                                // bytes of shared memory beside the plan's, at most

struct GemvPlan {
    int32_t row_tiles, column_tiles;                       // of W
    int32_t chunk;                                         // tiles beside each other that a copy brings: 4, or 2
    bool interleaved;                                      // units go round the warps; else each has a run of them
    int32_t cluster, clusters;                             // blocks that share K: 1 or 2; clusters of the grid
    int32_t pairs, slots;                                  // of rows of x; four sums a slot, of a row tile
    int32_t stages;                                        // of a warp's ring; 0: nothing fits
    int32_t inbox_tiles;                                   // that a block of a cluster finishes, at most
    int32_t x_stride, parts_at, inbox_at, ring_at, bytes;  // of shared memory; x is at 0
};

// The plan with as many stages as `bytes` of shared memory have room for.
inline GemvPlan gemv_plan(const W4LinearParams& p, const GpuSize& gpu, int chunk, int cluster, int bytes, bool interleaved) {
    GemvPlan plan{};
    plan.interleaved = interleaved;
    plan.row_tiles = used_row_tiles(p), plan.column_tiles = int(column_tiles(p.in_features)), plan.chunk = chunk;
    plan.cluster = cluster, plan.clusters = std::min(plan.row_tiles, std::max(1, gpu.multiprocessors / cluster));
    plan.pairs = int(ceil_div(p.rows, 2)), plan.slots = 8 * plan.pairs;
    const int tiles = int(ceil_div(plan.row_tiles, plan.clusters)), columns = int(ceil_div(plan.column_tiles, cluster));
    const int chunks = int(ceil_div(columns, chunk)), parts = interleaved ? tiles * std::min(chunks, kGemvWarps) : kGemvWarps;
    plan.inbox_tiles = cluster > 1 ? int(ceil_div(tiles, cluster)) : 0;
    plan.x_stride = columns * 2 * kTileColumns + 16;  // 16: no bank conflicts
    plan.parts_at = int(p.rows) * plan.x_stride;
    plan.inbox_at = plan.parts_at + parts * plan.slots * 16;
    plan.ring_at = int(ceil_div(plan.inbox_at + cluster * plan.inbox_tiles * plan.slots * 16, 128)) * 128;
    const int stage = kGemvWarps * chunk * tile_bytes(p.format), units = int(ceil_div(tiles * chunks, kGemvWarps));
    plan.stages = plan.ring_at < bytes ? std::min({std::max(2, units), kGemvStages, (bytes - plan.ring_at) / stage}) : 0;
    plan.bytes = plan.ring_at + plan.stages * stage;
    return plan;
}

// Measured on an H200. Best is less than half of an SM, copies of four tiles, and the copies of a block in the order of memory, which takes
// room for the sums of all warps. Where x leaves none for that, runs, then copies of two tiles, then all of an SM. Clusters of four were
// faster only in plain launches: beside the launch before, two of them find their way to the same SMs.
inline GemvPlan gemv_plan_of(const W4LinearParams& p, const GpuSize& gpu) {
    constexpr int kSystem = 1024;  // bytes of shared memory that each block takes beside its own
    const int whole = int(gpu.shared_memory) - kGemvStatic, half = int(gpu.shared_memory) / 2 - kSystem - kGemvStatic;
    const struct {
        int bytes, chunk, stages;
        bool interleaved;
    } choices[] = {{half, 4, 2, true}, {half, 4, 2, false}, {half, 2, 3, false}, {whole, 4, 3, false}, {whole, 2, 2, false}};
    for (const auto& choice : choices)
        for (int cluster = 1; cluster <= 2 && cluster <= column_tiles(p.in_features); ++cluster) {
            const GemvPlan plan = gemv_plan(p, gpu, choice.chunk, cluster, choice.bytes, choice.interleaved);
            if (plan.stages >= choice.stages) return plan;
        }
    return {};
}

}  // namespace fa::w4
