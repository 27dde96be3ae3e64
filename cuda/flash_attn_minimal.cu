// flash_attn_minimal.cu: FlashAttention on one page. The first file to read, and the path that always works.
//
//     out = softmax(q k^T * softmax_scale + ...) v,   one block of threads per 64 query rows of one head,
//
// without ever holding a whole row of scores: keys come in tiles of 64, and a row's softmax is corrected as its maximum grows
// (FlashAttention-2, Dao 2023, algorithm 1):
//
//     row_max, row_sum, O = -inf, 0, 0
//     for each tile of keys K, V:
//         S       = scores of Q K^T                        64 x 64, in registers
//         new_max = max(row_max, rowmax(S))
//         P       = exp(S - new_max)                       so no exponential exceeds 1
//         scale   = exp(row_max - new_max)                 rescales the sums so far to the new maximum
//         row_sum = scale row_sum + rowsum(P)
//         O       = scale O + P V
//     out = O / row_sum,   lse = row_max + log(row_sum)
//
// New against attention/forward/naive.cu: S never reaches memory, so memory is O(seqlen), and every byte of K and V that a block loads
// serves 64 rows. Plain CUDA cores and fp32 arithmetic; any head dim, dtype, stride and option. Bound by fp32 FMA throughput and
// the shared-memory reads that feed it: 16 FMAs for two 16-byte reads. Tensor cores are the next rung: attention/forward/mma_sm80/entry.cu.
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

constexpr int kTile = 64;          // queries per block, keys per step, and head-dim columns per chunk
constexpr int kThreads = 256;      // 16 x 16 threads, each owning 4 rows x 4 columns of every 64 x 64 tile
constexpr int kPitch = kTile + 4;  // 8 threads reading 16 bytes from 8 neighbouring rows hit 32 different banks
constexpr int kFewChunks = 2;      // head dims up to 128: the registers leave room for a second block on the multiprocessor
constexpr int kMaxChunks = 512 / kTile;

// One head-dim chunk of an operand at a time, so any head dim needs the same shared memory.
struct Smem {
    float q[kTile][kPitch];   // 64 query rows, one chunk of columns
    float kv[kTile][kPitch];  // 64 keys of K, then of V, one chunk of columns
    float p[kTile][kPitch];   // probabilities; a row is written and read by the same warp
    int visible[kTile];       // does any row of this block see this key?
};

// tile[r][c] = rows(row0 + r, column0 + c); zero where keep(r) is false or the column is past the head dim.
template <typename Rows, typename Keep>
__device__ void load_tile(float (*tile)[kPitch], const Rows& rows, int row0, int column0, int columns, const Keep& keep) {
    constexpr int kRowsAtOnce = kThreads / kTile;
    const int first = threadIdx.x / kTile, c = threadIdx.x % kTile;
    const bool inside = column0 + c < columns;
#pragma unroll Rows::kUnroll
    for (int x = 0; x < kTile; x += kRowsAtOnce) {
        const int r = first + x;
        tile[r][c] = inside && keep(r) ? rows(row0 + r, column0 + c) : 0.0f;
    }
}

__device__ void fma4(float& sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    sum = fmaf(a.w, b.w, sum);
}

// The options of a score. Not inlined: the call on the rare path leaves the registers to the common path.
__device__ __noinline__ float general_score(const AttentionParams& p, const Sequence& s, int b, int head, int i, int j, float dot) {
    return transform_score(p, s, b, head, i, j, dot);
}

// Whether dropout drops the pair (i, j). Not inlined for the same reason.
__device__ __noinline__ bool drops(const AttentionParams& p, int b, int head, int i, int j) {
    return dropped(p, dropout_block(p, b, head, i, j), j);
}

// kChunksV: head-dim chunks of V and of the output that the registers hold, 16 floats of a thread each; chunks past headdim_v are skipped.
// KeyRows: how K and V are addressed, see key_rows.cuh.
template <typename T, int kChunksV, typename KeyRows>
__global__ void __launch_bounds__(kThreads, kChunksV == kFewChunks ? 2 : 1) attention_kernel(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    // Blocks start in order of their index. Under a causal mask the last query tiles have the most keys, so they come first.
    const int heads = p.nheads * p.batch, tiles = gridDim.x / heads;
    const int head = blockIdx.x % p.nheads, b = blockIdx.x / p.nheads % p.batch;
    const int row0 = (tiles - 1 - blockIdx.x / heads) * kTile;
    const Sequence s = sequence_of(p, b);
    if (row0 >= s.seqlen_q) return;

    const StridedRows<T> q(p, p.q, {}, s.q, b, head);
    const KeyRows k(p, p.k, p.cache.k_scale, s.k, b, head / p.group), v(p, p.v, p.cache.v_scale, s.v, b, head / p.group);
    const int last_row = min(row0 + kTile, s.seqlen_q) - 1;
    const int first_key = key_range(p, s, row0).begin / kTile * kTile, end_key = key_range(p, s, last_row).end;
    const int chunks = (p.headdim + kTile - 1) / kTile;
    const bool general = p.general_scores();

    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;  // rows 4 ty .. + 3; keys tx + 16 c; columns 64 chunk + 4 tx .. + 3
    KeyRange range[4];
    SoftmaxRow row[4];
    float O[kChunksV][4][4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int i = row0 + 4 * ty + r;
        range[r] = i < s.seqlen_q ? key_range(p, s, i) : KeyRange{0, 0};
    }
    const auto load_q = [&](int chunk) {
        load_tile(smem.q, q, row0, chunk * kTile, p.headdim, [&](int r) { return row0 + r <= last_row; });
    };
    if (chunks == 1) load_q(0);

    for (int key0 = first_key; key0 < end_key; key0 += kTile) {
        // ---- S = Q K^T, chunk by chunk of the head dim ----
        float S[4][4] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (chunks > 1) load_q(chunk);
            load_tile(smem.kv, k, key0, chunk * kTile, p.headdim, [&](int r) { return key0 + r < end_key; });
            if (threadIdx.x < kTile) smem.visible[threadIdx.x] = 0;
            __syncthreads();
#pragma unroll 4
            for (int d = 0; d < kTile; d += 4) {
                float4 a[4], c[4];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    a[x] = *reinterpret_cast<const float4*>(&smem.q[4 * ty + x][d]);
                    c[x] = *reinterpret_cast<const float4*>(&smem.kv[tx + 16 * x][d]);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r)
#pragma unroll
                    for (int x = 0; x < 4; ++x) fma4(S[r][x], a[r], c[x]);
            }
            __syncthreads();
        }

        // ---- scale, options and mask; then the softmax of this tile ----
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int i = row0 + 4 * ty + r;
            float scale;
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int j = key0 + tx + 16 * x;
                if (j < range[r].begin || j >= range[r].end) S[r][x] = -INFINITY;
                else S[r][x] = general ? general_score(p, s, b, head, i, j, S[r][x]) : S[r][x] * p.scale;
                if (S[r][x] != -INFINITY) smem.visible[tx + 16 * x] = 1;
            }
            scale = row[r].update(S[r], [](float x) { return reduce_max<16>(x); });
#pragma unroll
            for (int x = 0; x < 4; ++x) smem.p[4 * ty + r][tx + 16 * x] = S[r][x];
#pragma unroll
            for (int chunk = 0; chunk < kChunksV; ++chunk)
#pragma unroll
                for (int x = 0; x < 4; ++x) O[chunk][r][x] *= scale;
        }
        if (p.dropout_threshold) {
#pragma unroll 1
            for (int e = 0; e < 16; ++e) {  // each of this thread's places in P
                const int r = 4 * ty + e / 4, c = tx + e % 4 * 16;
                smem.p[r][c] = drops(p, b, head, row0 + r, key0 + c) ? 0.0f : smem.p[r][c] * p.dropout_scale;
            }
        }
        __syncthreads();  // Wait until all warps have written visible[]; P alone would need only __syncwarp.

        // ---- O += P V, chunk by chunk of the output ----
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk) {
            if (chunk * kTile >= p.headdim_v) break;
            // A key nobody sees has P = 0, but 0 x NaN is NaN: its V row must not be read.
            load_tile(smem.kv, v, key0, chunk * kTile, p.headdim_v, [&](int r) { return smem.visible[r]; });
            __syncthreads();
#pragma unroll 4
            for (int j = 0; j < kTile; j += 4) {
                float4 a[4], c[4];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    a[x] = *reinterpret_cast<const float4*>(&smem.p[4 * ty + x][j]);
                    c[x] = *reinterpret_cast<const float4*>(&smem.kv[j + x][4 * tx]);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    fma4(O[chunk][r][0], a[r], make_float4(c[0].x, c[1].x, c[2].x, c[3].x));
                    fma4(O[chunk][r][1], a[r], make_float4(c[0].y, c[1].y, c[2].y, c[3].y));
                    fma4(O[chunk][r][2], a[r], make_float4(c[0].z, c[1].z, c[2].z, c[3].z));
                    fma4(O[chunk][r][3], a[r], make_float4(c[0].w, c[1].w, c[2].w, c[3].w));
                }
            }
            __syncthreads();
        }
    }

    // ---- out = O / row_sum ----
    T* out = static_cast<T*>(p.out.data) + s.out + head * p.out.head + row0 * p.out.row;
    const float sink = sink_of(p.sinks, head);
    if (p.max_score) raise_max_score(p, b, head, fmaxf(fmaxf(row[0].max, row[1].max), fmaxf(row[2].max, row[3].max)));
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int i = row0 + 4 * ty + r;
        const RowEnd end = finish_row<ScoreUnit::kNatural>(row[r].max, reduce_sum<16>(row[r].sum), sink);
        if (i > last_row) continue;
        if (tx == 0 && p.lse) p.lse[lse_offset(p, s, head) + i] = end.lse;
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int d = chunk * kTile + 4 * tx + x;
                if (d < p.headdim_v) out[(4 * ty + r) * p.out.row + d] = from_float<T>(end.output(O[chunk][r][x]));
            }
    }
}

template <typename T, int kChunksV>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
    const int tiles = (p.seqlen_q + kTile - 1) / kTile;
    const auto kernel = p.strided_keys() ? attention_kernel<T, kChunksV, StridedRows<T>> : attention_kernel<T, kChunksV, CachedRows<T>>;
    if (p.max_score)
        if (const cudaError_t error = clear_max_score(p, nullptr, stream)) return error;
    return launch_kernel(kernel, unsigned(tiles * p.nheads * p.batch), kThreads, sizeof(Smem), stream, p);
}

}  // namespace

cudaError_t forward_minimal(const AttentionParams& p, const DeviceInfo&, cudaStream_t stream) {
    return with_dtype(p.dtype, [&](auto zero) {
        using T = decltype(zero);
        return p.headdim_v <= kFewChunks * kTile ? launch<T, kFewChunks>(p, stream) : launch<T, kMaxChunks>(p, stream);
    });
}

}  // namespace fa
