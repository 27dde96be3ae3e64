// chain_w4_sm90.cu: a chain of products with packed 4-bit weights in one launch, for a few rows of x, on Hopper. New against one launch per
// product: weights keep coming from memory while the results of one product become x of the next. Bound by the bit operations that unpack
// weights, and by the 3 to 4 us between two products.
//
//     grid     One block per SM, all of them resident (a cooperative launch). They wait for each other after each product but the last.
//     ring     A producer warp fills it by bulk copies and goes on with the weights of the next product, which depend on nothing. A stage
//              holds one unit for each of the other warps: a few column tiles of one row tile. The units of a block are contiguous.
//     product  mma.m16n8k16 with the weights as operand A and 8 rows of x as the columns of operand B, as in mma_w4/kernel.cuh. x is
//              resident.
//     sums     The warps that share a row tile add their sums in shared memory. The order is fixed, so results are bitwise reproducible.
//     SM       A block leaves room for one block of attention/decode/lanes/kernel.cuh, the attention that follows in a decoder. When the
//              chain ends, that kernel has already started and loaded its first keys.
#include <algorithm>
#include <cstdio>

#include "device/grid.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/w4/common/product.h"
#include "transformer/w4/common/w4.cuh"
#include "transformer/w4/kernels.h"

namespace fa {
namespace w4 {
namespace {

constexpr int kChainRows = 8, kChainWarps = 16, kConsumers = 32 * kChainWarps;  // beside the producer warp
constexpr int kChunk = 4;                                                       // column tiles of a unit, at most
constexpr int kCopy = 9216;                                                     // bytes of a copy, at most
constexpr int kNormed = 16384;  // elements of x that a block keeps in registers between the sum of squares and the norm, at most
// Measured on an H200, in a 7B decoder. While copies fill the memory queues, other accesses wait behind them: the reads of x, and the fence
// before a barrier. So the ring is as small as possible (5 stages cost 2 us more per layer). One stage is filled before the first x has
// arrived, two before the block has arrived at a barrier (which saves 0.5 us), and only kLaterBytes of the next launch's weights are
// prefetched into L2.
constexpr int kChainStages = 3, kEarly = 1, kHeld = 2;
constexpr int kPiece = 4096, kLaterBytes = 9 << 20;
// The launch bound. It limits a thread to 72 registers, as if a block had 896 threads. A quarter of an SM has 512 registers for each of 32
// lanes and runs up to 5 of the 17 warps, which leaves room for two warps of attention/decode/lanes/kernel.cuh. Measured on an H200: this
// saves 1.5 us per layer. int4 would spill.
constexpr int chain_bound(Format format) { return format == Format::kInt4 ? kConsumers + 32 : 896; }

// A product and how it is divided among blocks and warps.
struct ChainProduct {
    W4LinearParams p;
    int32_t column_tiles;             // of W
    int32_t chunk, chunks;            // column tiles per unit; units per row tile
    int32_t tiles, more;              // row tiles per block; the first `more` blocks have one more
    int32_t step_tiles, step_chunks;  // from one unit of a warp to its next
    int32_t x_stride;                 // bytes between rows of x in shared memory
    float per_feature;                // 1 / in_features
    bool copies_x;                    // x is copied to shared memory unchanged
    bool by_fours;                    // load_4 can read x; always true with a norm
};

struct ChainLaunch {
    ChainProduct products[W4ChainParams::kMost];
    int32_t count, rows;
    int32_t pair_bits;                 // x has 2^pair_bits pairs of rows; a lane (g, pair) has four sums of a row tile
    int32_t norm_rows;                 // rows, rounded up to a power of two
    int32_t stages;                    // stages of the ring; 0 if too few fit
    int32_t parts_at, ring_at, bytes;  // offsets in shared memory (x is at 0), and its size
    // Arrays that the next launch reads, in pieces that are prefetched into L2 after the last weights.
    const uint8_t* later[W4ChainParams::kMostAhead];
    int32_t later_pieces[W4ChainParams::kMostAhead];
};

// Static shared memory.
struct ChainStatic {
    uint64_t full[kChainStages], empty[kChainStages];  // barriers of the ring
    uint64_t proceeds;                                 // the first x has arrived; later: the block is at the grid's barrier
    float squares[kChainWarps];                        // for each warp: the sum of squares of its part of x
    float factor[W4ChainParams::kMost];                // PackedHeader::factor
    ChainProduct products[W4ChainParams::kMost];       // a copy, because the first read of a kernel parameter takes long
};

template <Format kFormat, typename T>
struct ChainBlock {
    static constexpr int kTile = tile_bytes(kFormat);
    static constexpr bool kScaledSums = kFormat == Format::kInt4;  // see multiply_tile
    static constexpr int kUnroll = kScaledSums ? 2 : kChunk;       // as registers allow
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
    // A barrier of the warps that multiply.
    __device__ __forceinline__ static void consumer_barrier() { bar_sync(1, kConsumers); }

    // ---- the producer warp ----

    // The units of a block are contiguous, so the units of one stage, one per warp, are one piece of memory.
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
                    for (uint32_t at = 0; at < bytes; at += kCopy)  // read only once, so L2 evicts weights before x, keys and code
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

    // Copies x of a product to shared memory, padded with zeros. wait() returns when x has been written. For a norm, warps divide the rows.
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
            float4 x[kKept], g[kAtOnce];  // registers have no room for more of g beside x
            load(g, 0, c.p.norm_weight, 0, c.p.norm_dtype);
            wait();
            load(x, 0, c.p.x.data, min(m, launch.rows - 1) * c.p.x.row, c.p.dtype);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kKept; ++i) sum += sum_of_squares(x[i]);
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
                    if (m < launch.rows && k < end) store_x(c, m, k, norm_4(x[part + i], scale, g[i]));
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

    // Shared memory for the sums of a row tile. Each warp that has a unit of the tile has one share.
    __device__ __forceinline__ float4* share_of(const ChainProduct& c, int tile, int share) const {
        return reinterpret_cast<float4*>(shared + launch.parts_at) +
               ((tile * min(c.chunks, kChainWarps) + share) << (3 + launch.pair_bits));
    }

    // The position of the consumers in the ring.
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
        // Where the lane stores its sums of the tile.
        const int share_slots = 8 << launch.pair_bits, tile_slots = min(chunks, kChainWarps) * share_slots;
        float4* const parts = reinterpret_cast<float4*>(shared + launch.parts_at) + (lane / 4 << launch.pair_bits) + lane % 4;
        float4* to = parts + tile * tile_slots + chunk * share_slots;
        const bool has_sums = 2 * (lane % 4) < launch.rows;
        float even[1][4] = {}, odd[1][4] = {};  // sums of even and odd column tiles: two independent chains of products
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
                if (further || unit >= units) {  // that was the warp's last unit of this tile
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

    // Sum number s of the block, in the order of a share: one sum for each row m of x and each row of a tile. In a paired weight, sums with
    // (s & 2) == 0 belong to gate rows, the other sums to up rows.
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

    // The bias and the residual that are added to a sum.
    __device__ __forceinline__ float2 addends(const ChainProduct& c, int s) const {
        float2 added = make_float2(0, 0);
        if (s >= sums_of(c)) return added;
        const Sum at = sum_of(c, s);
        if (at.stored && c.p.bias) added.x = load_element(c.p.bias, at.feature, c.p.bias_dtype);
        if (at.stored && c.p.residual.data)
            added.y = load_element(c.p.residual.data, at.m * c.p.residual.row + at.column, c.p.residual_dtype);
        return added;
    }

    // `added`: the addends of the thread's first sum, loaded in advance.
    __device__ __forceinline__ void finish(const ChainProduct& c, float factor, float2 added) const {
        const int shares = min(c.chunks, kChainWarps), all = sums_of(c), row = 32 << launch.pair_bits;
        consumer_barrier();
        for (int s = threadIdx.x; s < all; s += kConsumers, added = addends(c, s)) {  // by whole warps
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

// How a chain is divided. stages = 0 if shared memory has no room for it.
ChainLaunch chain_plan(const W4ChainParams& params, const DeviceInfo& gpu) {
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
        c.x_stride = c.column_tiles * 2 * kTileColumns + 16;  // + 16 avoids bank conflicts
        c.per_feature = 1.0f / float(p.in_features), c.copies_x = copies_x(p);
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

template <Format kFormat, typename T>
cudaError_t launch_chain(const W4ChainParams& params, const DeviceInfo& gpu, cudaStream_t stream) {
    const ChainLaunch launch = chain_plan(params, gpu);
    LaunchOptions options;
    options.programmatic = params.products[0].programmatic, options.cooperative = true;
    options.prefers_shared = params.bytes() >= W4ChainParams::kLarge;  // as attention/decode/lanes/kernel.cuh does with heads of 128
    return launch_kernel(chain_w4_sm90_kernel<kFormat, T>, unsigned(gpu.multiprocessors), kConsumers + 32, size_t(launch.bytes), stream,
                         launch, options);
}

}  // namespace
}  // namespace w4

const char* chain_w4_sm90_refuses(const W4ChainParams& params, const DeviceInfo& gpu, char* text, size_t size) {
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

cudaError_t chain_w4_sm90(const W4ChainParams& params, const DeviceInfo& gpu, cudaStream_t stream) {
    return w4::with_format_and_type(
        params.products[0], [&](auto format, auto zero) { return w4::launch_chain<format.value, decltype(zero)>(params, gpu, stream); });
}

}  // namespace fa
