// mma_w4/kernel.cuh: out = residual + act(norm(x) W^T + bias) for any number of rows of x and packed 4-bit weights, on tensor cores with
// asynchronous copies (sm_80; on sm_90 with bulk copies and clusters). Bound by reading W from memory and by widening W, which takes up to
// 60 % of the issue slots and is repeated for every block of rows of x.
//
//     product  mma.m16n8k16 with the weights as operand A and 8 rows of x as the columns of operand B. One row of x costs as much as 8.
//              Weights go from the packed word to the operand without an exchange between lanes (w4.cuh).
//     block    walks over its row tiles of W in passes, and in each pass over the columns of its share of K. In a pass its warps form a
//              grid of row_groups x column_groups: a warp has up to kWarpTiles adjacent row tiles, and takes one of every column_groups
//              column tiles.
//     ring     A stage holds one turn of all warps. Producer warps fill it: weights with one bulk copy per row tile, because the columns of
//              a row tile are contiguous, and x in pieces of 16 bytes. Starting a copy takes a thread about 60 clocks, so few long copies
//              are best. The ring has full and empty barriers and continues from pass to pass.
//     x        16-bit rows in natural order: a lane reads 32 bytes, the 16 columns of one row that its codes multiply. If x is small, a
//              block normalises and rounds all of it and keeps it (resident). Otherwise x comes through the ring. An x that is not 16-bit,
//              needs a norm or is not aligned then comes from the workspace (round_x.h).
//     sums     Warps that share rows add their sums in shared memory; the blocks of a cluster, which share K, through distributed shared
//              memory. The order is fixed, so results are bitwise reproducible.
//
// W does not depend on the kernel before this one: a programmatic launch (ptx.cuh) fills the ring before it waits for x.
#pragma once

#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/mbarrier_sm80.cuh"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/w4/common/w4.cuh"
#include "transformer/w4/common/w4_store.cuh"
#include "transformer/w4/mma_w4/plan.h"

namespace fa::w4 {

struct MmaLaunch {
    W4LinearParams p;
    MmaPlan plan;
    const uint8_t* x;  // 16-bit rows, if x is not resident
    int64_t x_row;     // bytes between rows
    int32_t x_bytes;   // bytes per row, a multiple of 16
    int32_t row_tiles, column_tiles;
    int32_t row_blocks;  // blocks along the rows of x
    int32_t stage_bytes, parts_at, x_at;
    float per_feature;      // 1 / in_features
    int32_t resident_rows;  // rows of x in a block, rounded up to a power of two
};

template <Format kFormat_, typename T_, int kTokenTiles_>
struct MmaConfig {
    static constexpr Format kFormat = kFormat_;
    using T = T_;
    static constexpr int kTokenTiles = kTokenTiles_;  // tiles of 8 rows of x
    static constexpr int kWarps = mma_warps(kTokenTiles);
    static constexpr int kProducers = 4, kThreads = 32 * (kWarps + kProducers);  // more than one producer warp costs no more registers
    static constexpr int kTile = tile_bytes(kFormat);
    static constexpr bool kScaledSums = kFormat == Format::kInt4 && kTokenTiles == 1;  // see multiply_tile
};

__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(barrier, parity);
#else
    mbarrier_spin(barrier, parity);
#endif
}

// The position of a pipeline: the turn of the block, and the stage and phase of the ring.
struct Turn {
    int row_tile, column_tile, stage;
    uint32_t phase;
};

template <typename Config>
struct MmaBlock {
    using T = typename Config::T;
    static constexpr int kTokenTiles = Config::kTokenTiles, kWarps = Config::kWarps, kTile = Config::kTile;
    static constexpr int kProducers = Config::kProducers;
    static constexpr Format kFormat = Config::kFormat;
#if __CUDA_ARCH__ >= 900
    static constexpr bool kCopiesArrive = false;  // weights come by bulk copies, which count bytes instead of arrivals
#else
    static constexpr bool kCopiesArrive = true;
#endif

    const MmaLaunch& launch;
    const W4LinearParams& p;
    const MmaPlan& plan;
    uint8_t* shared;
    float* squares_of;     // for each warp: the sum of squares of its part of x
    uint32_t full, empty;  // barriers
    int rows;              // rows of x in this block
    int first_tile, end_tile, first_column, end_column, pass_tiles, x_stride;

    __device__ __forceinline__ MmaBlock(const MmaLaunch& l, uint8_t* dynamic, float* warps, uint32_t full_barriers, uint32_t empty_barriers)
        : launch(l), p(l.p), plan(l.plan), shared(dynamic), squares_of(warps), full(full_barriers), empty(empty_barriers) {
        const int cluster = blockIdx.x / plan.cluster, place = cluster / launch.row_blocks;
        const int rank = this->rank();
        const int64_t left = p.rows - row0();
        rows = left < 8 * kTokenTiles ? int(left) : 8 * kTokenTiles;
        first_tile = int(int64_t(launch.row_tiles) * place / plan.clusters);
        end_tile = int(int64_t(launch.row_tiles) * (place + 1) / plan.clusters);
        first_column = launch.column_tiles * rank / plan.cluster, end_column = launch.column_tiles * (rank + 1) / plan.cluster;
        pass_tiles = plan.row_groups * plan.tiles;
        // + 16 avoids bank conflicts.
        x_stride = (plan.resident ? end_column - first_column : plan.column_groups) * (2 * kTileColumns) + 16;
    }

    // Opaque, so that they are computed where they are needed and occupy no registers in between.
    __device__ __forceinline__ int rank() const { return opaque(int(blockIdx.x)) % plan.cluster; }  // in the cluster
    __device__ __forceinline__ int64_t row0() const {                                               // of x
        return int64_t(opaque(int(blockIdx.x)) / plan.cluster % launch.row_blocks) * (8 * kTokenTiles);
    }

    __device__ __forceinline__ Turn first_turn() const { return {first_tile, first_column, 0, 0}; }
    __device__ __forceinline__ bool inside(const Turn& turn) const { return turn.row_tile < end_tile && first_column < end_column; }
    __device__ __forceinline__ void advance(Turn& turn) const {
        if (++turn.stage == plan.stages) turn.stage = 0, turn.phase ^= 1;
        turn.column_tile += plan.column_groups;
        if (turn.column_tile >= end_column) turn.column_tile = first_column, turn.row_tile += pass_tiles;
    }
    __device__ __forceinline__ uint32_t stage_at(int stage) const { return shared_address(shared) + stage * launch.stage_bytes; }

    // ---- the producer warps ----

    __device__ __forceinline__ void load_weights(const Turn& turn, int lane) const {
        const int columns = min(plan.column_groups, end_column - turn.column_tile), tiles = min(pass_tiles, end_tile - turn.row_tile);
        const uint32_t bytes = columns * kTile, stride = plan.column_groups * kTile;
        const int64_t row = int64_t(launch.column_tiles) * kTile;
        const uint8_t* from = static_cast<const uint8_t*>(p.packed) + sizeof(PackedHeader) + turn.row_tile * row + turn.column_tile * kTile;
        uint32_t to = stage_at(turn.stage);
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            mbarrier_arrive_expect_tx(full + 8 * turn.stage, tiles * bytes);
            for (int i = 0; i < tiles; ++i, from += row, to += stride) bulk_load(to, from, bytes, full + 8 * turn.stage);
        }
        __syncwarp();
#else
        for (int i = 0; i < tiles; ++i, from += row, to += stride)
            for (uint32_t at = 16 * lane; at < bytes; at += 512) cp_async_16(to + at, from + at, 16);
#endif
    }
    // Called by all producers: copies rows of x in pieces of 16 bytes; pieces past the end of a row are zeros.
    __device__ __forceinline__ void load_x(const Turn& turn, int warp, int lane) const {
        const int first = turn.column_tile * (2 * kTileColumns), in_row = plan.column_groups * (2 * kTileColumns);
        const uint32_t to = stage_at(turn.stage) + pass_tiles * plan.column_groups * kTile;
        for (int at = 16 * lane; at < in_row; at += 512) {
            const bool inside = first + at < launch.x_bytes;
            const uint8_t* from = launch.x + (row0() + warp) * launch.x_row + (inside ? first + at : 0);
#pragma unroll 4
            for (int m = warp; m < rows; m += kProducers, from += kProducers * launch.x_row)
                cp_async_16(to + m * x_stride + at, from, inside ? 16 : 0);
        }
    }
    __device__ __forceinline__ void produce() const {
        const int warp = threadIdx.x / 32 - kWarps, lane = threadIdx.x % 32;
        Turn turn = first_turn(), waiting = turn;
        if (warp == 0)
            for (int i = 0; i < plan.stages && inside(turn); ++i, advance(turn)) load_weights(turn, lane);
        grid_dependency_wait();
        if (plan.resident && warp > 0) return;
        int ahead = warp == 0 ? plan.stages : 0;  // stages whose weights have already been requested
        for (; inside(waiting); advance(waiting)) {
            if (ahead > 0) {
                --ahead;
            } else {
                wait_for(empty + 8 * waiting.stage, waiting.phase ^ 1);
                if (warp == 0) load_weights(waiting, lane);
            }
            if (!plan.resident) load_x(waiting, warp, lane);
            if (kCopiesArrive || !plan.resident) cp_async_mbarrier_arrive(full + 8 * waiting.stage);
        }
        cp_async_wait_all();
    }

    // ---- the warps that multiply ----

    __device__ __forceinline__ static void consumer_barrier() { bar_sync(1, 32 * kWarps); }

    // Prepares a resident x. Warps divide the rows; a lane keeps its elements in registers between the sum of squares and the norm.
    __device__ __forceinline__ void stage_x() const {
        constexpr int kKept = kResidentNumbers / (128 * kWarps);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_warps = kWarps / launch.resident_rows, part = warp % row_warps,
                  m = warp / row_warps, begin = 4 * (32 * part + lane), step = 4 * 32 * row_warps;
        const auto load = [&](float4(&to)[kKept], const void* data, int64_t at, DType dtype) {
            with_element(dtype, [&](auto zero) {
#pragma unroll
                for (int i = 0; i < kKept; ++i) {
                    const int k = begin + i * step;
                    to[i] = k < p.in_features ? load_4<decltype(zero)>(data, at + k) : make_float4(0, 0, 0, 0);
                }
            });
        };
        float4 x[kKept], g[kKept];
        if (p.norm_weight) load(g, p.norm_weight, 0, p.norm_dtype);
        grid_dependency_wait();
        load(x, p.x.data, (row0() + min(m, rows - 1)) * p.x.row, p.dtype);
        if (p.norm_weight) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kKept; ++i) sum += sum_of_squares(x[i]);
            sum = warp_sum(sum);
            if (lane == 0) squares_of[warp] = sum;
            consumer_barrier();
            sum = 0.0f;
#pragma unroll 4
            for (int i = 0; i < row_warps; ++i) sum += squares_of[m * row_warps + i];
            const float scale = rsqrtf(sum * launch.per_feature + p.eps);
#pragma unroll
            for (int i = 0; i < kKept; ++i) x[i] = norm_4(x[i], scale, g[i]);
        }
        const int first = first_column * kTileColumns, end = end_column * kTileColumns;
#pragma unroll
        for (int i = 0; i < kKept; ++i)
            if (const int k = begin + i * step; m < rows && k >= first && k < end)
                *reinterpret_cast<uint2*>(shared + launch.x_at + m * x_stride + 2 * (k - first)) = narrow_4<T>(x[i]);
        consumer_barrier();
    }

    // Multiplies kTiles tiles of W, `row_bytes` apart, by the same columns of x. The lane's columns of row 8 n + g start at x + x_rows[n].
    template <int kTiles>
    __device__ __forceinline__ static void multiply(float (&sums)[kWarpTiles][kTokenTiles][4], const uint8_t* weights, int row_bytes,
                                                    const uint8_t* x, const int (&x_rows)[kTokenTiles], int lane) {
        uint4 columns[kTokenTiles][2];  // of row g: for steps 0 and 1, and for steps 2 and 3
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) columns[n][half] = *reinterpret_cast<const uint4*>(x + x_rows[n] + 16 * half);
#pragma unroll
        for (int r = 0; r < kTiles; ++r, weights += row_bytes) {
            multiply_tile<kFormat, T, Config::kScaledSums>(sums[r], weights, columns, lane);
            if (Config::kScaledSums) __syncwarp();  // delays the next tile's loads, for which there are no registers yet
        }
    }

    // Stores the sums of a lane: rows g and g + 8 of a tile, two rows of x.
    __device__ __forceinline__ void store(int tile, int n, int lane, float4 sum, float factor) const {
        store_sums(p, row0(), rows, tile, lane / 4, 4 * n + lane % 4, sum, factor);
    }

    __device__ __forceinline__ void consume() const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_group = warp / plan.column_groups,
                  column_group = warp % plan.column_groups, row_bytes = plan.column_groups * kTile;
        if (threadIdx.x == 0) prefetch_l2(p.packed);
        const bool resident = kTokenTiles == 1 && plan.resident;
        if (resident) stage_x();
        else grid_dependency_wait();
        float4* const parts = reinterpret_cast<float4*>(shared + launch.parts_at);  // (warps, plan.tiles, kTokenTiles, lanes)

        const uint8_t* const lane_weights = shared + row_group * plan.tiles * row_bytes + column_group * kTile;
        const uint8_t* const lane_x =
            shared + (resident ? launch.x_at : pass_tiles * row_bytes) + column_group * (2 * kTileColumns) + 32 * (lane % 4);
        const int x_column = resident ? 2 * kTileColumns : 0, x_stage = resident ? 0 : launch.stage_bytes;
        int x_rows[kTokenTiles];
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)  // past the last row: the last row again, whose sums are not stored
            x_rows[n] = min(8 * n + lane / 4, rows - 1) * x_stride;

        int stage = 0;
        uint32_t phase = 0;
        for (int tile = first_tile; tile < end_tile; tile += pass_tiles) {
            const int mine = min(end_tile - tile - row_group * plan.tiles, plan.tiles);
            float sums[kWarpTiles][kTokenTiles][4] = {};
#pragma unroll 1
            for (int column = first_column; column < end_column; column += plan.column_groups) {
                wait_for(full + 8 * stage, phase);
                if (column + column_group < end_column) {
                    const uint8_t *weights = lane_weights + stage * launch.stage_bytes,
                                  *x = lane_x + stage * x_stage + (column - first_column) * x_column;
                    static_assert(kWarpTiles == 4, "multiply is compiled for one to four tiles");
                    if (mine >= 4) multiply<4>(sums, weights, row_bytes, x, x_rows, lane);
                    else if (mine == 3) multiply<3>(sums, weights, row_bytes, x, x_rows, lane);
                    else if (mine == 2) multiply<2>(sums, weights, row_bytes, x, x_rows, lane);
                    else if (mine == 1) multiply<1>(sums, weights, row_bytes, x, x_rows, lane);
                }
                __syncwarp();
                if (arrives(lane)) mbarrier_arrive(empty + 8 * stage);
                if (++stage == plan.stages) stage = 0, phase ^= 1;
            }

            const float factor = *opaque(
                &static_cast<const PackedHeader*>(p.packed)->factor);  // read here, so that it arrives while the warps exchange sums
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
                if (8 * n + 2 * (lane % 4) < rows)
#pragma unroll
                    for (int r = 0; r < kWarpTiles; ++r)
                        if (r < mine)
                            parts[((warp * plan.tiles + r) * kTokenTiles + n) * 32 + lane] =
                                make_float4(sums[r][n][0], sums[r][n][1], sums[r][n][2], sums[r][n][3]);
            consumer_barrier();
            // Slot s of a pass counts tiles (slowest), tiles of 8 rows of x, and lanes (fastest).
            const int slots = min(pass_tiles, end_tile - tile) * kTokenTiles * 32;
            const auto slot_of = [&](int s) {
                const int i = s / (32 * kTokenTiles), group = i / plan.tiles * plan.column_groups;
                return parts + (group * plan.tiles + i % plan.tiles) * kTokenTiles * 32 + s % (32 * kTokenTiles);
            };
            const auto wanted = [&](int s) { return s / 32 % kTokenTiles * 8 + 2 * (s % 4) < rows; };
            for (int s = threadIdx.x; s < slots; s += 32 * kWarps) {
                if (!wanted(s)) continue;
                float4* from = slot_of(s);
                float4 sum = *from;
#pragma unroll 4
                for (int other = 1; other < plan.column_groups; ++other) add_4(sum, from[other * plan.tiles * kTokenTiles * 32]);
                if (plan.cluster > 1) *from = sum;
                else store(tile + s / (32 * kTokenTiles), s / 32 % kTokenTiles, s % 32, sum, factor);
            }
            if (plan.cluster > 1) {  // the host's plan then has one pass
                __syncwarp();
                cluster_arrive_release();
                cluster_wait();
                for (int s = threadIdx.x + rank() * 32 * kWarps; s < slots; s += plan.cluster * 32 * kWarps) {
                    if (!wanted(s)) continue;
                    const uint32_t from = shared_address(slot_of(s));
                    float4 sum = make_float4(0, 0, 0, 0);
                    for (int other = 0; other < plan.cluster; ++other) add_4(sum, load_cluster_16(cluster_address(from, other)));
                    store(tile + s / (32 * kTokenTiles), s / 32 % kTokenTiles, s % 32, sum, factor);
                }
                __syncwarp();
                cluster_arrive_release();
                cluster_wait();  // a block's shared memory must stay until the other blocks have read it
            } else if (tile + pass_tiles < end_tile) {
                consumer_barrier();  // all parts have been read: the next pass may overwrite them
            }
        }
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) mma_w4_kernel(const __grid_constant__ MmaLaunch launch) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
    __shared__ float squares_of[Config::kWarps];
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < launch.plan.stages; ++i) {
            // Arrivals per stage: one that announces the bulk copies, and one per producer thread for the copies of x. Before sm_90 the
            // first producer warp also copies the weights, so it always arrives.
            const int announcements = MmaBlock<Config>::kCopiesArrive ? 0 : 1,
                      copiers = launch.plan.resident ? 1 - announcements : Config::kProducers;
            mbarrier_init(shared_address(full + i), announcements + 32 * copiers);
            mbarrier_init(shared_address(empty + i), Config::kWarps * kWarpArrivals);
        }
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
    __syncthreads();
    launch_dependents();
    const MmaBlock<Config> block(launch, dynamic, squares_of, shared_address(full), shared_address(empty));
    if (warp >= Config::kWarps) {
        block.produce();
        __syncwarp();
        for (int i = 0; launch.plan.cluster > 1 && i < 2; ++i) {  // matches the two cluster barriers of the other warps
            cluster_arrive_release();
            cluster_wait();
        }
    } else {
        block.consume();
    }
}

template <Format kFormat, typename T, int kTokenTiles>
cudaError_t launch_mma(const W4LinearParams& p, const MmaPlan& plan, cudaStream_t stream) {
    using Config = MmaConfig<kFormat, T, kTokenTiles>;
    constexpr MmaShape kShape{kTokenTiles, Config::kWarps};
    const MmaSizes sizes = mma_sizes(p, kShape, plan);
    MmaLaunch launch{p, plan};
    bool programmatic = p.programmatic;
    if (!plan.resident && copies_x(p)) {
        launch.x = static_cast<const uint8_t*>(p.x.data), launch.x_row = 2 * p.x.row, launch.x_bytes = 2 * p.in_features;
    } else if (!plan.resident) {
        if (const cudaError_t error = round_x(p, p.workspace, stream)) return error;
        launch.x = static_cast<const uint8_t*>(p.workspace), launch.x_row = 2 * rounded_columns(p.in_features);
        launch.x_bytes = int(launch.x_row);
        programmatic = plan.sm90;  // it overlaps round_x, which has itself waited for the previous kernel
    }
    launch.row_tiles = used_row_tiles(p), launch.column_tiles = int(column_tiles(p.in_features));
    launch.row_blocks = int(ceil_div(p.rows, 8 * kTokenTiles));
    launch.stage_bytes = sizes.stage_bytes, launch.parts_at = sizes.parts_at, launch.x_at = sizes.x_at;
    launch.per_feature = 1.0f / float(p.in_features);
    launch.resident_rows = resident_rows(p, kShape);
    LaunchOptions options;
    options.programmatic = programmatic, options.cluster = unsigned(plan.cluster);
    return launch_kernel(mma_w4_kernel<Config>, unsigned(plan.clusters * plan.cluster) * unsigned(launch.row_blocks), Config::kThreads,
                         size_t(sizes.bytes), stream, launch, options);
}

}  // namespace fa::w4
