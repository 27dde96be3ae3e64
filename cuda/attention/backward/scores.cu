// scores.cu: dbias and dsinks, the gradients of terms that are added to a score or its denominator, next to any GPU kernel for dq, dk and
// dv.
//
//     dbias_ij = sum of P_ij (dP_ij - delta_i)        over the batch entries, heads and rows that share the bias element
//     dsink    = -sum_i exp(sink - lse_i) delta_i     over all rows of the head
//
// A block owns a 64 x 64 tile of dbias, or 64 keys of its only row where rows are broadcast. It walks over all pairs that are summed into
// the tile, in one fixed order, and computes S and dP again for each: no atomics, and the same bits every time. Bound like simple.cu, with
// two products instead of seven.
#include "attention/backward/common/score_gradient.cuh"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"
#include "attention/common/simple_tiles.cuh"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

struct Smem {
    Tile<kTile> queries, keys;  // one chunk of columns
    Query query[kTile];
    float part[kThreads / 16][kTile];  // where rows are broadcast: each is the sum of four rows
};

int64_t tiles(int64_t rows) { return (rows + kTile - 1) / kTile; }

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) bias_kernel(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(16) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const AttentionParams& p = b.forward;
    const bool own_rows = b.dbias.row != 0;
    const int heads = b.dbias.head ? p.nheads : 1, key_tiles = (p.seqlen_k + kTile - 1) / kTile;
    const int row_tiles = own_rows ? (p.seqlen_q + kTile - 1) / kTile : 1;
    unsigned index = blockIdx.x;
    const int key0 = index % key_tiles * kTile;
    index /= key_tiles;
    const int row0 = index % row_tiles * kTile;
    index /= row_tiles;
    const int own_head = index % heads, own_batch = index / heads;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    float sum[4][4] = {};  // of key 4 tx + c and query 4 ty + r of the tile, or of all queries at that place in a tile
    for (int batch = own_batch; batch < (b.dbias.batch ? own_batch + 1 : p.batch); ++batch) {
        const Sequence s = sequence_of(p, batch);
        const int last_key = min(key0 + kTile, s.seqlen_k) - 1;
        if (key0 > last_key) continue;
        // Queries that see one of these keys, among the tile's own rows or among all.
        const int begin = max(query_range(p, s, key0).begin, row0);
        const int end = min(query_range(p, s, last_key).end, own_rows ? row0 + kTile : s.seqlen_q);
        for (int head = own_head; head < (b.dbias.head ? own_head + 1 : p.nheads); ++head) {
            const Rows<T> q(p.q, s.q, head, p.headdim), dout(b.dout, gradients_of(b, batch).dout, head, p.headdim_v);
            const Rows<T> k(p.k, s.k, head / p.group, p.headdim), v(p.v, s.v, head / p.group, p.headdim_v);
            for (int i0 = own_rows ? row0 : begin; i0 < end; i0 += kTile) {
                const auto product = [&](float(&S)[4][4], const Rows<T>& queries, const Rows<T>& keys) {
                    for (int chunk = 0; chunk < queries.chunks(); ++chunk) {
                        __syncthreads();
                        load_tile(smem.queries, queries, i0, chunk, [&](int r) { return i0 + r >= begin && i0 + r < end; });
                        load_tile(smem.keys, keys, key0, chunk, [&](int r) { return key0 + r <= last_key; });
                        __syncthreads();
                        multiply_rows(S, smem.queries, smem.keys, tx, ty);
                    }
                };
                __syncthreads();
                load_queries(smem.query, kTile, p, rows_of_call(p), s, head, i0);
                float S[4][4] = {}, dP[4][4] = {};
                product(S, q, k);
                product(dP, dout, v);
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const Query query = smem.query[4 * ty + r];
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int i = i0 + 4 * ty + r, j = key0 + 4 * tx + c;
                        if (j < query.begin || j >= query.end) continue;
                        const PairWeight pair = general_weight(p, s.shift, batch, head, i, j, S[r][c], query.max, query.rest);
                        sum[r][c] += score_gradient(p, pair.weight, pair.P, dP[r][c], query.delta);
                    }
                }
            }
        }
    }

    float* const dbias = b.dbias.data + own_batch * b.dbias.batch + own_head * b.dbias.head + row0 * b.dbias.row + key0;
    const auto store = [&](int row, int key, float value) {
        if (row0 + row >= (own_rows ? p.seqlen_q : 1) || key0 + key >= p.seqlen_k) return;
        float& element = dbias[row * b.dbias.row + key];
        element = b.accumulate ? element + value : value;
    };
    if (own_rows) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) store(4 * ty + r, 4 * tx + c, sum[r][c]);
        return;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) smem.part[ty][4 * tx + c] = sum[0][c] + sum[1][c] + sum[2][c] + sum[3][c];
    __syncthreads();
    if (threadIdx.x >= kTile) return;
    float all = 0;
    for (int part = 0; part < kThreads / 16; ++part) all += smem.part[part][threadIdx.x];
    store(0, threadIdx.x, all);
}

// One block per head. Sums are double, because a head has as many rows as the batch has tokens.
__global__ void __launch_bounds__(kThreads) sinks_kernel(const __grid_constant__ BackwardParams b) {
    __shared__ double part[kThreads];
    const AttentionParams& p = b.forward;
    const int head = blockIdx.x;
    const float sink = p.sinks[head];
    const RowsOfCall rows = rows_of_call(p);
    double sum = 0;
    for (int batch = 0; batch < p.batch && sink != -INFINITY; ++batch) {
        const Sequence s = sequence_of(p, batch);
        const int64_t row0 = lse_offset(p, s, head);
        for (int i = threadIdx.x; i < s.seqlen_q; i += kThreads) {
            if (p.lse[row0 + i] == -INFINITY) continue;
            const float2 base = rows.bases[row0 + i];
            const float above = p.general_scores() ? sink - base.x : fmaf(-base.x, p.scale, sink);  // base.x is a score or a product
            sum -= double(exp_nonpositive(above - base.y)) * rows.delta[row0 + i];
        }
    }
    part[threadIdx.x] = sum;
    for (int width = kThreads / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) part[threadIdx.x] += part[threadIdx.x + width];
    }
    if (threadIdx.x == 0) b.dsinks[head] = float(part[0] + (b.accumulate ? b.dsinks[head] : 0));
}

}  // namespace

size_t backward_scores_workspace(const BackwardParams& b, const DeviceInfo&) {
    if (!b.dbias.data && !b.dsinks) return 0;
    return rows_of_call_bytes(b.forward);
}

int64_t backward_scores_blocks(const BackwardParams& b) {
    const AttentionParams& p = b.forward;
    if (!b.dbias.data) return b.dsinks ? p.nheads : 0;
    return int64_t(b.dbias.batch ? p.batch : 1) * (b.dbias.head ? p.nheads : 1) * (b.dbias.row ? tiles(p.seqlen_q) : 1) * tiles(p.seqlen_k);
}

cudaError_t backward_scores(const BackwardParams& params, const DeviceInfo&, cudaStream_t stream) {
    BackwardParams b = params;
    if (!b.dbias.data && !b.dsinks) return cudaSuccess;
    b.forward.workspace = align_up(params.forward.workspace, alignof(float2));
    const RowsOfCall rows = rows_of_call(b.forward);
    cudaError_t error = backward_delta(b, rows.delta, rows.bases, stream);
    if (error == cudaSuccess && b.dsinks) error = launch_kernel(sinks_kernel, unsigned(b.forward.nheads), kThreads, 0, stream, b);
    const int64_t blocks = backward_scores_blocks(b);
    if (error != cudaSuccess || !b.dbias.data || blocks == 0) return error;
    return with_dtype(b.forward.dtype, [&](auto zero) {
        return launch_kernel(bias_kernel<decltype(zero)>, unsigned(blocks), kThreads, sizeof(Smem), stream, b);
    });
}

}  // namespace fa
