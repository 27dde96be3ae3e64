// gemv_w4_sm90.cuh: out = x W^T for a few rows of x, W in packed 4-bit weights, on Hopper. Bound by the memory W comes from.
//
//     product  mma.m16n8k16 with the weights as operand A and 8 rows of x as operand B's columns, as in mma_w4.cuh.
//     block    takes less than half of an SM if it can, and the grid has a block for each SM: a programmatic launch (ptx.cuh) starts beside
//              the launch before it and fills its rings while that one still works.
//     cluster  its blocks have the same rows of W and share K, so that a block's columns of x stay in shared memory.
//     warp     has units of the block, a few tiles of W beside each other, and a ring of its own, filled by bulk copies that its first lane
//              starts: no warp waits for another before the end. Interleaved, unit u is warp u % 16's, so that a block reads W in the order
//              of memory, which copies like best; else each warp has a run of units, row by row, which shares fewer row tiles.
//     sums     of a row tile that one warp has had in full go straight to where the tile is finished; those of a tile that several warps
//              share meet in shared memory first. The order is fixed, so results repeat bit for bit.
#pragma once

#include "device/cluster.cuh"
#include "device/ptx.cuh"
#include "linear/gemv_w4_plan.h"
#include "linear/w4.cuh"
#include "linear/w4_store.cuh"
#include "ops/elements.cuh"

namespace fa::w4 {

struct GemvLaunch {
    W4LinearParams p;
    GemvPlan plan;
    float per_feature;  // 1 / in_features
    bool copies_x;      // x goes to shared memory as it is
    bool by_fours;      // x and the norm's weight can be read by load_4
};

template <Format kFormat_, typename T_, int kChunk_, bool kInterleaved_>
struct GemvConfig {
    static constexpr Format kFormat = kFormat_;
    using T = T_;
    static constexpr int kChunk = kChunk_;  // tiles of a unit
    static constexpr bool kInterleaved = kInterleaved_;
    static constexpr int kWarps = kGemvWarps, kThreads = 32 * kWarps;
    static constexpr int kTile = tile_bytes(kFormat), kStage = kChunk * kTile;
    static constexpr bool kScaledSums = kFormat == Format::kInt4;  // a tile has one scale a row: cheaper, and exact
    static constexpr int kUnroll = kScaledSums ? 2 : kChunk;       // registers
};

// Beside the dynamic shared memory.
struct GemvStatic {
    uint64_t full[kGemvWarps][kGemvStages];  // barriers of the rings
    uint64_t inbox_full;                     // all blocks have delivered
    float squares[kGemvRows][kGemvWarps];    // sums over a warp's columns of x
    float row_squares[2][kGemvRows];         // over those of a block
    float scale[kGemvRows];                  // 1 / root mean square
};
static_assert(sizeof(GemvStatic) <= kGemvStatic);

template <typename Config>
struct GemvBlock {
    using T = typename Config::T;
    static constexpr Format kFormat = Config::kFormat;
    static constexpr int kChunk = Config::kChunk, kWarps = Config::kWarps, kThreads = Config::kThreads, kTile = Config::kTile,
                         kStage = Config::kStage;

    const GemvLaunch& launch;
    const W4LinearParams& p;
    const GemvPlan& plan;
    uint8_t* shared;  // x, parts, inbox, rings
    GemvStatic& fixed;
    int warp, lane, rank;
    int first_tile, tiles, first_column, columns, chunks;  // of the block

    __device__ __forceinline__ GemvBlock(const GemvLaunch& l, uint8_t* dynamic, GemvStatic& statics)
        : launch(l), p(l.p), plan(l.plan), shared(dynamic), fixed(statics), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        const int place = blockIdx.x / plan.cluster;
        rank = blockIdx.x % plan.cluster;
        first_tile = int(int64_t(plan.row_tiles) * place / plan.clusters);
        tiles = int(int64_t(plan.row_tiles) * (place + 1) / plan.clusters) - first_tile;
        first_column = plan.column_tiles * rank / plan.cluster;
        columns = plan.column_tiles * (rank + 1) / plan.cluster - first_column;
        chunks = (columns + kChunk - 1) / kChunk;
    }

    // Units in runs: where a warp's begins, and which warp has one.
    __device__ __forceinline__ int run_begin(int w) const { return tiles * chunks * w / kWarps; }
    __device__ __forceinline__ int warp_of(int unit) const { return ((unit + 1) * kWarps - 1) / (tiles * chunks); }

    // Sums of a tile that warp w has a part of: of its first tile in a place of their own, of its last in its ring, which is then done.
    __device__ __forceinline__ float4* part_of(int w, bool first) const {
        return reinterpret_cast<float4*>(shared + (first ? plan.parts_at + w * plan.slots * 16 : plan.ring_at + w * ring_bytes()));
    }
    // Interleaved: of a tile, every warp that has a chunk of it has a place.
    __device__ __forceinline__ int sharers() const { return min(chunks, kWarps); }
    __device__ __forceinline__ float4* share_of(int tile, int share) const {
        return reinterpret_cast<float4*>(shared + plan.parts_at) + (tile * sharers() + share) * plan.slots;
    }
    __device__ __forceinline__ int ring_bytes() const { return plan.stages * kStage; }
    // Of the tiles that a cluster shares this block finishes every plan.cluster'th.
    __device__ __forceinline__ int finished_tiles() const { return (tiles - rank + plan.cluster - 1) / plan.cluster; }

    // ---- x ----

    // fixed.scale of all rows, whose columns the blocks of the cluster share out.
    __device__ __forceinline__ void norm_scales() const {
        const int begin = first_column * kTileColumns, end = begin + columns * kTileColumns;
        for (int m = 0; m < p.rows; ++m) {
            float sum = 0.0f;
#pragma unroll 4
            for (int k = begin + 4 * threadIdx.x; k < end; k += 4 * kThreads) {
                const float4 x = load_up_to_4(p.x.data, m * p.x.row, p.dtype, k, p.in_features, launch.by_fours);
                sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
            }
            sum = warp_sum(sum);
            if (lane == 0) fixed.squares[m][warp] = sum;
        }
        __syncthreads();
        if (plan.cluster > 1) cluster_wait();  // all have begun
        if (threadIdx.x < p.rows) {
            float sum = 0.0f;
            for (int w = 0; w < kWarps; ++w) sum += fixed.squares[threadIdx.x][w];
            for (int to = 0; to < plan.cluster; ++to)
                store_cluster(cluster_address(shared_address(&fixed.row_squares[rank][threadIdx.x]), to), sum);
        }
        if (plan.cluster > 1) {
            __syncwarp();
            cluster_arrive_release();
            cluster_wait();
        } else {
            __syncthreads();
        }
        if (threadIdx.x < p.rows) {
            float sum = 0.0f;
            for (int from = 0; from < plan.cluster; ++from) sum += fixed.row_squares[from][threadIdx.x];
            fixed.scale[threadIdx.x] = rsqrtf(sum * launch.per_feature + p.eps);
        }
        __syncthreads();
    }

    // The block's columns of x to shared memory, zeros behind its last.
    __device__ __forceinline__ void stage_x() const {
        const int begin = first_column * kTileColumns;
        if (launch.copies_x) {
            const int pieces = columns * (kTileColumns / 8), all = int(p.rows) * pieces;
            const uint32_t to = shared_address(shared);
            for (int at = threadIdx.x; at < all; at += kThreads) {
                const int m = at / pieces, piece = at % pieces, k = begin + 8 * piece;
                const bool inside = k < p.in_features;
                cp_async_16(to + m * plan.x_stride + 16 * piece, static_cast<const T*>(p.x.data) + m * p.x.row + (inside ? k : 0),
                            inside ? 16 : 0);
            }
            cp_async_wait_all();
        } else {
            const int quads = columns * (kTileColumns / 4), all = int(p.rows) * quads;
#pragma unroll 4
            for (int at = threadIdx.x; at < all; at += kThreads) {
                const int m = at / quads, quad = at % quads, k = begin + 4 * quad;
                float4 x = load_up_to_4(p.x.data, m * p.x.row, p.dtype, k, p.in_features, launch.by_fours);
                if (p.norm_weight) {
                    const float4 g = load_up_to_4(p.norm_weight, 0, p.norm_dtype, k, p.in_features, launch.by_fours);
                    const float scale = fixed.scale[m];
                    x = make_float4(x.x * scale * g.x, x.y * scale * g.y, x.z * scale * g.z, x.w * scale * g.w);
                }
                *reinterpret_cast<uint2*>(shared + m * plan.x_stride + 8 * quad) = narrow_4<T>(x);
            }
        }
        __syncthreads();
    }

    // ---- the product ----

    // A tile of W times the same columns of x, the lane's of row g at x.
    __device__ __forceinline__ static void multiply(float (&sums)[1][4], const uint8_t* weights, const uint8_t* x, int lane) {
        uint4 columns[1][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) columns[0][half] = *reinterpret_cast<const uint4*>(x + 16 * half);
        multiply_tile<kFormat, T, Config::kScaledSums>(sums, weights, columns, lane);
    }

    // ---- the end ----

    // What the block has of a tile (from 0), slot g * pairs + pair: to where it is finished.
    __device__ __forceinline__ void deliver(int tile, int slot, float4 sum, float factor) const {
        if (plan.cluster == 1) {
            store_sums(p, 0, p.rows, first_tile + tile, slot / plan.pairs, slot % plan.pairs, sum, factor);
        } else {
            const uint32_t inbox =
                shared_address(shared) + plan.inbox_at + ((rank * plan.inbox_tiles + tile / plan.cluster) * plan.slots + slot) * 16;
            const uint32_t owner = tile % plan.cluster;
            store_async_16(cluster_address(inbox, owner), sum, cluster_address(shared_address(&fixed.inbox_full), owner));
        }
    }

    // Fills the warp's ring, waits for x, and multiplies.
    __device__ __forceinline__ void multiply_all(float factor) const {
        constexpr int kStep = Config::kInterleaved ? kWarps : 1;  // from a unit of the warp to its next
        const int begin = Config::kInterleaved ? warp : run_begin(warp), end = Config::kInterleaved ? tiles * chunks : run_begin(warp + 1);
        const int step_tiles = kStep / chunks, step_chunks = kStep % chunks;
        const int last_columns = columns - (chunks - 1) * kChunk;
        const uint32_t full = shared_address(fixed.full[warp]);
        uint8_t* const ring = shared + plan.ring_at + warp * ring_bytes();

        int ahead = begin, ahead_chunk = begin % chunks;  // the next unit to load
        const uint8_t* from = static_cast<const uint8_t*>(p.packed) + sizeof(PackedHeader) +
                              (int64_t(first_tile + begin / chunks) * plan.column_tiles + first_column + ahead_chunk * kChunk) * kTile;
        const int row_bytes = plan.column_tiles * kTile, step_bytes = step_tiles * row_bytes + step_chunks * kStage,
                  next_row = row_bytes - chunks * kStage;
        const auto load = [&](int stage) {
            if (ahead < end) {
                if (lane == 0) {
                    const uint32_t bytes = (ahead_chunk == chunks - 1 ? last_columns : kChunk) * kTile;
                    mbarrier_arrive_expect_tx(full + 8 * stage, bytes);
                    bulk_load(shared_address(ring) + stage * kStage, from, bytes, full + 8 * stage);
                }
                from += step_bytes, ahead_chunk += step_chunks, ahead += kStep;
                if (ahead_chunk >= chunks) ahead_chunk -= chunks, from += next_row;
            }
        };
        for (int stage = 0; stage < plan.stages; ++stage) load(stage);

        grid_dependency_wait();
        if (p.norm_weight) norm_scales();
        stage_x();
        if (plan.cluster > 1 && !p.norm_weight) cluster_wait();  // all have begun

        const int row = min(lane / 4, int(p.rows) - 1);  // sums of rows behind the last are not stored
        const uint8_t* const lane_x = shared + row * plan.x_stride + 32 * (lane % 4);
        int stage = 0, tile = begin / chunks, chunk = begin % chunks, first_chunk = chunk;
        const int own = tile;
        uint32_t phase = 0;
        float sums[1][4] = {};
#pragma unroll 1
        for (int unit = begin; unit < end; unit += kStep) {
            mbarrier_wait(full + 8 * stage, phase);
            const uint8_t *weights = ring + stage * kStage, *x = lane_x + chunk * (kChunk * 2 * kTileColumns);
            if (chunk < chunks - 1 || last_columns == kChunk) {
#pragma unroll(Config::kUnroll)
                for (int t = 0; t < kChunk; ++t) multiply(sums, weights + t * kTile, x + t * (2 * kTileColumns), lane);
            } else {
#pragma unroll 1
                for (int t = 0; t < last_columns; ++t) multiply(sums, weights + t * kTile, x + t * (2 * kTileColumns), lane);
            }
            __syncwarp();
            load(stage);
            if (++stage == plan.stages) stage = 0, phase ^= 1;
            const int done = tile;
            const bool whole = first_chunk == 0 && chunk == chunks - 1;
            chunk += step_chunks, tile += step_tiles;
            if (chunk >= chunks) chunk -= chunks, ++tile;
            if (tile == done && unit + kStep < end) continue;
            if (2 * (lane % 4) < p.rows) {
                const int slot = lane / 4 * plan.pairs + lane % 4;
                const float4 sum = make_float4(sums[0][0], sums[0][1], sums[0][2], sums[0][3]);
                if (Config::kInterleaved) share_of(done, first_chunk % kWarps)[slot] = sum;
                else if (whole) deliver(done, slot, sum, factor);
                else part_of(warp, done == own)[slot] = sum;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[0][e] = 0.0f;
            first_chunk = chunk;
        }
    }

    // Tiles that warps have shared, then those that blocks have.
    __device__ __forceinline__ void finish(float factor) const {
        __syncthreads();
        for (int s = threadIdx.x; s < tiles * plan.slots; s += kThreads) {
            const int tile = s / plan.slots, slot = s % plan.slots;
            float4 sum = make_float4(0, 0, 0, 0);
            const auto add = [&](const float4& part) { add_4(sum, part); };
            if constexpr (Config::kInterleaved) {
#pragma unroll 4
                for (int share = 0; share < sharers(); ++share) add(share_of(tile, share)[slot]);
            } else {
                const int unit = tile * chunks, from = warp_of(unit), to = warp_of(unit + chunks - 1);
                if (from == to) continue;
                for (int w = from; w <= to; ++w)
                    if (run_begin(w) < run_begin(w + 1)) add(part_of(w, tile == run_begin(w) / chunks)[slot]);
            }
            deliver(tile, slot, sum, factor);
        }
        if (plan.cluster == 1) return;
        mbarrier_wait_cluster(shared_address(&fixed.inbox_full), 0);
        const float4* const inbox = reinterpret_cast<const float4*>(shared + plan.inbox_at);
        const int mine = finished_tiles();
        for (int s = threadIdx.x; s < mine * plan.slots; s += kThreads) {
            const int tile = s / plan.slots * plan.cluster + rank, slot = s % plan.slots;
            float4 sum = make_float4(0, 0, 0, 0);
            for (int source = 0; source < plan.cluster; ++source) add_4(sum, inbox[source * plan.inbox_tiles * plan.slots + s]);
            store_sums(p, 0, p.rows, first_tile + tile, slot / plan.pairs, slot % plan.pairs, sum, factor);
        }
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 2) gemv_w4_sm90_kernel(const __grid_constant__ GemvLaunch launch) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ GemvStatic fixed;
    launch_dependents();
    const GemvBlock<Config> block(launch, dynamic, fixed);
    if (launch.plan.cluster > 1) {
        if (threadIdx.x == 0) {
            const uint32_t inbox_full = shared_address(&fixed.inbox_full);
            mbarrier_init(inbox_full, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(inbox_full, block.finished_tiles() * launch.plan.slots * launch.plan.cluster * 16);
        }
        __syncwarp();
        cluster_arrive();
    }
    if (block.lane == 0) {
        for (int i = 0; i < launch.plan.stages; ++i) mbarrier_init(shared_address(&fixed.full[block.warp][i]), 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    const float factor = static_cast<const PackedHeader*>(launch.p.packed)->factor;
    block.multiply_all(factor);
    block.finish(factor);
}

template <Format kFormat, typename T, int kChunk, bool kInterleaved>
cudaError_t launch_gemv(const W4LinearParams& p, const GemvPlan& plan, cudaStream_t stream) {
    using Config = GemvConfig<kFormat, T, kChunk, kInterleaved>;
    GemvLaunch launch{p, plan};
    launch.per_feature = 1.0f / float(p.in_features);
    launch.copies_x = reads_x(p);
    launch.by_fours = p.in_features % 4 == 0 && by_fours(p.x.data, p.rows > 1 ? p.x.row : 0, p.dtype) &&
                      (!p.norm_weight || by_fours(p.norm_weight, 0, p.norm_dtype));
    return launch_kernel(gemv_w4_sm90_kernel<Config>, unsigned(plan.clusters * plan.cluster), Config::kThreads, size_t(plan.bytes), stream,
                         launch, LaunchOptions{p.programmatic, unsigned(plan.cluster > 1 ? plan.cluster : 0)});
}

template <int kChunk, bool kInterleaved, typename T>
cudaError_t launch_gemv(const W4LinearParams& p, const GemvPlan& plan, cudaStream_t stream) {
    switch (p.format) {
        case Format::kNvfp4: return launch_gemv<Format::kNvfp4, T, kChunk, kInterleaved>(p, plan, stream);
        case Format::kMxfp4: return launch_gemv<Format::kMxfp4, T, kChunk, kInterleaved>(p, plan, stream);
        case Format::kInt4: return launch_gemv<Format::kInt4, T, kChunk, kInterleaved>(p, plan, stream);
    }
    return cudaErrorInvalidValue;
}
template <int kChunk, bool kInterleaved>
cudaError_t launch_gemv(const W4LinearParams& p, const GemvPlan& plan, cudaStream_t stream) {
    return p.compute_dtype == DType::kFloat16 ? launch_gemv<kChunk, kInterleaved, __half>(p, plan, stream)
                                              : launch_gemv<kChunk, kInterleaved, __nv_bfloat16>(p, plan, stream);
}

}  // namespace fa::w4
