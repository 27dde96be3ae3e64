// chain_w4_sm90.cu: products with packed 4-bit weights one behind the other in one launch, for a few rows of x, on Hopper. What is new
// against gemv_w4_sm90: memory goes on bringing weights while the outputs of one product become x of the next. Bound by the bit operations
// that unpack weights, and by what lies between two products: 3 to 4 us.
//
//     grid     one block on each SM, all there at once (a cooperative launch): behind each product but the last they wait for each other.
//     ring     a producer warp fills it by bulk copies and runs on into the next product's weights, which depend on nothing. A stage is a
//              turn of the other warps, a unit for each: a few tiles of W beside each other. A block's units lie one behind the other.
//     product  mma.m16n8k16 with the weights as operand A and 8 rows of x as operand B's columns, as in gemv_w4_sm90. x is resident.
//     sums     of a row tile that several warps share meet in shared memory. The order is fixed, so results repeat bit for bit.
//     SM       a block leaves room for one of decode_lanes.cuh, the attention that follows in a decoder: this has started, and has its
//              first keys, when the chain ends.
#include <algorithm>
#include <cstdio>

#include "device/grid.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "linear/kernels.h"
#include "linear/mma_w4_plan.h"
#include "linear/w4.cuh"
#include "ops/elements.cuh"

namespace fa {
namespace w4 {
namespace {

constexpr int kChainRows = 8, kChainWarps = 16, kConsumers = 32 * kChainWarps;  // beside the producer warp
constexpr int kChunk = 4;                                                       // tiles of a unit, at most
constexpr int kCopy = 9216;                                                     // bytes of a copy, at most
constexpr int kNormed = 16384;  // numbers of x that a block keeps in registers between the sum of their squares and their norm
// Measured on an H200, in a decoder of 7B. What is read or written while copies fill memory's queues waits behind them: x, and the fence
// in front of a barrier. So the ring is no larger than it has to be (5 stages: 2 us a layer slower), one stage is filled before the first x
// is there, two before the block has arrived at a barrier (0.5 us), and of the next launch's weights no more is brought to L2 than pays.
constexpr int kChainStages = 3, kEarly = 1, kHeld = 2;
constexpr int kPiece = 4096, kLaterBytes = 9 << 20;
// The bound of the launch, which says how many registers a thread may have: as if a block had 896 threads, 72. A quarter of a
// multiprocessor has 512 for each of 32 lanes, and of 17 warps 5; two warps of decode_lanes.cuh then find room beside them. Measured on an
// H200: 1.5 us a layer. int4 would spill.
constexpr int chain_bound(Format format) { return format == Format::kInt4 ? kConsumers + 32 : 896; }

// A product and how it is cut.
struct ChainProduct {
    W4LinearParams p;
    int32_t column_tiles;             // of W
    int32_t chunk, chunks;            // tiles of a unit, beside each other; units of a row tile
    int32_t tiles, more;              // row tiles of a block; the first `more` blocks have one more
    int32_t step_tiles, step_chunks;  // from a warp's unit to its next
    int32_t x_stride;                 // bytes of a row of x in shared memory
    float per_feature;                // 1 / in_features
    bool copies_x, by_fours;          // x goes to shared memory as it is; x can be read by load_4, with a norm it always can
};

struct ChainLaunch {
    ChainProduct products[W4ChainParams::kMost];
    int32_t count, rows;
    int32_t pair_bits;                 // 2^pair_bits pairs of rows of x; a lane (g, pair) has four sums of a row tile
    int32_t norm_rows;                 // rows, rounded up to a power of two
    int32_t stages;                    // of the ring; 0: too few fit
    int32_t parts_at, ring_at, bytes;  // of shared memory; x is at 0
    // Of what the next launch reads, pieces to be brought to L2 behind the last weights.
    const uint8_t* later[W4ChainParams::kMostAhead];
    int32_t later_pieces[W4ChainParams::kMostAhead];
};

// Beside the dynamic shared memory.
struct ChainStatic {
    uint64_t full[kChainStages], empty[kChainStages];  // barriers of the ring
    uint64_t proceeds;                                 // the first x is there; the block has arrived at the next barrier of the grid
    float squares[kChainWarps];                        // sums over a warp's numbers of x
    float factor[W4ChainParams::kMost];                // of the packed weights
    ChainProduct products[W4ChainParams::kMost];       // the launch's: constants that are read for the first time take long to come
};

template <Format kFormat, typename T>
struct ChainBlock {
    static constexpr int kTile = tile_bytes(kFormat);
    static constexpr bool kScaledSums = kFormat == Format::kInt4;  // a tile has one scale a row: cheaper, and exact
    static constexpr int kUnroll = kScaledSums ? 2 : kChunk;       // registers
    static constexpr int kStageBytes = kChainWarps * kChunk * kTile;

    const ChainLaunch& launch;
    uint8_t* shared;  // x, parts, ring
    ChainStatic& fixed;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ __forceinline__ ChainBlock(const ChainLaunch& l, uint8_t* dynamic, ChainStatic& statics)
        : launch(l), shared(dynamic), fixed(statics) {}

    __device__ __forceinline__ static int tiles_of(const ChainProduct& c) { return c.tiles + (int(blockIdx.x) < c.more); }
    __device__ __forceinline__ static int first_tile(const ChainProduct& c) {
        return int(blockIdx.x) * c.tiles + min(int(blockIdx.x), c.more);
    }
    __device__ __forceinline__ uint32_t full(int stage) const { return shared_address(&fixed.full[stage]); }
    __device__ __forceinline__ uint32_t empty(int stage) const { return shared_address(&fixed.empty[stage]); }
    // Of the warps that multiply.
    __device__ __forceinline__ static void consumer_barrier() { bar_sync(1, kConsumers); }

    // ---- the producer warp ----

    // A block's units of a product lie one behind the other: a stage is a turn of all warps, in one piece.
    __device__ __forceinline__ void produce() const {
        int stage = 0;
        uint32_t phase = 1;
#pragma unroll 1
        for (int i = 0; i < launch.count; ++i) {
            const ChainProduct& c = fixed.products[i];
            const int64_t row = int64_t(c.column_tiles) * kTile;
            const uint8_t* from = static_cast<const uint8_t*>(c.p.packed) + sizeof(PackedHeader) + first_tile(c) * row;
            const uint8_t* const end = from + tiles_of(c) * row;
            const int turn = kChainWarps * c.chunk * kTile;
            int early = i == 0 ? kEarly : kHeld;
            for (; from < end; from += turn) {
                mbarrier_wait(empty(stage), phase);
                if (early-- == 0) mbarrier_wait(shared_address(&fixed.proceeds), i & 1);
                if (lane == 0) {
                    const uint32_t bytes = uint32_t(min(int64_t(turn), int64_t(end - from))), to = stage * kStageBytes;
                    mbarrier_arrive_expect_tx(full(stage), bytes);
                    for (uint32_t at = 0; at < bytes; at += kCopy)  // read once: they leave L2 before x, the keys and the kernels' code
                        bulk_load(shared_address(shared) + launch.ring_at + to + at, from + at, min(bytes - at, uint32_t(kCopy)),
                                  full(stage), kEvictFirst);
                }
                __syncwarp();
                if (++stage == launch.stages) stage = 0, phase ^= 1;
            }
        }
        for (int i = 0; i < W4ChainParams::kMostAhead; ++i)
            for (int piece = 32 * blockIdx.x + lane; piece < launch.later_pieces[i]; piece += 32 * gridDim.x)
                bulk_prefetch(launch.later[i] + int64_t(piece) * kPiece, kPiece);
    }

    // ---- x ----

    __device__ __forceinline__ void store_x(const ChainProduct& c, int m, int k, float4 x) const {
        *reinterpret_cast<uint2*>(shared + m * c.x_stride + 2 * k) = narrow_4<T>(x);
    }

    // x of a product to shared memory, zeros behind its last column; wait() returns when it is there. Warps share out rows to be normed.
    template <typename Wait>
    __device__ __forceinline__ void stage_x(const ChainProduct& c, const Wait& wait) const {
        const int end = c.column_tiles * kTileColumns;
        if (c.p.norm_weight) {
            constexpr int kKept = kNormed / (4 * kConsumers), kAtOnce = kKept / 4;
            const int row_warps = kChainWarps / launch.norm_rows, m = warp / row_warps, begin = 4 * (32 * (warp % row_warps) + lane),
                      step = 4 * 32 * row_warps;
            const auto load = [&](auto& to, int first, const void* data, int64_t at, DType dtype) {
                with_element(dtype, [&](auto zero) {
#pragma unroll
                    for (int i = 0; i < int(sizeof(to) / sizeof(float4)); ++i) {
                        const int k = begin + (first + i) * step;
                        to[i] = k < c.p.in_features ? load_4<decltype(zero)>(data, at + k) : make_float4(0, 0, 0, 0);
                    }
                });
            };
            float4 x[kKept], g[kAtOnce];  // more of g has no room beside x
            load(g, 0, c.p.norm_weight, 0, c.p.norm_dtype);
            wait();
            load(x, 0, c.p.x.data, min(m, launch.rows - 1) * c.p.x.row, c.p.dtype);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kKept; ++i) sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
            sum = warp_sum(sum);
            if (lane == 0) fixed.squares[warp] = sum;
            consumer_barrier();
            sum = warp_sum(lane < row_warps ? fixed.squares[m * row_warps + lane] : 0.0f);
            const float scale = rsqrtf(sum * c.per_feature + c.p.eps);
#pragma unroll
            for (int part = 0; part < kKept; part += kAtOnce) {
                if (part) load(g, part, c.p.norm_weight, 0, c.p.norm_dtype);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int k = begin + (part + i) * step;
                    const float4 from = x[part + i];
                    if (m < launch.rows && k < end)
                        store_x(c, m, k,
                                make_float4(from.x * scale * g[i].x, from.y * scale * g[i].y, from.z * scale * g[i].z,
                                            from.w * scale * g[i].w));
                }
            }
        } else {
            wait();
            for (int m = 0; m < launch.rows; ++m) {
                if (c.copies_x) {
                    const T* const row = static_cast<const T*>(c.p.x.data) + m * c.p.x.row;
                    const uint32_t to = shared_address(shared) + m * c.x_stride;
                    for (int k = 8 * threadIdx.x; k < end; k += 8 * kConsumers) {
                        const bool inside = k < c.p.in_features;
                        cp_async_16(to + 2 * k, row + (inside ? k : 0), inside ? 16 : 0);
                    }
                } else {
#pragma unroll 1
                    for (int k = 4 * threadIdx.x; k < end; k += 4 * kConsumers)
                        store_x(c, m, k, load_up_to_4(c.p.x.data, m * c.p.x.row, c.p.dtype, k, c.p.in_features, c.by_fours));
                }
            }
            cp_async_wait_all();
        }
        consumer_barrier();
    }

    // ---- the product ----

    // Sums of a row tile of the block: every warp that has a unit of it has a share.
    __device__ __forceinline__ float4* share_of(const ChainProduct& c, int tile, int share) const {
        return reinterpret_cast<float4*>(shared + launch.parts_at) +
               ((tile * min(c.chunks, kChainWarps) + share) << (3 + launch.pair_bits));
    }

    // Where the consumers are in the ring.
    struct Place {
        int stage;
        uint32_t phase;
    };

    __device__ __forceinline__ void multiply(const ChainProduct& c, Place& ring) const {
        const int chunks = c.chunks, units = tiles_of(c) * chunks, unit_tiles = c.chunk, step_tiles = c.step_tiles,
                  step_chunks = c.step_chunks, x_step = c.chunk * 2 * kTileColumns, stages = launch.stages;
        const uint32_t full_0 = full(0), empty_0 = empty(0);
        const uint8_t* const weights_0 = shared + launch.ring_at + warp * unit_tiles * kTile;
        const uint8_t* const lane_x = shared + min(lane / 4, launch.rows - 1) * c.x_stride + 32 * (lane % 4);
        int unit = warp, tile = warp / chunks, chunk = warp - tile * chunks;
        // Where the lane's sums of the tile go.
        const int share_slots = 8 << launch.pair_bits, tile_slots = min(chunks, kChainWarps) * share_slots;
        float4* const parts = reinterpret_cast<float4*>(shared + launch.parts_at) + (lane / 4 << launch.pair_bits) + lane % 4;
        float4* to = parts + tile * tile_slots + chunk * share_slots;
        const bool has_sums = 2 * (lane % 4) < launch.rows;
        float even[1][4] = {}, odd[1][4] = {};  // of every other tile: one need not wait for the other
        const auto multiply = [&](float(&sums)[1][4], const uint8_t* weights, const uint8_t* x) {
            uint4 columns[1][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) columns[0][half] = *reinterpret_cast<const uint4*>(x + 16 * half);
            multiply_tile<kFormat, T, kScaledSums>(sums, weights, columns, lane);
        };
#pragma unroll 1
        for (int turns = (units + kChainWarps - 1) / kChainWarps; turns > 0; --turns) {
            mbarrier_wait(full_0 + 8 * ring.stage, ring.phase);
            if (unit < units) {
                const uint8_t *weights = weights_0 + ring.stage * kStageBytes, *x = lane_x + chunk * x_step;
                if (unit_tiles == kChunk) {
#pragma unroll(kUnroll)
                    for (int t = 0; t < kChunk; ++t) multiply(t % 2 ? odd : even, weights + t * kTile, x + t * (2 * kTileColumns));
                } else {
#pragma unroll 1
                    for (int t = 0; t < unit_tiles; ++t) multiply(even, weights + t * kTile, x + t * (2 * kTileColumns));
                }
                unit += kChainWarps, chunk += step_chunks;
                const int further = step_tiles + (chunk >= chunks);
                if (chunk >= chunks) chunk -= chunks;
                if (further || unit >= units) {  // the last of the tile
                    const float(&a)[4] = even[0], (&b)[4] = odd[0];
                    if (has_sums) *to = make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]);
#pragma unroll
                    for (int e = 0; e < 4; ++e) even[0][e] = odd[0][e] = 0.0f;
                    tile += further;
                    to = parts + tile * tile_slots + chunk * share_slots;
                }
            }
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(empty_0 + 8 * ring.stage);
            if (++ring.stage == stages) ring.stage = 0, ring.phase ^= 1;
        }
    }

    // Number s of the block's sums of a product, as they lie in a share: of row m of x and of rows g and g + 8 of a tile one, with a pair
    // the gate (s & 2 is 0) or up.
    struct Sum {
        int64_t column;   // of out
        int64_t feature;  // row of W
        int m;
        bool stored;
    };
    __device__ __forceinline__ Sum sum_of(const ChainProduct& c, int s) const {
        const int bits = launch.pair_bits, i = s & 1, r = s >> 1 & 1, pair = s >> 2 & ((1 << bits) - 1), g = s >> (2 + bits) & 7;
        const int64_t tile = first_tile(c) + (s >> (5 + bits)), columns = c.p.columns();
        Sum sum{};
        sum.m = 2 * pair + i, sum.column = c.p.swiglu ? tile * 8 + g : tile * kTileRows + g + 8 * r;
        sum.feature = sum.column + (c.p.swiglu && r ? columns : 0);
        sum.stored = sum.m < launch.rows && sum.column < columns;
        return sum;
    }
    __device__ __forceinline__ int sums_of(const ChainProduct& c) const { return tiles_of(c) << (5 + launch.pair_bits); }

    // What is added to it: the bias, the residual.
    __device__ __forceinline__ float2 addends(const ChainProduct& c, int s) const {
        float2 added = make_float2(0, 0);
        if (s >= sums_of(c)) return added;
        const Sum at = sum_of(c, s);
        if (at.stored && c.p.bias) added.x = load_element(c.p.bias, at.feature, c.p.bias_dtype);
        if (at.stored && c.p.residual.data)
            added.y = load_element(c.p.residual.data, at.m * c.p.residual.row + at.column, c.p.residual_dtype);
        return added;
    }

    // `added`: addends of the thread's first sum, read long before.
    __device__ __forceinline__ void finish(const ChainProduct& c, float factor, float2 added) const {
        const int shares = min(c.chunks, kChainWarps), all = sums_of(c), row = 32 << launch.pair_bits;
        consumer_barrier();
        for (int s = threadIdx.x; s < all; s += kConsumers, added = addends(c, s)) {  // whole warps
            const float* const parts = reinterpret_cast<const float*>(share_of(c, s >> (5 + launch.pair_bits), 0)) + (s & (row - 1));
            float value = 0.0f;
#pragma unroll 8
            for (int share = 0; share < shares; ++share) value += parts[share * row];
            const Sum at = sum_of(c, s);
            value = value * factor + added.x;
            if (c.p.swiglu) value = silu(value) * __shfl_xor_sync(~0u, value, 2);
            if (at.stored && !(c.p.swiglu && s & 2))
                store_element(c.p.out.data, at.m * c.p.out.row + at.column, c.p.out_dtype, value + added.y);
        }
    }

    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < launch.stages; ++i) mbarrier_init(full(i), 1), mbarrier_init(empty(i), kChainWarps * kWarpArrivals);
            mbarrier_init(shared_address(&fixed.proceeds), 1);
            fence_mbarrier_init();
        }
        constexpr int kWords = sizeof(ChainProduct) / 4;
        for (int at = threadIdx.x; at < launch.count * kWords; at += kConsumers + 32)
            reinterpret_cast<uint32_t*>(fixed.products)[at] = reinterpret_cast<const uint32_t*>(launch.products)[at];
        __syncthreads();
        if (warp == kChainWarps) return produce();
        if (threadIdx.x < launch.count)
            fixed.factor[threadIdx.x] = static_cast<const PackedHeader*>(fixed.products[threadIdx.x].p.packed)->factor;
        GridBarrier grid;
        Place ring{0, 0};
#pragma unroll 1
        for (int i = 0;;) {
            stage_x(fixed.products[i], [&] {
                if (i == 0) {
                    grid_dependency_wait();
                } else {
                    if (threadIdx.x == 0) grid.wait();
                    consumer_barrier();
                }
            });
            if (i == 0 && threadIdx.x == 0) mbarrier_arrive(shared_address(&fixed.proceeds)), grid.begin();
            const float2 added = addends(fixed.products[i], threadIdx.x);
            multiply(fixed.products[i], ring);
            finish(fixed.products[i], fixed.factor[i], added);
            if (++i == launch.count) return;
            consumer_barrier();
            if (threadIdx.x == 0) grid.arrive(), mbarrier_arrive(shared_address(&fixed.proceeds));
        }
    }
};

template <Format kFormat, typename T>
__global__ void __launch_bounds__(chain_bound(kFormat), 1) chain_w4_sm90_kernel(const __grid_constant__ ChainLaunch launch) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ ChainStatic fixed;
    launch_dependents();
    ChainBlock<kFormat, T>(launch, dynamic, fixed).run();
}

bool reads_by_fours(const W4LinearParams& p) {
    return p.in_features % 4 == 0 && by_fours(p.x.data, p.rows > 1 ? p.x.row : 0, p.dtype) &&
           (!p.norm_weight || by_fours(p.norm_weight, 0, p.norm_dtype));
}

// How a chain is cut; stages is 0 if shared memory has no room for it.
ChainLaunch chain_plan(const W4ChainParams& params, const GpuSize& gpu) {
    ChainLaunch launch{};
    launch.count = params.count, launch.rows = int32_t(params.products[0].rows);
    while (2 << launch.pair_bits < launch.rows) ++launch.pair_bits;
    for (launch.norm_rows = 1; launch.norm_rows < launch.rows;) launch.norm_rows *= 2;
    int x_bytes = 0, parts = 0;
    for (int i = 0; i < params.count; ++i) {
        ChainProduct& c = launch.products[i];
        const W4LinearParams& p = c.p = params.products[i];
        const int row_tiles = used_row_tiles(p);
        c.column_tiles = int(column_tiles(p.in_features));
        for (c.chunk = kChunk; c.column_tiles % c.chunk;) c.chunk /= 2;
        c.chunks = c.column_tiles / c.chunk;
        c.tiles = row_tiles / gpu.multiprocessors, c.more = row_tiles % gpu.multiprocessors;
        c.step_tiles = kChainWarps / c.chunks, c.step_chunks = kChainWarps % c.chunks;
        c.x_stride = c.column_tiles * 2 * kTileColumns + 16;  // 16: no bank conflicts
        c.per_feature = 1.0f / float(p.in_features), c.copies_x = reads_x(p);
        c.by_fours = reads_by_fours(p);
        x_bytes = std::max(x_bytes, launch.rows * c.x_stride);
        parts = std::max(parts, (c.tiles + (c.more > 0)) * std::min(c.chunks, kChainWarps));
    }
    launch.parts_at = x_bytes;
    launch.ring_at = int(ceil_div(launch.parts_at + parts * (8 << launch.pair_bits) * 16, 128)) * 128;
    const int room = int(gpu.shared_memory) - int(sizeof(ChainStatic)) - launch.ring_at;
    const int stage = kChainWarps * kChunk * tile_bytes(params.products[0].format);
    launch.stages = room > 0 ? std::min(kChainStages, room / stage) : 0;
    if (launch.stages < 2) launch.stages = 0;
    int64_t later = kLaterBytes / kPiece;
    for (int i = 0; i < params.ahead_count; ++i) {
        launch.later[i] = static_cast<const uint8_t*>(params.ahead[i]);
        launch.later_pieces[i] = int32_t(std::min(later, params.ahead_bytes[i] / kPiece));
        later -= launch.later_pieces[i];
    }
    launch.bytes = launch.ring_at + launch.stages * stage;
    return launch;
}

template <Format kFormat>
cudaError_t launch_chain(const W4ChainParams& params, const GpuSize& gpu, cudaStream_t stream) {
    const ChainLaunch launch = chain_plan(params, gpu);
    const W4LinearParams& first = params.products[0];
    LaunchOptions options;
    options.programmatic = first.programmatic, options.cooperative = true;
    options.prefers_shared = params.bytes() >= W4ChainParams::kLarge;  // as decode_lanes.cuh does with heads of 128
    return launch_kernel(
        first.compute_dtype == DType::kFloat16 ? chain_w4_sm90_kernel<kFormat, __half> : chain_w4_sm90_kernel<kFormat, __nv_bfloat16>,
        unsigned(gpu.multiprocessors), kConsumers + 32, size_t(launch.bytes), stream, launch, options);
}

}  // namespace
}  // namespace w4

const char* chain_w4_sm90_refuses(const W4ChainParams& params, const GpuSize& gpu, char* text, size_t size) {
    const W4LinearParams& first = params.products[0];
    for (int i = 0; i < params.count; ++i) {
        const W4LinearParams& p = params.products[i];
        const struct {
            const char* name;
            int64_t here, before;
        } fields[] = {{"rows", p.rows, first.rows},
                      {"format", int64_t(p.format), int64_t(first.format)},
                      {"compute_dtype", int64_t(p.compute_dtype), int64_t(first.compute_dtype)}};
        for (const auto& field : fields)
            if (field.here != field.before) {
                std::snprintf(text, size, "products[%d].%s=%lld, but products[0] has %lld", i, field.name,
                              static_cast<long long>(field.here), static_cast<long long>(field.before));
                return text;
            }
        if (p.norm_weight && !w4::reads_by_fours(p)) {
            std::snprintf(text, size, "products[%d] norms x, whose rows, or norm_weight, cannot be read by four elements", i);
            return text;
        }
        if (p.norm_weight && p.rows <= w4::kChainRows) {
            int64_t rows = 1;
            while (rows < p.rows) rows *= 2;
            if (rows * p.in_features > w4::kNormed) {
                std::snprintf(text, size, "products[%d] norms rows=%lld of in_features=%d: too many for registers", i,
                              static_cast<long long>(p.rows), p.in_features);
                return text;
            }
        }
    }
    if (first.rows == 0 || (first.rows <= w4::kChainRows && w4::chain_plan(params, gpu).stages > 0)) return nullptr;
    std::snprintf(text, size, "rows=%lld: above %d, or too many for shared memory", static_cast<long long>(first.rows), w4::kChainRows);
    return text;
}

cudaError_t chain_w4_sm90(const W4ChainParams& params, const GpuSize& gpu, cudaStream_t stream) {
    switch (params.products[0].format) {
        case w4::Format::kNvfp4: return w4::launch_chain<w4::Format::kNvfp4>(params, gpu, stream);
        case w4::Format::kMxfp4: return w4::launch_chain<w4::Format::kMxfp4>(params, gpu, stream);
        case w4::Format::kInt4: return w4::launch_chain<w4::Format::kInt4>(params, gpu, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace fa
