// mma_w4_plan.h: how a product with 4-bit weights is cut for mma_w4.cuh. Host only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/kernels.h"
#include "linear/round_x.h"

namespace fa::w4 {

constexpr int kMaxStages = 16;
constexpr int kStaticShared = 2048;      // at most, and what the system takes
constexpr int kResidentNumbers = 16384;  // of x, at most: 32 in each thread of 16 warps

// How the work is cut, the same for all blocks.
struct MmaPlan {
    int32_t row_groups, column_groups;  // warps of a block, rows first
    int32_t tiles;                      // row tiles of a warp, at most kR
    int32_t cluster;                    // blocks that share K
    int32_t clusters;                   // in the grid, for each block of rows of x
    int32_t stages;
    bool resident;  // x
    bool sm90;
};

// What a kernel is compiled for.
struct MmaShape {
    int token_tiles, tiles, warps;  // of 8 rows of x; of 16 rows of W a warp; beside the producer
};

struct MmaSizes {
    int stage_bytes, parts_at, x_at, bytes;  // of shared memory
};

// Tiles with rows in them; the packed weight has more.
inline int used_row_tiles(const W4LinearParams& p) {
    return int(p.swiglu ? ceil_div(p.columns(), 8) : ceil_div(p.out_features, kTileRows));
}

inline int rows_of_block(const W4LinearParams& p, const MmaShape& shape) { return int(std::min<int64_t>(p.rows, 8 * shape.token_tiles)); }

// x can go to shared memory as it is.
inline bool reads_x(const W4LinearParams& p) {
    return p.dtype == p.compute_dtype && !p.norm_weight && p.in_features % 8 == 0 && reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 &&
           (p.rows == 1 || p.x.row % 8 == 0);
}

// Rows of a block, rounded up to a power of two.
inline int resident_rows(const W4LinearParams& p, const MmaShape& shape) {
    int rows = 1;
    while (rows < rows_of_block(p, shape)) rows *= 2;
    return rows;
}
// x by fours in whole rows of warps: 32 numbers for each lane of 16 warps.
inline bool fits_resident(const W4LinearParams& p, const MmaShape& shape) {
    const auto fours = [](const void* data, int64_t row, DType dtype) {
        return reinterpret_cast<uintptr_t>(data) % (dtype == DType::kFloat32 ? 16 : 8) == 0 && row % 4 == 0;
    };
    const int rows = resident_rows(p, shape);
    return shape.token_tiles == 1 && rows * rounded_columns(p.in_features) <= kResidentNumbers && p.in_features % 4 == 0 &&
           fours(p.x.data, p.rows > 1 ? p.x.row : 0, p.dtype) && (!p.norm_weight || fours(p.norm_weight, 0, p.norm_dtype));
}

inline MmaSizes sizes_of(const W4LinearParams& p, const MmaShape& shape, const MmaPlan& plan) {
    const int rows = rows_of_block(p, shape), columns = int(column_tiles(p.in_features));
    MmaSizes sizes{};
    sizes.stage_bytes = plan.row_groups * plan.tiles * plan.column_groups * tile_bytes(p.format) +
                        (plan.resident ? 0 : rows * (plan.column_groups * 2 * kTileColumns + 16));
    sizes.parts_at = plan.stages * sizes.stage_bytes;
    sizes.x_at = sizes.parts_at + shape.warps * plan.tiles * shape.token_tiles * 512;
    sizes.bytes = sizes.x_at + (plan.resident ? rows * (int(ceil_div(columns, plan.cluster)) * 2 * kTileColumns + 16) : 0);
    return sizes;
}

// Measured on an H200. A thread starts few copies in a time, so warps share columns first, and rows when a block has more tiles than they
// hold. What a block reads of x grows with its columns, what it makes of it with its rows: two blocks that share K read half as much each,
// and pay for it at the end. Clusters of four and eight were slower everywhere.
inline MmaPlan plan_of(const W4LinearParams& p, const MmaShape& shape, const GpuSize& gpu) {
    const int places = int(std::max<int64_t>(1, gpu.multiprocessors / ceil_div(p.rows, 8 * shape.token_tiles)));
    const int row_tiles = used_row_tiles(p), columns = int(column_tiles(p.in_features));
    const auto tiles_of_block = [&](int cluster) { return int(ceil_div(row_tiles, std::max(1, places / cluster))); };
    const bool shares = shape.token_tiles == 1 ? tiles_of_block(1) <= 2 && columns >= 128 : tiles_of_block(1) <= 4 && columns >= 32;

    MmaPlan plan{};
    plan.sm90 = gpu.shared_memory > 200 * 1024;
    plan.resident = fits_resident(p, shape) && (!reads_x(p) || (p.rows == 1 && columns >= 64));
    plan.cluster = plan.sm90 && shares && tiles_of_block(2) <= 2 * shape.tiles ? 2 : 1;  // that is one pass
    plan.clusters = std::min(row_tiles, std::max(1, places / plan.cluster));
    const int tiles = int(ceil_div(row_tiles, plan.clusters));
    plan.row_groups = tiles > shape.tiles ? 2 : 1, plan.column_groups = shape.warps / plan.row_groups;
    const int passes = int(ceil_div(tiles, plan.row_groups * shape.tiles));
    plan.tiles = int(ceil_div(tiles, passes * plan.row_groups));

    const int turns = passes * int(ceil_div(ceil_div(columns, plan.cluster), plan.column_groups));
    plan.stages = std::max(2, std::min(turns, kMaxStages));
    while (sizes_of(p, shape, plan).bytes > int(gpu.shared_memory) - kStaticShared) {
        if (plan.stages > 2) --plan.stages;
        else if (plan.tiles > 1) --plan.tiles;  // less shared memory than sm_90's
        else if (plan.column_groups > 1) plan.row_groups *= 2, plan.column_groups /= 2;
        else break;
    }
    return plan;
}

}  // namespace fa::w4
