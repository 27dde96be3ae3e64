// key_sums_sm80.cu: for each key, the sum of its probabilities over the query rows, on tensor cores; fp16 and bf16, head dims up to 256,
// every option, every GPU from sm_80 on. It runs after a forward kernel and uses its lse: P = exp(S - lse) is only known once a row is
// complete, so S is computed a second time.
//
//     S^T = K Q^T            P^T = exp(S^T - lse)            key_sums = P^T 1
//
// A block owns 128 keys of one query head and walks over the queries that see them, 64 at a time. Each of its four warps owns 32 keys:
//   - The K of a warp stays in registers as A fragments for the whole walk, so shared memory has to deliver only Q: 128 bytes per mma.
//   - S is transposed, so the sum of a key is a sum within a thread and, at the end, over the four lanes of a quad. No other warp or block
//     contributes to it: no atomics, and the same bits every time.
//   - cp.async copies the next tile of queries while this one is computed. Before the first tile, K arrives through the same buffers.
//
// Bound by the tensor cores at head dims from 128 on, and by the exponentials below that. It makes half the products of the forward pass.
#include "attention/common/general_scores.cuh"
#include "attention/common/large_rows.cuh"
#include "attention/common/mask.h"
#include "attention/common/shared_tile.cuh"
#include "attention/common/tiles_mma_sm80.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "common/element.cuh"
#include "device/launch.h"
#include "device/mma.cuh"

namespace fa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kWarpKeys = 32, kMmas = kWarpKeys / 16;  // keys of a warp
constexpr int kBlockN = kWarps * kWarpKeys;            // keys of a block
constexpr int kBlockM = 64;                            // queries of a tile
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

enum class Scores { kPlain, kGeneral };  // kGeneral: every option, and rows that do not start on 16 bytes

struct KeySumsParams {
    AttentionParams attention;
    int tiles;    // of keys, of one head
    int section;  // heads whose blocks run side by side and share Q in L2
    float scale_log2;
    CallStatistics statistics;
    bool aligned_q, aligned_k;
};

template <typename T, int kD>
struct Smem {
    alignas(128) T q[2][kBlockM * kD];  // before the first tile, both together hold K
    // In units of log2, or kLargeRow (large_rows.cuh). +inf for rows that see no key or do not exist: their P is 0.
    float lse[2][kBlockM];
};
static_assert(2 * kBlockM == kBlockN, "K takes the place of two tiles of Q");

// Applies the options of a score to a tile of S^T: -inf where mask or bias hides the pair. Element e of S[m][n] is key + 16 m + 8 (e / 2),
// row + 8 n + e % 2. The arithmetic is that of transform_fragment.
template <typename T, int kTiles>
__device__ __forceinline__ void transform_scores(const AttentionParams& p, const Sequence& s, int b, int head, int row, int key,
                                                 float (&S)[kMmas][kTiles][4]) {
    const auto each = [&](const auto& apply) {  // apply(element, its row, its key), rows outermost
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int x = 0; x < 2 * kMmas; ++x) apply(S[x / 2][n][x % 2 * 2 + e], 8 * n + e, 8 * x);
    };
    const float inverse = p.softcap != 0 ? 1.0f / p.softcap : 0.0f;
    each([&](float& score, int, int) { score = __fmul_rn(score, p.scale); });
    if (p.softcap != 0) each([&](float& score, int, int) { score = p.softcap * tanh_fast(score * inverse); });
    if (p.alibi_slopes) {
        const float slope = p.alibi_slopes[b * p.alibi_batch + head];
        const int distance = row + s.shift - key;
        each([&](float& score, int i, int j) { score -= slope * fabsf(float(distance + i - j)); });
    }
    const auto exists = [&](int i, int j) { return row + i < s.seqlen_q && key + j < s.seqlen_k; };
    if (p.bias.data) {
        const int64_t first = b * p.bias.batch + head * p.bias.head + row * p.bias.row + key;
        const auto add = [&](const auto* data) {
            each([&](float& score, int i, int j) {
                if (!exists(i, j)) return;
                const float bias = to_float(data[first + i * p.bias.row + j]);
                score = bias == -INFINITY ? bias : score + bias;
            });
        };
        if (p.bias_dtype == DType::kFloat32) add(static_cast<const float*>(p.bias.data));
        else add(static_cast<const T*>(p.bias.data));
    }
    if (p.mask.data) {
        const uint8_t* const mask =
            static_cast<const uint8_t*>(p.mask.data) + b * p.mask.batch + head * p.mask.head + row * p.mask.row + key;
        each([&](float& score, int i, int j) {
            if (exists(i, j) && !mask[i * p.mask.row + j]) score = -INFINITY;
        });
    }
    if (p.intervals.data) {
        const int32_t* const numbers = row_indices_of(p, b, head) + key * p.intervals.key;
#pragma unroll
        for (int x = 0; x < 2 * kMmas; ++x) {
            if (key + 8 * x >= s.seqlen_k) continue;
            const HiddenRows hidden = hidden_rows(p, numbers + 8 * x * p.intervals.key);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (hidden.hides(row + 8 * n + e)) S[x / 2][n][x % 2 * 2 + e] = -INFINITY;
        }
    }
    if (p.blocks.data)
        each([&](float& score, int i, int j) {
            if (exists(i, j) && block_hides(p, b, head, row + i, key + j)) score = -INFINITY;
        });
}

template <typename T, int kD, Scores kScores>
__global__ void __launch_bounds__(kThreads, (kD == 64 || kD == 128) && kScores == Scores::kPlain ? 3 : 2)
    key_sums_kernel(const __grid_constant__ KeySumsParams params) {
    constexpr bool kGeneral = kScores == Scores::kGeneral;
    constexpr int kSteps = kD / 16, kColumns = kD <= 128 ? kBlockM : kBlockM / 2, kTiles = kColumns / 8;  // queries of one S
    using Tile = SharedTile<T, kD>;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<Smem<T, kD>*>(shared);
    const AttentionParams& p = params.attention;

    // Blocks start in order of their index: section by section and, in a section, the first keys of every head first, because under a
    // causal mask the most rows see them.
    const int first_head = blockIdx.x / (params.section * params.tiles) * params.section,
              index = blockIdx.x % (params.section * params.tiles);
    const int heads = min(params.section, p.nheads * p.batch - first_head), sequence_head = first_head + index % heads;
    const int b = sequence_head / p.nheads, head = sequence_head % p.nheads, key0 = index / heads * kBlockN;
    const Sequence s = sequence_of(p, b);
    if (key0 >= s.seqlen_k) return;
    const int last_key = min(key0 + kBlockN, s.seqlen_k) - 1;
    const QueryRange first_sees = query_range(p, s, key0), last_sees = query_range(p, s, last_key);
    const int begin = first_sees.begin, end = last_sees.end;  // rows that see some of the keys; those from last_sees.begin to
                                                              // first_sees.end see all of them
    const int first_tile = begin / kBlockM, last_tile = end > begin ? (end - 1) / kBlockM : first_tile - 1;

    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const T* const q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head;
    const T* const k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head + key0 * p.k.row;
    const float* const lse = params.statistics.lse + lse_offset(p, s, head);
    const auto load_q = [&](int tile, int stage) {
        const int row0 = tile * kBlockM;
        load_tile<kBlockM, kD, kThreads, kGeneral>(smem.q[stage], q + row0 * p.q.row, p.q.row, begin - row0, end - row0, p.headdim,
                                                   params.aligned_q);
    };
    const auto lse_of = [&](int tile) {  // the lse of this thread's row of the tile
        const int i = tile * kBlockM + threadIdx.x;
        return threadIdx.x < kBlockM && i >= begin && i < end ? lse[i] : INFINITY;
    };

    uint32_t K[kSteps][kMmas][4];
    if (first_tile <= last_tile) {
        load_tile<kBlockN, kD, kThreads, kGeneral>(smem.q[0], k, p.k.row, 0, s.seqlen_k - key0, p.headdim, params.aligned_k);
        const float first_lse = lse_of(first_tile);
        if (threadIdx.x < kBlockM) smem.lse[0][threadIdx.x] = first_lse;
        cp_async_wait_all();
        __syncthreads();
        const uint32_t k_lane = shared_address(smem.q) + Tile::offset(warp * kWarpKeys + lane % 16, lane / 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int m = 0; m < kMmas; ++m) ldmatrix_x4(K[step][m], Tile::advance(k_lane, step) + 16 * m * Tile::kPitch);
        __syncthreads();
        load_q(first_tile, 0);
    }

    const uint32_t q_lane = shared_address(smem.q) + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    float sum[kMmas][2] = {};
    int stage = 0;
#pragma unroll 1
    for (int tile = first_tile; tile <= last_tile; ++tile, stage ^= 1) {
        cp_async_wait_all();
        __syncthreads();  // Q and lse of this tile are here; nobody reads the previous tile any more
        const int row0 = tile * kBlockM;
        // Rows past the last are zeros with lse = +inf, so their P is 0 unless a key is NaN. That matters only for keys that a mask hides,
        // so only general scores cut these rows off.
        const bool more = tile < last_tile,
                   cut = row0 < last_sees.begin || (kGeneral ? row0 + kBlockM : min(row0 + kBlockM, end)) > first_sees.end;
        float next_lse = 0;
        if (more) load_q(tile + 1, stage ^ 1), next_lse = lse_of(tile + 1);

        float part[kMmas][2] = {};  // of this tile: summing short sums keeps more digits
#pragma unroll
        for (int column = 0; column < kBlockM; column += kColumns) {
            const uint32_t q_columns = q_lane + stage * uint32_t(sizeof smem.q[0]) + column * Tile::kPitch;
            float S[kMmas][kTiles][4] = {};
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int n = 0; n < kTiles; n += 2) {
                    uint32_t B[4];
                    ldmatrix_x4(B, Tile::advance(q_columns, step) + 8 * n * Tile::kPitch);
#pragma unroll
                    for (int m = 0; m < kMmas; ++m) {
                        mma<T>(S[m][n], K[step][m], B[0], B[1]);
                        mma<T>(S[m][n + 1], K[step][m], B[2], B[3]);
                    }
                }

            const int here = opaque(lane);  // values that few tiles need are computed where they are used
            const int row = row0 + column + mma_column(here, 0), key = key0 + warp * kWarpKeys + mma_row(here, 0);
            if constexpr (kGeneral) transform_scores<T>(p, s, b, head, row, key, S);
            const float unit = kGeneral ? kLog2e : params.scale_log2;
            const float* const lse_columns = smem.lse[stage] + column + mma_column(lane, 0);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const float2 base = *reinterpret_cast<const float2*>(lse_columns + 8 * n);
                if (is_large_row(base.x) || is_large_row(base.y)) {
                    const float2* const large = params.statistics.large + (lse - params.statistics.lse) + row + 8 * n;
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (!is_large_row(e ? base.y : base.x)) continue;
                        const float2 own = large[e];
#pragma unroll
                        for (int x = 0; x < 2 * kMmas; ++x) {
                            float& score = S[x / 2][n][x % 2 * 2 + e];
                            score = large_score(score, own);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < kMmas; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) S[m][n][i] = exp2_approx(fmaf(S[m][n][i], unit, -(i % 2 ? base.y : base.x)));
            }
            if (cut) {
#pragma unroll
                for (int x = 0; x < 2 * kMmas; ++x) {
                    const QueryRange seen = query_range(p, s, key + 8 * x);
#pragma unroll
                    for (int n = 0; n < kTiles; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (row + 8 * n + e < seen.begin || row + 8 * n + e >= seen.end) S[x / 2][n][x % 2 * 2 + e] = 0;
                }
            }
#pragma unroll
            for (int x = 0; x < 2 * kMmas; ++x)
#pragma unroll
                for (int n = 0; n < kTiles; ++n) part[x / 2][x % 2] += S[x / 2][n][x % 2 * 2] + S[x / 2][n][x % 2 * 2 + 1];
        }
#pragma unroll
        for (int x = 0; x < 2 * kMmas; ++x) sum[x / 2][x % 2] += part[x / 2][x % 2];
        if (more && threadIdx.x < kBlockM) smem.lse[stage ^ 1][threadIdx.x] = next_lse;
    }

    float* const to = p.key_sums + key_sums_offset(p, b, head);
#pragma unroll
    for (int x = 0; x < 2 * kMmas; ++x) {
        const float all = quad_sum(sum[x / 2][x % 2]);
        const int key = key0 + warp * kWarpKeys + 8 * x + mma_row(lane, 0);
        if (lane % 4 == 0 && key < s.seqlen_k) to[key] = all;
    }
}

template <typename T, int kD>
cudaError_t launch_bucket(const AttentionParams& p, cudaStream_t stream) {
    KeySumsParams params{};
    params.attention = p, params.scale_log2 = p.scale * kLog2e;
    params.aligned_q = aligned_rows<T>(p, p.q, p.nheads, p.headdim), params.aligned_k = aligned_rows<T>(p, p.k, p.nheads_k, p.headdim);
    const int64_t heads = int64_t(p.nheads) * p.batch, section = heads_per_section(p.seqlen_q, kD * int64_t(sizeof(T)), 1);
    params.tiles = (p.seqlen_k + kBlockN - 1) / kBlockN;
    params.section = int(section < heads ? section : heads);
    const bool plain = p.scale > 0 && !(p.softcap != 0 || p.alibi_slopes || p.may_hide_keys()) && params.aligned_q && params.aligned_k;
    const auto kernel = plain ? key_sums_kernel<T, kD, Scores::kPlain> : key_sums_kernel<T, kD, Scores::kGeneral>;
    params.statistics.large = static_cast<float2*>(p.workspace);
    params.statistics.lse = reinterpret_cast<float*>(params.statistics.large + row_count(p));
    if (const cudaError_t error = launch_row_statistics<T>(p, params.statistics, !plain, LseCovers::kKeysOfCall, stream)) return error;
    return launch_kernel(kernel, unsigned(params.tiles * heads), kThreads, sizeof(Smem<T, kD>), stream, params);
}

template <typename T>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
    if (p.headdim <= 64) return launch_bucket<T, 64>(p, stream);
    if (p.headdim <= 96) return launch_bucket<T, 96>(p, stream);
    if (p.headdim <= 128) return launch_bucket<T, 128>(p, stream);
    if (p.headdim <= 192) return launch_bucket<T, 192>(p, stream);
    return launch_bucket<T, 256>(p, stream);
}

}  // namespace

cudaError_t key_sums_sm80(const AttentionParams& p, const DeviceInfo&, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace fa
