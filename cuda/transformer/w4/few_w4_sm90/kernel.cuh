// few_w4_sm90/kernel.cuh: out = residual + act(x W^T + bias) for up to 32 rows of x and packed 4-bit weights, on Hopper. New against
// mma_w4: each warp has its own ring, so no warp waits for another warp's weights, and TMA loads x.
//
//     product  mma.m16n8k16 with the weights as operand A and 8 rows of x as the columns of operand B, as in mma_w4/kernel.cuh.
//     cluster  Its two blocks have the same row tiles of W and divide K, so that each reads half of x.
//     warp     has one row tile, and all columns of the block or, if there are more warps than tiles, a share of them.
//     weights  come to the ring of the warp, four column tiles per copy, issued by the warp's first lane. The warp moves them to
//              registers and starts the next copy before it multiplies.
//     x        comes to a ring of the block by TMA, in boxes of four column tiles of all rows, issued by a separate warp. The first
//              product waits for the first box only.
//     sums     All warps and blocks that share a row tile send their sums to the block that finishes the tile. The sums overwrite the rings
//              once all blocks have read them. They are added in a fixed order, so results are bitwise reproducible.
//
// A programmatic launch (ptx.cuh) starts its copies of weights before it waits for x. It lets the next launch start when a warp has issued
// its last copy, so that the next launch's copies queue after it. few_w4_sm90/plan.h says when a block takes half of an SM.
//
// Bound, on an H200, by latency and by widening. The path from x to the first product, plus the path from the last product to the next
// launch's x, takes 4 us. Widening takes as long as reading the weights from memory, so weights in L2 are no faster.
#pragma once

#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "device/tensor_map.h"
#include "transformer/w4/common/w4.cuh"
#include "transformer/w4/common/w4_store.cuh"
#include "transformer/w4/few_w4_sm90/plan.h"
#include "transformer/w4/round_x.h"

namespace fa::w4 {

struct FewLaunch {
    CUtensorMap map_x;  // boxes of kTokens rows x kFewChunk column tiles
    W4LinearParams p;
    FewPlan plan;
};

template <Format kFormat_, typename T_, int kTokenTiles_>
struct FewConfig {
    static constexpr Format kFormat = kFormat_;
    using T = T_;
    static constexpr int kTokenTiles = kTokenTiles_, kTokens = 8 * kTokenTiles;            // rows of x
    static constexpr int kXTile = kTokens * 2 * kTileColumns, kXBox = kFewChunk * kXTile;  // bytes
    static constexpr int kHeld = kTokenTiles <= 2 ? kFewChunk : kFewChunk / 2;             // column tiles that a warp holds in registers
    static constexpr int kTile = tile_bytes(kFormat), kStage = kFewChunk * kTile;
    static constexpr int kThreads = 32 * (few_warps(kTokens) + 1);                     // one more warp loads x
    static constexpr bool kScaledSums = kFormat == Format::kInt4 && kTokenTiles == 1;  // see multiply_tile
};

// Static shared memory: barriers.
struct FewStatic {
    uint64_t full[kFewWarps][kFewStages];            // of the weight rings, one per warp
    uint64_t x_full[kFewSlots], x_empty[kFewSlots];  // of the ring of x
    uint64_t inbox_full;                             // all sums have arrived
};
static_assert(sizeof(FewStatic) <= kFewStatic);

// One thread loads the chunks of x that the block's warps multiply, step by step.
template <typename Config>
__device__ __forceinline__ void load_x(const FewLaunch& launch, const uint8_t* shared, uint32_t x_full, uint32_t x_empty, int first_column,
                                       int steps) {
    const FewPlan& plan = launch.plan;
    constexpr int kXBox = Config::kXBox;
    int slot = 0;
    uint32_t phase = 0;
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(x_empty + 8 * slot, phase ^ 1);
        mbarrier_arrive_expect_tx(x_full + 8 * slot, plan.groups * kXBox);
        for (int i = 0; i < plan.groups; ++i)  // columns past K arrive as zeros
            tma_load(shared_address(shared) + (slot * plan.groups + i) * kXBox, &launch.map_x, x_full + 8 * slot, 0, 0,
                     first_column + i * plan.group_columns + step * kFewChunk, 0, 0);
        if (++slot == plan.x_slots) slot = 0, phase ^= 1;
    }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 2) few_w4_kernel(const __grid_constant__ FewLaunch launch) {
    using T = typename Config::T;
    constexpr Format kFormat = Config::kFormat;
    constexpr int kTokenTiles = Config::kTokenTiles, kTile = Config::kTile, kStage = Config::kStage, kXTile = Config::kXTile,
                  kXBox = Config::kXBox, kHeld = Config::kHeld;
    extern __shared__ __align__(1024) uint8_t shared[];  // the ring of x and the rings of weights; at the end the inbox of sums
    __shared__ FewStatic fixed;
    const W4LinearParams& p = launch.p;
    const FewPlan& plan = launch.plan;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rows = int(p.rows);

    // The block's part of W: the row tiles of its cluster, and its share of the column tiles.
    const int place = blockIdx.x / plan.cluster, rank = blockIdx.x % plan.cluster;
    const int first_tile = int(int64_t(plan.row_tiles) * place / plan.clusters);
    const int tiles = int(int64_t(plan.row_tiles) * (place + 1) / plan.clusters) - first_tile;
    const int first_column = plan.column_tiles * rank / plan.cluster;
    const int columns = plan.column_tiles * (rank + 1) / plan.cluster - first_column;
    const int steps = (plan.group_columns + kFewChunk - 1) / kFewChunk;
    const int finished = (tiles - rank + plan.cluster - 1) / plan.cluster;  // row tiles that this block finishes: every plan.cluster-th
    const int parts = plan.cluster * plan.groups;                           // warps of the cluster that have sums of one row tile
    // The row tile of the warp, and its share of the columns.
    const int tile = warp / plan.groups, group = warp % plan.groups;
    const bool multiplies = warp < plan.warps && tile < tiles;

    const uint32_t x_full = shared_address(fixed.x_full), x_empty = shared_address(fixed.x_empty),
                   inbox_full = shared_address(&fixed.inbox_full);
    if (threadIdx.x == 0) {
        for (int i = 0; i < plan.x_slots; ++i)
            mbarrier_init(x_full + 8 * i, 1), mbarrier_init(x_empty + 8 * i, tiles * plan.groups * kWarpArrivals);
        mbarrier_init(inbox_full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(inbox_full, finished * parts * plan.slots * 16);
    }
    const float factor = static_cast<const PackedHeader*>(p.packed)->factor;
    float sums[kTokenTiles][4] = {};

    if (multiplies) {
        const int begin = group * plan.group_columns, end = min(begin + plan.group_columns, columns);  // column tiles of the block
        const uint32_t full = shared_address(fixed.full[warp]);
        if (lane == 0) {
            for (int i = 0; i < plan.stages; ++i) mbarrier_init(full + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
        const uint8_t* const ring = shared + plan.ring_at + warp * plan.stages * kStage;
        const uint8_t* from = static_cast<const uint8_t*>(p.packed) + sizeof(PackedHeader) +
                              (int64_t(first_tile + tile) * plan.column_tiles + first_column + begin) * kTile;
        int ahead = begin;  // the next column tile to load
        const auto load = [&](int stage) {
            if (ahead >= end) return;
            if (lane == 0) {
                const uint32_t bytes = min(kFewChunk, end - ahead) * kTile;
                mbarrier_arrive_expect_tx(full + 8 * stage, bytes);
                bulk_load(shared_address(ring) + stage * kStage, from, bytes, full + 8 * stage);
            }
            from += kStage, ahead += kFewChunk;
            if (ahead >= end) launch_dependents();
        };
        for (int i = 0; i < plan.early; ++i) load(i);
        __syncthreads();
        grid_dependency_wait();

        const int g = lane / 4, q = lane % 4;
        const uint8_t* lane_x[2];  // row g at the columns of steps 0 and 1, and of steps 2 and 3, in TMA's swizzle
#pragma unroll
        for (int half = 0; half < 2; ++half) lane_x[half] = shared + group * kXBox + g * 128 + (((2 * q + half) ^ g) << 4);
        int stage = 0, slot = 0;
        uint32_t phase = 0, x_phase = 0;
        mbarrier_wait(x_full, 0);
        for (int i = plan.early; i < plan.stages; ++i) load(i);
#pragma unroll 1
        for (int column = begin, step = 0; step < steps; ++step, column += kFewChunk) {
            if (column < end) mbarrier_wait(full + 8 * stage, phase);
            const uint8_t* const weights = ring + stage * kStage;
            const int x_at = slot * (plan.groups * kXBox);
#pragma unroll
            for (int first = 0; first < kFewChunk; first += kHeld) {
                uint4 codes[kHeld];
                uint32_t scales[kHeld];
#pragma unroll
                for (int t = 0; t < kHeld; ++t)  // tiles past the last one are loaded but not used
                    codes[t] = load_codes(weights + (first + t) * kTile, lane),
                    scales[t] = load_scales<kFormat>(weights + (first + t) * kTile, lane);
                if (first + kHeld == kFewChunk) {
                    __syncwarp();
                    load(stage);
                }
                if (first == 0) mbarrier_wait(x_full + 8 * slot, x_phase);
#pragma unroll
                for (int t = 0; t < kHeld; ++t) {
                    if (column + first + t >= end) break;
                    uint4 x[kTokenTiles][2];  // rows past the last one are zeros
#pragma unroll
                    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            x[n][half] = *reinterpret_cast<const uint4*>(lane_x[half] + x_at + (first + t) * kXTile + n * 1024);
                    multiply_tile<kFormat, T, Config::kScaledSums>(sums, codes[t], scales[t], x);
                }
            }
            if (column < end && ++stage == plan.stages) stage = 0, phase ^= 1;
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(x_empty + 8 * slot);
            if (++slot == plan.x_slots) slot = 0, x_phase ^= 1;
        }
    } else {
        const bool loads = warp == plan.warps && lane == 0;
        if (loads) prefetch_tensormap(&launch.map_x);
        __syncthreads();
        grid_dependency_wait();
        if (loads) load_x<Config>(launch, shared, x_full, x_empty, first_column, steps);
        __syncwarp();
    }

    // Sends sums to the block that finishes their row tile, as (its tiles, parts, slots). They overwrite the rings, which all
    // blocks have read.
    if (plan.cluster > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (multiplies) {
        const int owner = tile % plan.cluster;
        const int to = (tile / plan.cluster * parts + rank * plan.groups + group) * plan.slots * 16;
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
            const int pair = 4 * n + lane % 4, at = to + (8 * pair + lane / 4) * 16;
            if (pair >= plan.pairs) continue;
            const float4 sum = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
            if (plan.cluster > 1)
                store_async_16(cluster_address(shared_address(shared) + at, owner), sum, cluster_address(inbox_full, owner));
            else *reinterpret_cast<float4*>(shared + at) = sum;
        }
    }
    if (plan.cluster > 1) mbarrier_wait_cluster(inbox_full, 0);
    else __syncthreads();
    const float4* const inbox = reinterpret_cast<const float4*>(shared);
    for (int s = threadIdx.x; s < finished * plan.slots; s += blockDim.x) {
        const int i = s / plan.slots, slot = s % plan.slots;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int part = 0; part < parts; ++part) add_4(sum, inbox[(i * parts + part) * plan.slots + slot]);
        store_sums(p, 0, rows, first_tile + i * plan.cluster + rank, slot % 8, slot / 8, sum, factor);
    }
}

template <Format kFormat, typename T, int kTokenTiles>
cudaError_t launch_few(const W4LinearParams& p, const FewPlan& plan, cudaStream_t stream) {
    using Config = FewConfig<kFormat, T, kTokenTiles>;
    FewLaunch launch{{}, p, plan};
    const bool direct = few_reads_x(p);
    if (!direct)
        if (const cudaError_t error = round_x(p, p.workspace, stream)) return error;
    TensorTiles x{};
    x.name = "x", x.data = direct ? p.x.data : p.workspace, x.half = std::is_same_v<T, __half>;
    x.columns = rounded_columns(p.in_features), x.rows = p.rows, x.heads = x.batch = 1;
    x.row_stride = 2 * (direct ? p.x.row : x.columns);
    x.box_rows = Config::kTokens, x.box_chunks = kFewChunk;
    int loads;
    if (const cudaError_t error = encode_tiles(x, &launch.map_x, &loads)) return error;
    LaunchOptions options;
    options.programmatic = !direct || p.programmatic, options.cluster = unsigned(plan.cluster > 1 ? plan.cluster : 0);
    return launch_kernel(few_w4_kernel<Config>, unsigned(plan.clusters * plan.cluster), unsigned(32 * (plan.warps + 1)), size_t(plan.bytes),
                         stream, launch, options);
}

}  // namespace fa::w4
