// cuda_cores.cu: the kernel of flash_attn_minimal.cu without its options, in the shapes and orders that the experiments compare: tiles of
// other sizes; FlashAttention-1's order of the loops; counters of the online softmax.
//
//     v2 order, a block for each tile of rows             v1 order, a block for each head (or for a part of its rows)
//         for each tile of keys K, V                          for each tile of keys K, V            read once by the block
//             S = Q K^T;  softmax;  O += P V                      for each tile of rows
//         out = O / row_sum                                           S = Q K^T;  softmax;  O += P V
//     O and the statistics stay in registers                      Q, O and the statistics pass through memory for each pair of tiles
//
// Threads: 16 lanes share a row, a thread has 4 rows. Keys of a thread: tx + 16 c. Columns of the head dim: 64 chunk + 4 tx .. + 3.
#include "attention/common/epilogue.cuh"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"
#include "common/element.cuh"
#include "device/launch.h"
#include "ladder/variants/variant.h"

namespace fa {
namespace {

using T = __nv_bfloat16;
constexpr int kChunk = 64, kPitch = kChunk + 4;  // columns of the head dim in shared memory at a time
constexpr int kLanes = 16;                       // lanes that share a row
constexpr int threads_of(int rows) { return rows / 4 * kLanes; }

template <int kRows, int kKeys>
struct Smem {
    float q[kRows][kPitch];
    float kv[kKeys][kPitch];
    float p[kRows][kKeys + 4];
};

// tile[r][c] = element (row0 + r, column0 + c) of a head; zeros from row `end` on.
template <int kTileRows, int kThreads, int kTilePitch>
__device__ __forceinline__ void load_chunk(float (&tile)[kTileRows][kTilePitch], const T* head, int64_t stride, int row0, int end,
                                           int column0, int to = 0) {
    constexpr int kRowsAtOnce = kThreads / kChunk;
    const int c = threadIdx.x % kChunk;
#pragma unroll 4
    for (int r = threadIdx.x / kChunk; r < kTileRows; r += kRowsAtOnce)
        tile[r][to + c] = row0 + r < end ? to_float(head[(row0 + r) * stride + column0 + c]) : 0.0f;
}

__device__ __forceinline__ void fma4(float& sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum), sum = fmaf(a.y, b.y, sum), sum = fmaf(a.z, b.z, sum), sum = fmaf(a.w, b.w, sum);
}

// S += the product of a chunk of Q and one of K. `a`, `b`: rows of Q and keys, from the chunk's first column on.
template <int kCount, int kPitchA, int kPitchB>
__device__ __forceinline__ void multiply_qk(float (&S)[4][kCount], const float (*a)[kPitchA], const float (*b)[kPitchB], int column, int tx,
                                            int ty) {
#pragma unroll 4
    for (int d = 0; d < kChunk; d += 4) {
        float4 q[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) q[r] = *reinterpret_cast<const float4*>(&a[4 * ty + r][d]);
#pragma unroll
        for (int x = 0; x < kCount; ++x) {
            const float4 k = *reinterpret_cast<const float4*>(&b[tx + kLanes * x][column + d]);
#pragma unroll
            for (int r = 0; r < 4; ++r) fma4(S[r][x], q[r], k);
        }
    }
}
// O += the product of P and a chunk of V.
template <int kKeys, int kPitchP, int kPitchV>
__device__ __forceinline__ void multiply_pv(float (&O)[4][4], const float (*p)[kPitchP], const float (*v)[kPitchV], int column, int tx,
                                            int ty) {
#pragma unroll 4
    for (int j = 0; j < kKeys; j += 4) {
        float4 a[4], c[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            a[x] = *reinterpret_cast<const float4*>(&p[4 * ty + x][j]);
            c[x] = *reinterpret_cast<const float4*>(&v[j + x][column + 4 * tx]);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            fma4(O[r][0], a[r], make_float4(c[0].x, c[1].x, c[2].x, c[3].x));
            fma4(O[r][1], a[r], make_float4(c[0].y, c[1].y, c[2].y, c[3].y));
            fma4(O[r][2], a[r], make_float4(c[0].z, c[1].z, c[2].z, c[3].z));
            fma4(O[r][3], a[r], make_float4(c[0].w, c[1].w, c[2].w, c[3].w));
        }
    }
}

// The head that a block works on, and that head's tensors.
struct Head {
    Sequence s;
    int b, head;
    const T *q, *k, *v;
    T* out;

    __device__ __forceinline__ Head(const AttentionParams& p, int index)
        : b(index / p.nheads),
          head(index % p.nheads),
          q(static_cast<const T*>(p.q.data)),
          k(static_cast<const T*>(p.k.data)),
          v(static_cast<const T*>(p.v.data)),
          out(static_cast<T*>(p.out.data)) {
        s = sequence_of(p, b);
        q += s.q + head * p.q.head, k += s.k + head / p.group * p.k.head, v += s.v + head / p.group * p.v.head;
        out += s.out + head * p.out.head;
    }
};

// out and lse of this thread's four rows, from row0 + 4 ty on.
template <int kD>
__device__ __forceinline__ void finish(const AttentionParams& p, const Head& h, const SoftmaxRow (&row)[4],
                                       const float (&O)[kD / kChunk][4][4], int row0, int tx, int ty) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int i = row0 + 4 * ty + r;
        const RowEnd end = finish_row<ScoreUnit::kNatural>(row[r].max, reduce_sum<kLanes>(row[r].sum));
        if (i >= h.s.seqlen_q) continue;
        if (tx == 0 && p.lse) p.lse[lse_offset(p, h.s, h.head) + i] = end.lse;
#pragma unroll
        for (int chunk = 0; chunk < kD / kChunk; ++chunk)
#pragma unroll
            for (int x = 0; x < 4; ++x) h.out[i * p.out.row + chunk * kChunk + 4 * tx + x] = from_float<T>(O[chunk][r][x] * end.inverse);
    }
}

// Scores of keys from key0 on: scaled, and -inf from the end of their row on.
template <int kCount>
__device__ __forceinline__ void scale_and_mask(float (&S)[4][kCount], const int (&end)[4], float scale, int key0, int tx) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int x = 0; x < kCount; ++x) S[r][x] = key0 + tx + kLanes * x < end[r] ? S[r][x] * scale : -INFINITY;
}

// ---- v2 order ----

enum class Walk { kFirstKeysFirst, kLastKeysFirst };  // the order of the tiles of keys
enum class Counters { kOff, kOn };                    // whether the rows write fa_softmax_row to the workspace

template <int kD, int kRows, int kKeys, Walk kWalk, Counters kCounters>
__global__ void __launch_bounds__(threads_of(kRows), 1) v2_kernel(const __grid_constant__ AttentionParams p) {
    constexpr int kThreads = threads_of(kRows), kChunks = kD / kChunk, kCount = kKeys / kLanes;
    extern __shared__ __align__(16) unsigned char shared[];
    Smem<kRows, kKeys>& smem = *reinterpret_cast<Smem<kRows, kKeys>*>(shared);
    const int heads = p.nheads * p.batch, tiles = gridDim.x / heads;
    const Head h(p, blockIdx.x % heads);
    const int row0 = (tiles - 1 - blockIdx.x / heads) * kRows;  // under a causal mask the last rows see most keys, so they come first
    const int last_row = min(row0 + kRows, h.s.seqlen_q) - 1, end_key = key_range(p, h.s, last_row).end;
    const int tx = threadIdx.x % kLanes, ty = threadIdx.x / kLanes, key_tiles = (end_key + kKeys - 1) / kKeys;

    int end[4];
    SoftmaxRow row[4];
    float O[kChunks][4][4] = {};
    [[maybe_unused]] float first_max[4], lazy_max[4];
    [[maybe_unused]] uint32_t moved[4] = {}, rescales[4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) end[r] = row0 + 4 * ty + r <= last_row ? key_range(p, h.s, row0 + 4 * ty + r).end : 0;
    if (kChunks == 1) load_chunk<kRows, kThreads>(smem.q, h.q, p.q.row, row0, last_row + 1, 0);

    for (int n = 0; n < key_tiles; ++n) {
        const int key0 = (kWalk == Walk::kFirstKeysFirst ? n : key_tiles - 1 - n) * kKeys;
        float S[4][kCount] = {};
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (kChunks > 1) load_chunk<kRows, kThreads>(smem.q, h.q, p.q.row, row0, last_row + 1, chunk * kChunk);
            load_chunk<kKeys, kThreads>(smem.kv, h.k, p.k.row, key0, end_key, chunk * kChunk);
            __syncthreads();
            multiply_qk(S, smem.q, smem.kv, 0, tx, ty);
            __syncthreads();
        }
        scale_and_mask(S, end, p.scale, key0, tx);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float before = row[r].max;
            const float scale = row[r].update(S[r], [](float x) { return reduce_max<kLanes>(x); });
            if constexpr (kCounters == Counters::kOn) {
                const float now = row[r].max;
                if (before == -INFINITY) {  // the row's first keys
                    first_max[r] = lazy_max[r] = now;
                } else {
                    moved[r] += now > before;
                    const bool far = (now - lazy_max[r]) * kLog2e > 8.0f;
                    rescales[r] += far, lazy_max[r] = far ? now : lazy_max[r];
                }
            }
#pragma unroll
            for (int x = 0; x < kCount; ++x) smem.p[4 * ty + r][tx + kLanes * x] = S[r][x];
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                for (int x = 0; x < 4; ++x) O[chunk][r][x] *= scale;
        }
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            load_chunk<kKeys, kThreads>(smem.kv, h.v, p.v.row, key0, end_key, chunk * kChunk);
            __syncthreads();
            multiply_pv<kKeys>(O[chunk], smem.p, smem.kv, 0, tx, ty);
            __syncthreads();
        }
    }
    if constexpr (kCounters == Counters::kOn) {
        fa_softmax_row* rows = static_cast<fa_softmax_row*>(p.workspace) + (int64_t(h.b) * p.nheads + h.head) * p.seqlen_q;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int i = row0 + 4 * ty + r;
            if (tx != 0 || i > last_row) continue;
            const bool seen = row[r].max != -INFINITY;
            rows[i] = {uint32_t(key_tiles), moved[r], rescales[r], seen ? (row[r].max - first_max[r]) * kLog2e : 0.0f};
        }
    }
    finish<kD>(p, h, row, O, row0, tx, ty);
}

// ---- v1 order ----

// O and the statistics of every row between its visits.
template <int kD>
struct RowState {
    float O[kD];
    float max, sum;
    float pad[2];  // whole 16 bytes
};

constexpr int kTile = 64;  // rows and keys: the tile of the minimal kernel

template <int kD>
struct V1Smem {
    float k[kTile][kD + 4], v[kTile][kD + 4];  // stay for all rows
    float q[kTile][kPitch];                    // a chunk
    float p[kTile][kTile + 4];
};

// Block x of `parts` blocks of a head takes tiles of rows x, x + parts, ...
template <int kD>
__global__ void __launch_bounds__(threads_of(kTile), 1) v1_kernel(const __grid_constant__ AttentionParams p, int parts) {
    constexpr int kThreads = threads_of(kTile), kChunks = kD / kChunk, kCount = kTile / kLanes;
    extern __shared__ __align__(16) unsigned char shared[];
    V1Smem<kD>& smem = *reinterpret_cast<V1Smem<kD>*>(shared);
    const int index = blockIdx.x / parts, part = blockIdx.x % parts;
    const Head h(p, index);
    const int tx = threadIdx.x % kLanes, ty = threadIdx.x / kLanes;
    const int row_tiles = (h.s.seqlen_q + kTile - 1) / kTile, end_key = key_range(p, h.s, h.s.seqlen_q - 1).end;
    RowState<kD>* const state = static_cast<RowState<kD>*>(p.workspace) + int64_t(index) * p.seqlen_q;
    const auto end_of = [&](int row0) { return key_range(p, h.s, min(row0 + kTile, h.s.seqlen_q) - 1).end; };

    for (int m = part; m < row_tiles; m += parts) {  // no tile of keys visits rows that see no key
        const SoftmaxRow none[4];
        const float zero[kChunks][4][4] = {};
        if (end_of(m * kTile) == 0) finish<kD>(p, h, none, zero, m * kTile, tx, ty);
    }
    for (int key0 = 0; key0 < end_key; key0 += kTile) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            load_chunk<kTile, kThreads>(smem.k, h.k, p.k.row, key0, end_key, chunk * kChunk, chunk * kChunk);
            load_chunk<kTile, kThreads>(smem.v, h.v, p.v.row, key0, end_key, chunk * kChunk, chunk * kChunk);
        }
        for (int m = part; m < row_tiles; m += parts) {
            const int row0 = m * kTile, end_tile = end_of(row0);
            if (key0 >= end_tile) continue;  // hidden by the causal mask
            float S[4][kCount] = {};
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                load_chunk<kTile, kThreads>(smem.q, h.q, p.q.row, row0, h.s.seqlen_q, chunk * kChunk);
                __syncthreads();
                multiply_qk(S, smem.q, smem.k, chunk * kChunk, tx, ty);
                __syncthreads();
            }
            int end[4];
            SoftmaxRow row[4];
            float O[kChunks][4][4] = {};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int i = row0 + 4 * ty + r;
                end[r] = i < h.s.seqlen_q ? key_range(p, h.s, i).end : 0;
                if (key0 == 0 || i >= h.s.seqlen_q) continue;
                row[r].max = state[i].max, row[r].sum = tx == 0 ? state[i].sum : 0.0f;  // a thread's sum is its share
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    const float4 o = *reinterpret_cast<const float4*>(&state[i].O[chunk * kChunk + 4 * tx]);
                    O[chunk][r][0] = o.x, O[chunk][r][1] = o.y, O[chunk][r][2] = o.z, O[chunk][r][3] = o.w;
                }
            }
            scale_and_mask(S, end, p.scale, key0, tx);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float scale = row[r].update(S[r], [](float x) { return reduce_max<kLanes>(x); });
#pragma unroll
                for (int x = 0; x < kCount; ++x) smem.p[4 * ty + r][tx + kLanes * x] = S[r][x];
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                    for (int x = 0; x < 4; ++x) O[chunk][r][x] *= scale;
            }
            __syncthreads();
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) multiply_pv<kTile>(O[chunk], smem.p, smem.v, chunk * kChunk, tx, ty);
            if (key0 + kTile >= end_tile) {
                finish<kD>(p, h, row, O, row0, tx, ty);
            } else {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int i = row0 + 4 * ty + r;
                    const float sum = reduce_sum<kLanes>(row[r].sum);
                    if (i >= h.s.seqlen_q) continue;
                    if (tx == 0) state[i].max = row[r].max, state[i].sum = sum;
#pragma unroll
                    for (int chunk = 0; chunk < kChunks; ++chunk)
                        *reinterpret_cast<float4*>(&state[i].O[chunk * kChunk + 4 * tx]) =
                            make_float4(O[chunk][r][0], O[chunk][r][1], O[chunk][r][2], O[chunk][r][3]);
                }
                __syncwarp();  // lane 0's statistics are read by the sixteen lanes of the row at the next visit
            }
        }
        __syncthreads();  // all have read K, V
    }
}

// ---- the table ----

size_t no_workspace(const AttentionParams&, int) { return 0; }
size_t counters_workspace(const AttentionParams& p, int) { return sizeof(fa_softmax_row) * p.batch * p.nheads * p.seqlen_q; }
template <int kD>
size_t state_workspace(const AttentionParams& p, int) {
    return sizeof(RowState<kD>) * p.batch * p.nheads * p.seqlen_q;
}

template <int kD, int kRows, int kKeys, Walk kWalk = Walk::kFirstKeysFirst, Counters kCounters = Counters::kOff>
Variant v2_variant(std::string name, const char* experiment, int order, std::string about) {
    Variant v;
    v.name = std::move(name), v.experiment = experiment, v.kernel = "minimal", v.about = std::move(about), v.order = order;
    v.headdim = kD, v.tile_m = kRows, v.tile_n = kKeys, v.threads = threads_of(kRows), v.shared_bytes = sizeof(Smem<kRows, kKeys>);
    v.function = reinterpret_cast<const void*>(v2_kernel<kD, kRows, kKeys, kWalk, kCounters>);
    v.aligned_workspace = kCounters == Counters::kOn;
    v.workspace = kCounters == Counters::kOn ? counters_workspace : no_workspace;
    v.launch = [](const AttentionParams& p, int, cudaStream_t stream) {
        const int tiles = (p.seqlen_q + kRows - 1) / kRows;
        return launch_kernel(v2_kernel<kD, kRows, kKeys, kWalk, kCounters>, unsigned(tiles * p.nheads * p.batch), threads_of(kRows),
                             sizeof(Smem<kRows, kKeys>), stream, p);
    };
    return v;
}

template <int kD, bool kOneBlock>
Variant v1_variant(std::string name, const char* experiment, int order, std::string about) {
    Variant v;
    v.name = std::move(name), v.experiment = experiment, v.kernel = "minimal", v.about = std::move(about), v.order = order;
    v.headdim = kD, v.tile_m = v.tile_n = kTile, v.threads = threads_of(kTile), v.shared_bytes = sizeof(V1Smem<kD>);
    v.function = reinterpret_cast<const void*>(v1_kernel<kD>);
    v.aligned_workspace = true;
    v.workspace = state_workspace<kD>;
    v.launch = [](const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
        const int heads = p.nheads * p.batch, tiles = (p.seqlen_q + kTile - 1) / kTile, most = (2 * multiprocessors + heads - 1) / heads;
        const int parts = kOneBlock ? 1 : most < tiles ? most : tiles;  // blocks for twice the multiprocessors, a tile of rows each or more
        return launch_kernel(v1_kernel<kD>, unsigned(heads * parts), threads_of(kTile), sizeof(V1Smem<kD>), stream, LaunchOptions{}, p,
                             parts);
    };
    return v;
}

template <int kD, int kRows, int kKeys>
void add_tile(Variants* variants, int order) {
    variants->push_back(v2_variant<kD, kRows, kKeys>("minimal_" + tile_text(kD, kRows, kKeys), "block-size", order,
                                                     std::to_string(kRows) + " rows x " + std::to_string(kKeys) + " keys a tile"));
}

template <int kD>
void add_all(Variants* variants) {
    const std::string d = "_d" + std::to_string(kD);
    add_tile<kD, 16, 16>(variants, 1), add_tile<kD, 16, 64>(variants, 2), add_tile<kD, 32, 32>(variants, 3);
    add_tile<kD, 32, 128>(variants, 4), add_tile<kD, 64, 16>(variants, 5), add_tile<kD, 64, 64>(variants, 6);
    add_tile<kD, 64, 128>(variants, 7), add_tile<kD, 128, 32>(variants, 8), add_tile<kD, 128, 128>(variants, 9);
    add_tile<kD, 256, 64>(variants, 10);

    variants->push_back(v1_variant<kD, true>("order_v1" + d, "traffic", 1, "keys outside, rows inside: a block for each head"));
    variants->push_back(v1_variant<kD, false>("order_v1_parts" + d, "traffic", 2, "the same; several blocks of a head share its rows"));
    variants->push_back(v2_variant<kD, kTile, kTile>("order_v2" + d, "traffic", 3, "rows outside, keys inside: out is written once"));

    variants->push_back(v1_variant<kD, true>("forward_02_v1_order" + d, "optimisation", 2,
                                             "FlashAttention-1: S stays on the chip, tile by tile; O passes through memory"));
    variants->push_back(
        v2_variant<kD, kTile, kTile>("forward_03_v2_order" + d, "optimisation", 3,
                                     "FlashAttention-2: rows outside; O stays in registers, a block for each tile of rows"));

    variants->push_back(v2_variant<kD, kTile, kTile, Walk::kFirstKeysFirst, Counters::kOn>(
        "softmax_first_keys_first" + d, "online-softmax", 1, "counts how often a row's maximum moves, over tiles of 64 keys"));
    variants->push_back(v2_variant<kD, kTile, kTile, Walk::kLastKeysFirst, Counters::kOn>(
        "softmax_last_keys_first" + d, "online-softmax", 2, "the same; from the last tile of keys to the first, as the fast kernels walk"));
}

}  // namespace

void add_cuda_core_variants(Variants* variants) { add_all<64>(variants), add_all<128>(variants); }

}  // namespace fa
