// mma_w4/plan.h: how mma_w4/kernel.cuh divides a product with 4-bit weights among blocks and warps. Host only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transformer/w4/common/product.h"
#include "transformer/w4/kernels.h"
#include "transformer/w4/round_x.h"

namespace fa::w4 {

constexpr int kMaxStages = 16;
constexpr int kStaticShared = 2048;      // bytes, at most, of shared memory beside the plan's: static arrays and the system's reserve
constexpr int kResidentNumbers = 16384;  // elements of x that a block keeps, at most: 32 per thread of 16 warps
constexpr int kWarpTiles = 4;            // adjacent row tiles of W that a warp multiplies, at most

// The template arguments of the kernel.
struct MmaShape {
    int token_tiles;  // tiles of 8 rows of x per block
    int warps;        // warps that multiply, beside the producers
};
FA_HOST_DEVICE constexpr int mma_warps(int token_tiles) { return token_tiles <= 2 ? 16 : 8; }
// Up to 16 rows of x: 16 warps, so that one warp turns weights into operands while another waits for its weights. On an H200 that work
// takes 60 % of the issue slots and keeps the product below the speed of memory. For more rows of x, 32 per block: 8 warps, so that the
// four tiles of a warp share each fragment of x, and the work on a weight serves 32 rows.
constexpr MmaShape mma_shape(int64_t rows) {
    const int token_tiles = rows <= 8 ? 1 : rows <= 16 ? 2 : 4;
    return {token_tiles, mma_warps(token_tiles)};
}

// How the work is divided, the same for all blocks.
struct MmaPlan {
    int32_t row_groups, column_groups;  // the warps of a block form a grid of row_groups x column_groups
    int32_t tiles;                      // row tiles per warp, at most kWarpTiles
    int32_t cluster;                    // blocks that share K
    int32_t clusters;                   // in the grid, per block of rows of x
    int32_t stages;
    bool resident;  // the block itself normalises, rounds and keeps x
    bool sm90;
};

struct MmaSizes {
    int stage_bytes, parts_at, x_at, bytes;  // sizes and offsets in shared memory
};

inline int rows_of_block(const W4LinearParams& p, const MmaShape& shape) { return int(std::min<int64_t>(p.rows, 8 * shape.token_tiles)); }

// Rows of x in a block, rounded up to a power of two.
inline int resident_rows(const W4LinearParams& p, const MmaShape& shape) {
    int rows = 1;
    while (rows < rows_of_block(p, shape)) rows *= 2;
    return rows;
}
// Whether the warps of a block have room for x: 32 elements per lane, read four at a time, with whole warps per row.
inline bool fits_resident(const W4LinearParams& p, const MmaShape& shape) {
    return shape.token_tiles == 1 && resident_rows(p, shape) * rounded_columns(p.in_features) <= kResidentNumbers && reads_by_fours(p);
}

inline MmaSizes mma_sizes(const W4LinearParams& p, const MmaShape& shape, const MmaPlan& plan) {
    const int rows = rows_of_block(p, shape), columns = int(column_tiles(p.in_features));
    MmaSizes sizes{};
    sizes.stage_bytes = plan.row_groups * plan.tiles * plan.column_groups * tile_bytes(p.format) +
                        (plan.resident ? 0 : rows * (plan.column_groups * 2 * kTileColumns + 16));
    sizes.parts_at = plan.stages * sizes.stage_bytes;
    sizes.x_at = sizes.parts_at + shape.warps * plan.tiles * shape.token_tiles * 512;
    sizes.bytes = sizes.x_at + (plan.resident ? rows * (int(ceil_div(columns, plan.cluster)) * 2 * kTileColumns + 16) : 0);
    return sizes;
}

// Measured on an H200. A thread can start only few copies in a given time, so warps share columns first, and rows only if a block has more
// tiles than its warps hold. The reads of x grow with a block's columns, its sums with its rows: two blocks that share K read half as much
// x each, and pay for it when they exchange sums. Clusters of four and eight were slower everywhere.
inline MmaPlan mma_plan(const W4LinearParams& p, const MmaShape& shape, const DeviceInfo& gpu) {
    const int places = int(std::max<int64_t>(1, gpu.multiprocessors / ceil_div(p.rows, 8 * shape.token_tiles)));
    const int row_tiles = used_row_tiles(p), columns = int(column_tiles(p.in_features));
    const auto tiles_of_block = [&](int cluster) { return int(ceil_div(row_tiles, std::max(1, places / cluster))); };
    const bool shares = shape.token_tiles == 1 ? tiles_of_block(1) <= 2 && columns >= 128 : tiles_of_block(1) <= 4 && columns >= 32;

    MmaPlan plan{};
    plan.sm90 = gpu.shared_memory > 200 * 1024;
    plan.resident = fits_resident(p, shape) && (!copies_x(p) || (p.rows == 1 && columns >= 64));
    plan.cluster = plan.sm90 && shares && tiles_of_block(2) <= 2 * kWarpTiles ? 2 : 1;  // so that a cluster needs only one pass
    plan.clusters = std::min(row_tiles, std::max(1, places / plan.cluster));
    const int tiles = int(ceil_div(row_tiles, plan.clusters));
    plan.row_groups = tiles > kWarpTiles ? 2 : 1, plan.column_groups = shape.warps / plan.row_groups;
    const int passes = int(ceil_div(tiles, plan.row_groups * kWarpTiles));
    plan.tiles = int(ceil_div(tiles, passes * plan.row_groups));

    const int turns = passes * int(ceil_div(ceil_div(columns, plan.cluster), plan.column_groups));
    plan.stages = std::max(2, std::min(turns, kMaxStages));
    while (mma_sizes(p, shape, plan).bytes > int(gpu.shared_memory) - kStaticShared) {
        if (plan.stages > 2) --plan.stages;
        else if (plan.tiles > 1) --plan.tiles;  // for GPUs with less shared memory than sm_90
        else if (plan.column_groups > 1) plan.row_groups *= 2, plan.column_groups /= 2;
        else break;
    }
    return plan;
}

}  // namespace fa::w4
