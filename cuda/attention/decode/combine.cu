// combine.cu: merges the pieces of a row: lse = log(sum exp(lse_i)), out = sum exp(lse_i - lse) out_i. A row whose keys are one piece
// already has its result. The kernels are launched while the previous kernel runs, and find their pieces meanwhile.
//   combine_kernel       few rows of many pieces: one block per row, which reads all pieces of the row at once. Bound by the latency of
//                        three dependent reads
//   combine_rows_kernel  many rows of few pieces: a warp merges, one after another, neighbouring rows of a tile, which share their pieces
// With kPrefix the call has a plan of shared prefixes (prefix.h): the pieces of a row's prefix join the others. The plan is read after the
// wait.
#include "attention/common/epilogue.cuh"
#include "attention/decode/common/decode.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <algorithm>
#include <cfloat>

namespace fa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
FA_HOST_DEVICE int groups_of(const DecodeShape& shape, int neighbours) { return (shape.rows + neighbours - 1) / neighbours; }

// Whether no row needs a merge. With a prefix plan its keys begin at other places, but if no keys are shared, all is as without one.
template <bool kPrefix>
__device__ __forceinline__ bool all_are_whole(const DecodeParams& d, const Cut& cut) {
    return cut.tiles && !cut.of_unit && !(kPrefix && d.prefix.counts[0] > 0);
}

// A unit in one piece whose sequence shares keys has its slot, too.
__device__ __forceinline__ UnitPieces with_whole_slot(const DecodeParams& d, const UnitPieces& pieces, int b, int unit) {
    return pieces.count == 1 ? UnitPieces{1, int64_t(d.whole_slots) + b * d.heads() + unit, false} : pieces;
}

// Row `index` of the (batch, seqlen_q, nheads) rows of out.
template <bool kPrefix>
struct CombinedRow {
    int b, i, head;
    int tile_row;  // row in its tile
    UnitPieces pieces;
    PrefixPieces prefix{};

    __device__ __forceinline__ void find(const DecodeParams& d, const Cut& cut, int index) {
        const AttentionParams& p = d.attention;
        head = index % p.nheads, i = index / p.nheads % p.seqlen_q, b = index / p.nheads / p.seqlen_q;
        const int r = i * p.group + head % p.group;
        tile_row = r % d.shape.rows;
        const int unit = head / p.group * d.shape.row_tiles + r / d.shape.rows;
        pieces = pieces_of(d, cut, b, unit);
        if (!kPrefix) return;
        prefix = prefix_pieces(d.prefix, b, head / p.group, r, p.seqlen_q * p.group, p.nheads_k);
        if (prefix.count) pieces = with_whole_slot(d, pieces, b, unit);
    }
    __device__ __forceinline__ bool is_merged() const { return pieces.count != 1 || prefix.count > 0; }
};

// A warp's share of a row: every kEvery-th piece, from piece `begin` on. A lane has four columns of each part of 128. Of exponents of 2 a
// piece has its lse; of natural scores it has its maximum and its sum, because at a maximum of -FLT_MAX an lse would lose the sum.
template <int kParts, int kEvery, ScoreUnit kUnit = ScoreUnit::kLog2>
struct WarpShare {
    static constexpr bool kNatural = kUnit == ScoreUnit::kNatural;
    float row_max = -FLT_MAX, row_sum = 0;
    float4 o[kParts] = {};

    __device__ __forceinline__ void read(const DecodeParams& d, const UnitPieces& pieces, int tile_row, int begin, int lane) {
        read(
            d.partial, d.partial_lse, d.attention.headdim_v, pieces.count,
            [&](int piece) { return pieces.slot(piece) * d.shape.rows + tile_row; }, begin, lane);
    }
    __device__ __forceinline__ void read(const DecodeParams& d, const PrefixPieces& pieces, int begin, int lane) {
        read(
            d.prefix.partial, d.prefix.partial_lse, d.attention.headdim_v, pieces.count,
            [&](int piece) { return pieces.first + piece * pieces.step; }, begin, lane);
    }

private:
    // row_of(piece): the row of the partial results.
    template <typename RowOf>
    __device__ __forceinline__ void read(const float* partial, const float* partial_lse, int headdim_v, int count, const RowOf& row_of,
                                         int begin, int lane) {
        constexpr int kAtOnce = kParts == 1 ? 4 : 2;  // pieces that a warp reads at once
        for (int first = begin; first < count; first += kEvery * kAtOnce) {
            float lse[kAtOnce], sum[kAtOnce];  // natural scores: the maximum, and the sum
            float4 piece_o[kAtOnce][kParts];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int piece = first + kEvery * j;
                const int64_t at = row_of(min(piece, count - 1));
                if constexpr (kNatural) {
                    const float2 stats = reinterpret_cast<const float2*>(partial_lse)[at];
                    lse[j] = piece < count ? stats.x : -INFINITY, sum[j] = piece < count ? stats.y : 0;
                } else {
                    lse[j] = piece < count ? partial_lse[at] : -INFINITY, sum[j] = 1;
                }
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    const int column = 128 * part + 4 * lane;
                    piece_o[j][part] = piece < count && column < headdim_v
                                           ? *reinterpret_cast<const float4*>(partial + at * headdim_v + column)
                                           : float4{};
                }
            }
            float next = row_max;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) next = fmaxf(next, lse[j]);
            const float factor = exponential_of<kUnit>(row_max - next);
            row_max = next, row_sum *= factor;
#pragma unroll
            for (int part = 0; part < kParts; ++part) o[part].x *= factor, o[part].y *= factor, o[part].z *= factor, o[part].w *= factor;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const float weight = exponential_of<kUnit>(lse[j] - row_max) * sum[j];
                row_sum += weight;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    o[part].x += weight * piece_o[j][part].x, o[part].y += weight * piece_o[j][part].y;
                    o[part].z += weight * piece_o[j][part].z, o[part].w += weight * piece_o[j][part].w;
                }
            }
        }
    }
};

// Stores four columns of a result, times a factor.
__device__ __forceinline__ void store_columns(const AttentionParams& p, int64_t at, float4 y, float factor) {
    y.x *= factor, y.y *= factor, y.z *= factor, y.w *= factor;
    if (p.dtype == DType::kFloat32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out.data) + at) = y;
        return;
    }
    const bool half = p.dtype == DType::kFloat16;
    const uint2 pairs = half ? make_uint2(pack_16<__half>(y.x, y.y), pack_16<__half>(y.z, y.w))
                             : make_uint2(pack_16<__nv_bfloat16>(y.x, y.y), pack_16<__nv_bfloat16>(y.z, y.w));
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out.data) + at) = pairs;
}

template <int kParts, bool kPrefix, ScoreUnit kUnit = ScoreUnit::kLog2>  // parts of 128 columns
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ DecodeParams d) {
    const AttentionParams& p = d.attention;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = p.batch * p.seqlen_q * p.nheads;
    __shared__ float max_of[kWarps], sum_of[kWarps];
    __shared__ float4 o_of[kWarps][32 * kParts];
    if (kPrefix) grid_dependency_wait();
    const Cut cut(d);
    const bool all_whole = all_are_whole<kPrefix>(d, cut);
    int x = blockIdx.x;
    CombinedRow<kPrefix> row;
    if (!all_whole) row.find(d, cut, x);
    if (!kPrefix) grid_dependency_wait();  // in every block: so the end of this kernel is also the end of those before it
    if (all_whole) return;
#pragma unroll 1
    while (true) {
        if (row.is_merged()) {
            WarpShare<kParts, kWarps, kUnit> share;
            if (kPrefix) share.read(d, row.prefix, warp, lane);
            share.read(d, row.pieces, row.tile_row, warp, lane);
#pragma unroll
            for (int part = 0; part < kParts; ++part) o_of[warp][32 * part + lane] = share.o[part];
            if (lane == 0) max_of[warp] = share.row_max, sum_of[warp] = share.row_sum;
            __syncthreads();
            float weight[kWarps], row_max = -FLT_MAX, row_sum = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, max_of[w]);
#pragma unroll
            for (int w = 0; w < kWarps; ++w) weight[w] = exponential_of<kUnit>(max_of[w] - row_max), row_sum += weight[w] * sum_of[w];
            const RowEnd end = finish_row<kUnit>(row_max, row_sum, sink_of(p.sinks, row.head));
            if (p.lse && threadIdx.x == 0)
                p.lse[(int64_t(row.b) * p.nheads + row.head) * p.seqlen_q + row.i] = end.lse * (kUnit == ScoreUnit::kLog2 ? kLn2 : 1.0f);
            const int64_t out = row.b * p.out.batch + row.i * p.out.row + row.head * p.out.head;
            if (const int column = 4 * threadIdx.x; column < p.headdim_v) {
                float4 y{};
#pragma unroll
                for (int w = 0; w < kWarps; ++w) {
                    const float4 o = o_of[w][threadIdx.x];
                    y.x += weight[w] * o.x, y.y += weight[w] * o.y, y.z += weight[w] * o.z, y.w += weight[w] * o.w;
                }
                store_columns(p, out + column, y, end.inverse);
            }
            __syncthreads();
        }
        x += gridDim.x;
        if (x >= rows) return;
        row.find(d, cut, x);
    }
}

// Neighbouring rows of a tile, of one unit.
template <bool kPrefix>
struct Neighbours {
    int b, head_k, first_row, count;  // first_row, count: among the (seqlen_q * group) rows of a key head
    int tile_row;                     // of the first row
    UnitPieces pieces;
    bool merged;

    __device__ __forceinline__ void find(const DecodeParams& d, const Cut& cut, int most, int groups_of_unit, int index) {
        const int row_tiles = d.shape.row_tiles, of_call = index / groups_of_unit;
        b = d.units.divide(of_call);
        const int unit = of_call - b * d.heads();
        head_k = unit / row_tiles, tile_row = (index - of_call * groups_of_unit) * most;
        first_row = (unit - head_k * row_tiles) * d.shape.rows + tile_row;
        count = min(min(most, d.shape.rows - tile_row), d.attention.seqlen_q * d.attention.group - first_row);
        merged = false;
        if (kPrefix && count <= 0) return;  // rows of the tile that the unit does not have
        pieces = pieces_of(d, cut, b, unit);
        const bool shares = kPrefix && d.prefix.keys[b] > 0;
        if (shares) pieces = with_whole_slot(d, pieces, b, unit);
        merged = pieces.count != 1 || shares;
    }
};

struct RowsParams {
    DecodeParams decode;
    int neighbours;  // rows per warp
};
template <int kParts, bool kPrefix>  // parts of 128 columns
__global__ void __launch_bounds__(kThreads) combine_rows_kernel(const __grid_constant__ RowsParams params) {
    const DecodeParams& d = params.decode;
    const AttentionParams& p = d.attention;
    const int lane = threadIdx.x % 32, most = params.neighbours, groups_of_unit = groups_of(d.shape, most),
              groups = p.batch * d.heads() * groups_of_unit;
    if (kPrefix) grid_dependency_wait();
    const Cut cut(d);
    const bool all_whole = all_are_whole<kPrefix>(d, cut);
    int x = blockIdx.x * kWarps + threadIdx.x / 32;
    Neighbours<kPrefix> rows;
    if (!all_whole && x < groups) rows.find(d, cut, most, groups_of_unit, x);
    if (!kPrefix) grid_dependency_wait();
    if (all_whole) return;
#pragma unroll 1
    while (x < groups) {
#pragma unroll 1
        for (int j = 0; j < rows.count && rows.merged; ++j) {
            WarpShare<kParts, 1> share;
            if (kPrefix)
                share.read(d, prefix_pieces(d.prefix, rows.b, rows.head_k, rows.first_row + j, p.seqlen_q * p.group, p.nheads_k), 0, lane);
            share.read(d, rows.pieces, rows.tile_row + j, 0, lane);
            const int row = rows.first_row + j, query = d.group.divide(row), head = rows.head_k * p.group + d.group.remainder(row, query);
            const RowEnd end = finish_row<ScoreUnit::kLog2>(share.row_max, share.row_sum, sink_of(p.sinks, head));
            if (p.lse && lane == 0) p.lse[(int64_t(rows.b) * p.nheads + head) * p.seqlen_q + query] = end.lse * kLn2;
            const int64_t out = rows.b * p.out.batch + query * p.out.row + head * p.out.head;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int column = 128 * part + 4 * lane;
                if (column < p.headdim_v) store_columns(p, out + column, share.o[part], end.inverse);
            }
        }
        x += gridDim.x * kWarps;
        if (x < groups) rows.find(d, cut, most, groups_of_unit, x);
    }
}

}  // namespace

namespace {

template <bool kPrefix, int kParts>
cudaError_t launch_combine(const DecodeParams& d, int64_t most_blocks, const DeviceInfo& device, cudaStream_t stream) {
    const AttentionParams& p = d.attention;
    const int64_t rows = int64_t(p.batch) * p.seqlen_q * p.nheads;
    const bool late = device.compute >= 90;
    // The two kernels add up the pieces of a row in different orders. With batch_invariant, and for natural scores, always the same kernel
    // runs, with many blocks. It runs, too, for rows of more than 256 columns, which take too many registers of a warp.
    constexpr int kInvariantBlocks = 16;  // blocks per multiprocessor
    const bool natural = decode_scores_are_natural(p), invariant = p.cache.batch_invariant || natural || kParts > 2;
    if (invariant) most_blocks = std::max<int64_t>(most_blocks, kInvariantBlocks * device.multiprocessors);
    if constexpr (kParts <= 2) {
        if (rows > most_blocks && !invariant) {  // one block per row would not run at once
            const RowsParams params{d, int(std::clamp<int64_t>(rows / (kWarps * most_blocks), 1, 4))};
            const int64_t groups = groups_of(d.shape, params.neighbours) * decode_units(d.shape, p);
            const unsigned blocks = unsigned(std::min((groups + kWarps - 1) / kWarps, most_blocks));
            return launch_kernel(combine_rows_kernel<kParts, kPrefix>, blocks, kThreads, 0, stream, params, late);
        }
    }
    const unsigned blocks = unsigned(std::min(rows, most_blocks));
    if constexpr (!kPrefix) {
        if (natural) return launch_kernel(combine_kernel<kParts, false, ScoreUnit::kNatural>, blocks, kThreads, 0, stream, d, late);
    }
    return launch_kernel(combine_kernel<kParts, kPrefix>, blocks, kThreads, 0, stream, d, late);
}

}  // namespace

cudaError_t decode_combine(const DecodeParams& d, int64_t most_blocks, const DeviceInfo& device, cudaStream_t stream) {
    const int columns = d.attention.headdim_v;
    if (d.prefix.keys)
        return columns > 128 ? launch_combine<true, 2>(d, most_blocks, device, stream)
                             : launch_combine<true, 1>(d, most_blocks, device, stream);
    if (columns > 256) return launch_combine<false, 4>(d, most_blocks, device, stream);
    return columns > 128 ? launch_combine<false, 2>(d, most_blocks, device, stream)
                         : launch_combine<false, 1>(d, most_blocks, device, stream);
}

}  // namespace fa
