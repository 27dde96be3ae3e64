// key_sums.cu: for each key, the sum of its probabilities over the query rows; any head dim, dtype, mask, option and stride. It runs after
// a forward kernel and uses the lse that this has left.
//
//     key_sums_j = sum_i exp(S_ij - lse_i)
//
// A block owns 64 keys of one query head and walks over the queries that see them, 64 at a time, in one fixed order: no atomics, and the
// same bits every time. CUDA cores and fp32 arithmetic, with the same bound as flash_attn_minimal.cu. key_sums_sm80.cu does the same on
// tensor cores.
#include <algorithm>

#include "attention/common/large_rows.cuh"
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
    float part[kThreads / 16][kTile];
};

// Writes the RowBase of every row to the workspace, laid out like lse: 0 and lse, or what large_rows.cuh finds. One warp per row.
template <typename T>
__global__ void __launch_bounds__(kThreads) bases_kernel(const __grid_constant__ AttentionParams p) {
    const int64_t rows = int64_t(p.batch) * p.nheads * p.seqlen_q, first = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    for (int64_t row = first; row < rows; row += int64_t(gridDim.x) * (kThreads / 32)) {
        const int i = int(row % p.seqlen_q), head = int(row / p.seqlen_q % p.nheads), b = int(row / p.seqlen_q / p.nheads);
        const Sequence s = sequence_of(p, b);
        if (i >= s.seqlen_q) continue;
        const int64_t place = lse_offset(p, s, head) + i;
        RowBase base{0.0f, p.lse[place]};
        if (is_large(base.rest)) base = large_row<T>(p, s, b, head, i, ScoreForm::kOptions, LseCovers::kKeysOfCall);
        if (threadIdx.x % 32 == 0) static_cast<float2*>(p.workspace)[place] = make_float2(base.max, base.rest);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) key_sums_kernel(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    // Under a causal mask the first keys are seen by the most queries, so they come first.
    const int heads = p.nheads * p.batch, key0 = blockIdx.x / heads * kTile;
    const int head = blockIdx.x % p.nheads, b = blockIdx.x / p.nheads % p.batch;
    const Sequence s = sequence_of(p, b);
    if (key0 >= s.seqlen_k) return;
    const int last_key = min(key0 + kTile, s.seqlen_k) - 1;
    const int begin = query_range(p, s, key0).begin, end = query_range(p, s, last_key).end;
    const Rows<T> q(p.q, s.q, head, p.headdim), k(p.k, s.k, head / p.group, p.headdim);
    const float2* const bases = static_cast<const float2*>(p.workspace) + lse_offset(p, s, head);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    float sum[4] = {};  // of key 4 tx + c, over queries 4 ty .. 4 ty + 3 of every tile
    for (int i0 = begin; i0 < end; i0 += kTile) {
        float S[4][4] = {};
        for (int chunk = 0; chunk < q.chunks(); ++chunk) {
            __syncthreads();
            load_tile(smem.queries, q, i0, chunk, [&](int r) { return i0 + r < end; });
            load_tile(smem.keys, k, key0, chunk, [&](int r) { return key0 + r <= last_key; });
            __syncthreads();
            multiply_rows(S, smem.queries, smem.keys, tx, ty);
        }
        float part[4] = {};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int i = i0 + 4 * ty + r;
            if (i >= end) continue;
            const float2 base = bases[i];
            if (base.y == -INFINITY) continue;
            const KeyRange seen = key_range(p, s, i);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int j = key0 + 4 * tx + c;
                if (j >= seen.begin && j < seen.end)
                    part[c] += exp_nonpositive((transform_score(p, s, b, head, i, j, S[r][c]) - base.x) - base.y);
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += part[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) smem.part[ty][4 * tx + c] = sum[c];
    __syncthreads();
    if (threadIdx.x > last_key - key0) return;
    float all = 0;
    for (int part = 0; part < kThreads / 16; ++part) all += smem.part[part][threadIdx.x];
    p.key_sums[key_sums_offset(p, b, head) + key0 + threadIdx.x] = all;
}

}  // namespace

int64_t key_sums_blocks(const AttentionParams& p) { return (int64_t(p.seqlen_k) + kTile - 1) / kTile * p.nheads * p.batch; }

cudaError_t key_sums(const AttentionParams& p, const DeviceInfo&, cudaStream_t stream) {
    const int64_t rows = int64_t(p.batch) * p.nheads * p.seqlen_q, rows_per_block = kThreads / 32;
    return with_dtype(p.dtype, [&](auto zero) {
        if (rows > 0) {
            const int64_t blocks = std::min((rows + rows_per_block - 1) / rows_per_block, kMostRowBlocks);
            if (const cudaError_t error = launch_kernel(bases_kernel<decltype(zero)>, unsigned(blocks), kThreads, 0, stream, p))
                return error;
        }
        return launch_kernel(key_sums_kernel<decltype(zero)>, unsigned(key_sums_blocks(p)), kThreads, sizeof(Smem), stream, p);
    });
}

}  // namespace fa
