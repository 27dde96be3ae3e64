// naive.cu: standard attention in three steps, with all of S in memory. The first rung, and the baseline of every speed-up.
//
//     S = scores of q k^T      one thread per score
//     P = softmax(S)           one warp per row, in place; key_sums, where wanted, and dropout are separate kernels after it
//     out = P v                one thread per output element
//
// The workspace holds (batch, nheads, seqlen_q, seqlen_k) float32. Bound by memory traffic: S is written once, read and written by the
// softmax, and read again. Each thread loads its own operands, so every byte of K and V comes from cache once per query row.
#include "attention/common/dropout.h"
#include "attention/common/epilogue.cuh"
#include "attention/common/key_rows.cuh"
#include "attention/common/mask.h"
#include "attention/common/max_score.cuh"
#include "attention/common/online_softmax.cuh"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kTile = 16;  // threads of a block: kTile x kTile
constexpr int kThreads = kTile * kTile;
constexpr int kWarp = 32;

__device__ float* score_row(const AttentionParams& p, int b, int head, int i) {
    return static_cast<float*>(p.workspace) + ((int64_t(b) * p.nheads + head) * p.seqlen_q + i) * p.seqlen_k;
}

// The tile, head and sequence of a block in a flat grid of (batch, nheads, row tiles, column tiles).
struct Tile {
    int b, head, row, column;
};
__device__ Tile tile_of_block(const AttentionParams& p, int columns) {
    const int column_tiles = (columns + kTile - 1) / kTile, row_tiles = (p.seqlen_q + kTile - 1) / kTile;
    int index = blockIdx.x;
    Tile tile;
    tile.column = index % column_tiles * kTile + threadIdx.x % kTile, index /= column_tiles;
    tile.row = index % row_tiles * kTile + threadIdx.x / kTile, index /= row_tiles;
    tile.head = index % p.nheads, tile.b = index / p.nheads;
    return tile;
}

template <typename T, typename KeyRows>
__global__ void __launch_bounds__(kThreads) scores_kernel(const __grid_constant__ AttentionParams p) {
    const Tile t = tile_of_block(p, p.seqlen_k);
    const Sequence s = sequence_of(p, t.b);
    if (t.row >= s.seqlen_q || t.column >= s.seqlen_k) return;
    const KeyRange range = key_range(p, s, t.row);
    float score = -INFINITY;
    if (t.column >= range.begin && t.column < range.end) {
        const T* q = static_cast<const T*>(p.q.data) + s.q + t.head * p.q.head + t.row * p.q.row;
        const KeyRows k(p, p.k, p.cache.k_scale, s.k, t.b, t.head / p.group);
        float dot = 0;
        for (int d = 0; d < p.headdim; ++d) dot = fmaf(to_float(q[d]), k(t.column, d), dot);
        score = transform_score(p, s, t.b, t.head, t.row, t.column, dot);
    }
    score_row(p, t.b, t.head, t.row)[t.column] = score;
}

__global__ void __launch_bounds__(kThreads) softmax_kernel(const __grid_constant__ AttentionParams p) {
    const int64_t index = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp, i = int(index % p.seqlen_q), head = int(index / p.seqlen_q % p.nheads);
    const int b = int(index / p.seqlen_q / p.nheads);
    if (b >= p.batch) return;
    const Sequence s = sequence_of(p, b);
    if (i >= s.seqlen_q) return;
    float* row = score_row(p, b, head, i);

    SoftmaxRow softmax;
    float row_max = -INFINITY;
    for (int j = lane; j < s.seqlen_k; j += kWarp) row_max = fmaxf(row_max, row[j]);
    softmax.max = reduce_max<kWarp>(row_max);
    const float base = softmax.max == -INFINITY ? 0.0f : softmax.max;
    for (int j = lane; j < s.seqlen_k; j += kWarp) softmax.sum += row[j] = exp_nonpositive(row[j] - base);
    const RowEnd end = finish_row<ScoreUnit::kNatural>(softmax.max, reduce_sum<kWarp>(softmax.sum), sink_of(p.sinks, head));
    for (int j = lane; j < s.seqlen_k; j += kWarp) row[j] *= end.inverse;
    if (lane == 0 && p.lse) p.lse[lse_offset(p, s, head) + i] = end.lse;
    if (p.max_score) raise_max_score(p, b, head, softmax.max);
}

// One thread per key, before dropout.
__global__ void __launch_bounds__(kThreads) key_sums_kernel(const __grid_constant__ AttentionParams p) {
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int j = int(index % p.seqlen_k), head = int(index / p.seqlen_k % p.nheads), b = int(index / p.seqlen_k / p.nheads);
    if (b >= p.batch) return;
    const Sequence s = sequence_of(p, b);
    if (j >= s.seqlen_k) return;
    float sum = 0;
    for (int i = 0; i < s.seqlen_q; ++i) sum += score_row(p, b, head, i)[j];
    p.key_sums[key_sums_offset(p, b, head) + j] = sum;
}

__global__ void __launch_bounds__(kThreads) dropout_kernel(const __grid_constant__ AttentionParams p) {
    const Tile t = tile_of_block(p, p.seqlen_k);
    const Sequence s = sequence_of(p, t.b);
    if (t.row >= s.seqlen_q || t.column >= s.seqlen_k) return;
    float& P = score_row(p, t.b, t.head, t.row)[t.column];
    P = dropped(p, dropout_block(p, t.b, t.head, t.row, t.column), t.column) ? 0.0f : P * p.dropout_scale;
}

template <typename T, typename KeyRows>
__global__ void __launch_bounds__(kThreads) output_kernel(const __grid_constant__ AttentionParams p) {
    const Tile t = tile_of_block(p, p.headdim_v);
    const Sequence s = sequence_of(p, t.b);
    if (t.row >= s.seqlen_q || t.column >= p.headdim_v) return;
    const float* P = score_row(p, t.b, t.head, t.row);
    const KeyRows v(p, p.v, p.cache.v_scale, s.v, t.b, t.head / p.group);
    float sum = 0;
    for (int j = 0; j < s.seqlen_k; ++j)
        if (P[j] != 0) sum = fmaf(P[j], v(j, t.column), sum);  // a masked key's V may hold NaN, and 0 x NaN is NaN
    static_cast<T*>(p.out.data)[s.out + t.head * p.out.head + t.row * p.out.row + t.column] = from_float<T>(sum);
}

unsigned tiles(int64_t columns, const AttentionParams& p) {
    return unsigned((columns + kTile - 1) / kTile * ((p.seqlen_q + kTile - 1) / kTile) * p.nheads * p.batch);
}

}  // namespace

size_t forward_naive_workspace(const AttentionParams& p, const DeviceInfo&) {
    return size_t(p.batch) * p.nheads * p.seqlen_q * p.seqlen_k * sizeof(float) + alignof(float);
}

template <typename T, typename KeyRows>
static cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
    cudaError_t error = p.max_score ? clear_max_score(p, nullptr, stream) : cudaSuccess;
    if (error == cudaSuccess && p.seqlen_k > 0)
        error = launch_kernel(scores_kernel<T, KeyRows>, tiles(p.seqlen_k, p), kThreads, 0, stream, p);
    const int64_t rows = int64_t(p.batch) * p.nheads * p.seqlen_q, rows_per_block = kThreads / kWarp;
    if (error == cudaSuccess)
        error = launch_kernel(softmax_kernel, unsigned((rows + rows_per_block - 1) / rows_per_block), kThreads, 0, stream, p);
    if (p.key_sums && p.seqlen_k > 0 && error == cudaSuccess) {
        const int64_t keys = int64_t(p.batch) * p.nheads * p.seqlen_k;
        error = launch_kernel(key_sums_kernel, unsigned((keys + kThreads - 1) / kThreads), kThreads, 0, stream, p);
    }
    if (p.dropout_threshold && p.seqlen_k > 0 && error == cudaSuccess)
        error = launch_kernel(dropout_kernel, tiles(p.seqlen_k, p), kThreads, 0, stream, p);
    if (error == cudaSuccess) error = launch_kernel(output_kernel<T, KeyRows>, tiles(p.headdim_v, p), kThreads, 0, stream, p);
    return error;
}

cudaError_t forward_naive(const AttentionParams& params, const DeviceInfo&, cudaStream_t stream) {
    AttentionParams p = params;
    p.workspace = align_up(p.workspace, alignof(float));
    return with_dtype(p.dtype, [&](auto zero) {
        using T = decltype(zero);
        return p.strided_keys() ? launch<T, StridedRows<T>>(p, stream) : launch<T, CachedRows<T>>(p, stream);
    });
}

}  // namespace fa
