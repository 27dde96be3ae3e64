// wgmma_sm90/rows.cu: the row-by-row kernels before and after the main kernel of the Hopper backward.
//     before   computes delta = rowsum(dout * out) - dlse; converts lse to exponents of 2, with +inf past the end so that P = 0; finds the
//              RowBase of rows with a large lse (large_rows.cuh); clears the counters; zeroes the sums of dQ where blocks add in any order
//     after    converts dQ from accumulator order to rows and multiplies it by softmax_scale; unless the main kernel has stored rows
// Both are bound by memory: 16 bytes per lane, one block for every tile of queries.
#include <cmath>
#include <type_traits>

#include "attention/backward/common/empty_rows.cuh"
#include "attention/backward/wgmma_sm90/rows.h"
#include "attention/common/large_rows.cuh"
#include "common/constants.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kThreads = 256;

struct RowsParams {
    BackwardParams b;
    QueryTiles tiles;
};

// The tile of queries that a block works on. find_tile returns false for a tile that belongs to no sequence.
struct TilePlace {
    int64_t tile;  // in QueryTiles
    int batch, head, row0;
    Sequence s;
};
__device__ bool find_tile(const RowsParams& params, unsigned tile, TilePlace& at) {
    const AttentionParams& p = params.b.forward;
    const QueryTiles& t = params.tiles;
    at.tile = tile;
    const int sequence_head = tile / unsigned(t.tiles);
    int m = tile - sequence_head * t.tiles;
    at.batch = sequence_head / p.nheads, at.head = sequence_head % p.nheads;
    if (p.cu_seqlens_q) {
        at.head = sequence_head;
        const auto first_tile = [&](int b) { return first_tile_of(p, t.block_m, b); };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_tile(middle) <= m) low = middle;
            else high = middle - 1;
        }
        at.batch = low, m -= first_tile(low);
    }
    at.row0 = m * t.block_m;
    at.s = sequence_of(p, at.batch);
    return at.row0 >= 0 && at.row0 < at.s.seqlen_q;
}

// Called by a whole block: stores whether the lengths are in order.
__device__ __noinline__ void find_order(const RowsParams& params) {
    const AttentionParams& p = params.b.forward;
    bool ordered = true;
    for (int b = threadIdx.x; b + 1 < p.batch; b += kThreads)
        ordered = ordered && ends_before_next(p, params.tiles.block_m, params.tiles.block_n, b);
    ordered = __syncthreads_and(ordered);
    if (threadIdx.x == 0) *params.tiles.has_order() = ordered;
}

// Called by the whole block: finds the large rows of its tile (large_rows.cuh).
template <typename T, int kBlockM, bool kBlocks>
__device__ __noinline__ void prepare_large_rows(const RowsParams& params) {
    TilePlace at;
    find_tile(params, blockIdx.x, at);
    if (threadIdx.x == 0) *params.tiles.some_large() = QueryTiles::kSomeLarge;
    const int first = threadIdx.x / 32 * 16;
    if (first >= kBlockM || at.row0 + first >= at.s.seqlen_q) return;
    find_large_rows<T, kBlocks>(params.b.forward, at.s, at.batch, at.head, at.row0 + first, params.tiles.natural, LseCovers::kPerhapsMore,
                                [&](int i, const RowBase& base) {
                                    const int64_t place = at.tile * kBlockM + quad_order(i - at.row0);
                                    params.tiles.lse[place] = kLargeRow;
                                    reinterpret_cast<float2*>(params.tiles.large)[place] = make_float2(base.max, base.rest);
                                });
}

// Each thread reads its part of several rows before it uses the first: a short call has few blocks and waits for memory, not for its rate.
constexpr int kRowsInFlight = 4;
constexpr int kBeforeBlocks = 1024 / kThreads;  // of a multiprocessor: registers for those rows
// kBlocks: the call may have a mask by blocks.
template <typename T, int kColumns, int kBlockM, bool kBlocks>
__global__ void __launch_bounds__(kThreads, kBeforeBlocks) before_kernel(const __grid_constant__ RowsParams params) {
    constexpr int kLanes = kColumns == 64 ? 8 : kColumns == 128 ? 16 : 32, kRows = kThreads / kLanes;  // lanes per row; rows at a time
    const AttentionParams& p = params.b.forward;
    TilePlace at;
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) *params.tiles.taken() = 0;
        if (threadIdx.x == 0 && params.tiles.direct) *params.tiles.ended() = 0;
        if (params.b.deterministic && p.cu_seqlens_q) find_order(params);
    }
    // Every tile has counters that begin at zero. Where lengths are not in order, the main kernel also visits tiles that find_tile assigns
    // to another sequence, or to none.
    if (threadIdx.x < params.tiles.blocks) params.tiles.turn[int64_t(blockIdx.x) * params.tiles.blocks + threadIdx.x] = 0;
    if (!find_tile(params, blockIdx.x, at)) {
        grid_dependency_wait();  // as at the end
        return;
    }
    const int lane = threadIdx.x % kLanes;
    const T* out = static_cast<const T*>(p.out.data) + at.s.out + at.head * p.out.head + 8 * lane;
    const T* dout =
        static_cast<const T*>(params.b.dout.data) + gradients_of(params.b, at.batch).dout + at.head * params.b.dout.head + 8 * lane;
    const float* const lse = p.lse + lse_offset(p, at.s, at.head);
    const float* const dlse = params.b.dlse ? params.b.dlse + lse_offset(p, at.s, at.head) : nullptr;
    bool large = false;
    constexpr int kTurns = kBlockM / kRows, kAtOnce = kTurns < kRowsInFlight ? kTurns : kRowsInFlight;
    static_assert(kTurns % kAtOnce == 0);
#pragma unroll 1
    for (int r0 = threadIdx.x / kLanes; r0 < kBlockM; r0 += kAtOnce * kRows) {
        uint4 xs[kAtOnce], ys[kAtOnce];
        float own_lse[kAtOnce], own_dlse[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = at.row0 + r0 + i * kRows;
            xs[i] = ys[i] = make_uint4(0, 0, 0, 0);
            own_lse[i] = -INFINITY, own_dlse[i] = 0.0f;
            if (row >= at.s.seqlen_q) continue;
            if (8 * lane < p.headdim_v) {
                xs[i] = *reinterpret_cast<const uint4*>(out + row * p.out.row);
                ys[i] = *reinterpret_cast<const uint4*>(dout + row * params.b.dout.row);
            }
            if (lane == 0) {
                own_lse[i] = lse[row];
                if (dlse) own_dlse[i] = dlse[row];
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint32_t x[4] = {xs[i].x, xs[i].y, xs[i].z, xs[i].w}, y[4] = {ys[i].x, ys[i].y, ys[i].z, ys[i].w};
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 a = unpack_16<T>(x[j]), b = unpack_16<T>(y[j]);
                sum += a.x * b.x + a.y * b.y;
            }
#pragma unroll
            for (int j = kLanes / 2; j > 0; j /= 2) sum += __shfl_xor_sync(~0u, sum, j);
            if (lane == 0) {
                const int64_t place = at.tile * kBlockM + quad_order(r0 + i * kRows);
                const bool empty = own_lse[i] == -INFINITY;  // P = 0, so P (dP - delta) must be 0, too, whatever dlse holds
                params.tiles.lse[place] = row_statistic(own_lse[i]);
                large = large || is_large(own_lse[i]);
                params.tiles.delta[place] = empty ? 0.0f : sum - own_dlse[i];
            }
        }
    }
    if (params.tiles.zeroed && !params.tiles.direct) {
        float4* dq = reinterpret_cast<float4*>(params.tiles.dq) + at.tile * (kBlockM * kColumns / 4);
#pragma unroll
        for (int i = threadIdx.x; i < kBlockM * kColumns / 4; i += kThreads) dq[i] = make_float4(0, 0, 0, 0);
    }
    // Rare. Under softcap, in plans that are not natural, P of a large row is 0: backward_serves_options.
    if (__syncthreads_or(large) && (params.tiles.natural || p.softcap == 0)) prepare_large_rows<T, kBlockM, kBlocks>(params);
    grid_dependency_wait();  // on the kernels that make lists of tiles: so the end of this kernel is also the end of those
}

// Writes eight columns of dQ, scaled, to 16 bytes of a row; zeros where scale is 0.
template <typename T>
__device__ __forceinline__ void store_columns(const RowsParams& params, T* row, const float (&x)[8], float scale) {
    uint4* place = reinterpret_cast<uint4*>(row);
    uint32_t old[4] = {}, packed[4];
    if (params.b.accumulate) reinterpret_cast<uint4&>(old) = *place;
    const auto scaled = [&](float sum) { return scale == 0.0f ? 0.0f : sum * scale; };
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 before = unpack_16<T>(old[j]);
        const float low = scaled(x[2 * j]), high = scaled(x[2 * j + 1]);
        packed[j] = params.b.accumulate ? pack_16<T>(before.x + low, before.y + high) : pack_16<T>(low, high);
    }
    *place = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// A block has two pieces: with 64 columns, both pieces of the tile; else 128 of the tile's columns.
constexpr int kPiecesOfBlock = 2;

template <typename T, int kColumns, int kBlockM>
__global__ void __launch_bounds__(kThreads) after_kernel(const __grid_constant__ RowsParams params) {
    constexpr int kPieces = kBlockM / 64 * (kColumns / 64), kBlocks = (kPieces + kPiecesOfBlock - 1) / kPiecesOfBlock;
    const AttentionParams& p = params.b.forward;
    TilePlace at;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.tiles.some_large() = 0;
    if (!find_tile(params, blockIdx.x / kBlocks, at)) return;
    const Range blocks = key_blocks_of(visible_band(p, at.s), at.row0, kBlockM, params.tiles.block_n);
    // A tile that no key block meets has a gradient of zero. A tile that a block has written has a counter above zero.
    constexpr int kCounters = kColumns > 128 ? 2 : 1;  // BackwardPlan::blocks: the first of two counts in either order
    const bool meets = params.tiles.skipped ? params.tiles.turn[at.tile * kCounters] != 0 : blocks.begin < blocks.end;
    const bool written = params.tiles.zeroed || meets;
    T* rows = static_cast<T*>(params.b.dq.data) + gradients_of(params.b, at.batch).dq + at.head * params.b.dq.head;
    // Read before the first store, for which later reads would wait. +inf where lse is -inf (before_kernel).
    const auto statistic_of = [&](int r) { return params.tiles.lse[at.tile * kBlockM + quad_order(r)]; };
    const auto store = [&](int r, int column, float statistic, const float(&x)[8]) {
        const int row = at.row0 + r;
        if (row >= at.s.seqlen_q || column >= p.headdim) return;
        const bool empty = is_empty_row(p, at.s, row, -statistic);
        store_columns(params, rows + row * params.b.dq.row + column, x, empty ? 0.0f : p.scale);
    };
    const int first = blockIdx.x % kBlocks * kPiecesOfBlock, t = threadIdx.x;
    if constexpr (kColumns == 64) {
        // A thread has columns 8 group .. + 7 of two neighbouring rows. They are halves of the accumulator groups, which hold dQ^T, of
        // eight lanes.
        const int group = t % 8, quad = t / 8 % 4, c = t / 32;
        const float2* lanes = reinterpret_cast<const float2*>(params.tiles.dq) + (at.tile * kPieces + first) * (kDqPiece / 2) +
                              (c * 128 + group / 2 * 32 + quad) * 2 + group % 2;
        float2 x[kPiecesOfBlock][8] = {}, statistics[kPiecesOfBlock] = {};
#pragma unroll
        for (int i = 0; i < kPiecesOfBlock; ++i) {
            if (first + i >= kPieces) continue;
            const int row = (first + i) * 64 + 8 * c + 2 * quad;
            statistics[i] = {statistic_of(row), statistic_of(row + 1)};
            if (written)
#pragma unroll
                for (int g = 0; g < 8; ++g) x[i][g] = lanes[i * (kDqPiece / 2) + 8 * g];
        }
#pragma unroll
        for (int i = 0; i < kPiecesOfBlock && first + i < kPieces; ++i) {
            const auto& y = x[i];
            const int row = (first + i) * 64 + 8 * c + 2 * quad;
            store(row, 8 * group, statistics[i].x, {y[0].x, y[1].x, y[2].x, y[3].x, y[4].x, y[5].x, y[6].x, y[7].x});
            store(row + 1, 8 * group, statistics[i].y, {y[0].y, y[1].y, y[2].y, y[3].y, y[4].y, y[5].y, y[6].y, y[7].y});
        }
    } else {
        // A thread has columns 8 group .. + 7 of rows g and g + 8 of a warp's sixteen: the accumulator groups of a quad.
        const int group = t % 8, g = t / 8 % 8, warp = t / 64;
        const float4* quad = reinterpret_cast<const float4*>(params.tiles.dq) + (at.tile * kPieces + first) * (kDqPiece / 4) + group * 128 +
                             warp * 32 + g * 4;
        const float low = statistic_of(16 * warp + g), high = statistic_of(16 * warp + g + 8);
        float4 x[kPiecesOfBlock][4] = {};
#pragma unroll
        for (int i = 0; i < kPiecesOfBlock; ++i)
            if (written && first + i < kPieces)
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = quad[i * (kDqPiece / 4) + j];
#pragma unroll
        for (int i = 0; i < kPiecesOfBlock; ++i) {
            const auto& y = x[i];
            const int column = (first + i) * 64 + 8 * group;
            store(16 * warp + g, column, low, {y[0].x, y[0].y, y[1].x, y[1].y, y[2].x, y[2].y, y[3].x, y[3].y});
            store(16 * warp + g + 8, column, high, {y[0].z, y[0].w, y[1].z, y[1].w, y[2].z, y[2].w, y[3].z, y[3].w});
        }
    }
}

enum class Rows { kBefore, kAfter };

template <Rows kWhich>
cudaError_t launch(const BackwardParams& b, const QueryTiles& tiles, bool programmatic, cudaStream_t stream) {
    const RowsParams params{b, tiles};
    const auto start = [&](auto element, auto columns, auto block_m) {
        using T = decltype(element);
        const auto kernel = kWhich == Rows::kAfter  ? after_kernel<T, columns(), block_m()>
                            : b.forward.blocks.data ? before_kernel<T, columns(), block_m(), true>
                                                    : before_kernel<T, columns(), block_m(), false>;
        constexpr int kPieces = block_m() / 64 * (columns() / 64);
        const int64_t blocks = tiles.count() * (kWhich == Rows::kBefore ? 1 : (kPieces + kPiecesOfBlock - 1) / kPiecesOfBlock);
        return launch_kernel(kernel, unsigned(blocks), kThreads, 0, stream, params, programmatic);
    };
    const auto shape = [&](auto element) {
        using std::integral_constant;
        if (tiles.block_m == 128) return start(element, integral_constant<int, 64>{}, integral_constant<int, 128>{});
        switch (tiles.columns) {
            case 64: return start(element, integral_constant<int, 64>{}, integral_constant<int, 64>{});
            case 128: return start(element, integral_constant<int, 128>{}, integral_constant<int, 64>{});
            case 192: return start(element, integral_constant<int, 192>{}, integral_constant<int, 64>{});
            default: return start(element, integral_constant<int, 256>{}, integral_constant<int, 64>{});
        }
    };
    return b.forward.dtype == DType::kFloat16 ? shape(__half{}) : shape(__nv_bfloat16{});
}

}  // namespace

cudaError_t backward_rows_before(const BackwardParams& b, const QueryTiles& tiles, bool after_lists, cudaStream_t stream) {
    return launch<Rows::kBefore>(b, tiles, after_lists, stream);
}
cudaError_t backward_rows_after(const BackwardParams& b, const QueryTiles& tiles, cudaStream_t stream) {
    return tiles.direct ? cudaSuccess : launch<Rows::kAfter>(b, tiles, false, stream);
}

}  // namespace fa
