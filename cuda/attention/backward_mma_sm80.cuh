// backward_mma_sm80.cuh: the gradients of attention on tensor cores, for every GPU from sm_80 on; fp16 and bf16, head dims up to 256, every
// option. Five products of a tile of S, mma.sync all of them:
//
//     S = Q K^T      P = exp(S - lse)      dP = dO V^T      dS = P (dP - delta)      dV += P^T dO      dK += dS^T Q      dQ += dS K
//
// Three kernels run one after another:
//     before   delta = rowsum(dO * O), lse with +inf for rows that see nothing (their P is then 0), and zeros for the sums of dQ
//     main     a block owns the keys of one tile and walks the queries of every head that reads them: dK and dV stay in registers, and dQ
//              is added to float32 sums in the workspace, a tile in fragment order so that a warp adds to neighbouring addresses
//     after    dQ = scale x the sums, rounded
// With `deterministic` no sum depends on timing: main leaves dQ to a kernel of its own, whose blocks own queries and walk keys, at the
// price of computing S and dP twice.
//
// One step of the main kernel, two stages (|: block barrier). The warps share out each product by themselves: P and dS pass through shared
// memory, from warps that own rows of S to warps that own rows of dK and dV, and between the barriers warps drift apart.
//
//     copy     | Q, dO of the next tile of queries  .  .  .  .  .  .  .  .  |
//     tensor   | S = Q K^T   dP = dO V^T          | dV += P^T dO   dK += dS^T Q   dQ = dS K |
//     ALU      |             exp2 exp2 exp2   dS  |                                     add |
//
// Shared memory (MainSmem)      K, V block_n | Q, dO stages x block_m | P, dS block_m x block_n | lse, delta stages x block_m
// Tiles are swizzled (SharedTile): neither ldmatrix nor the copies nor the stores of P and dS have bank conflicts.
//
// A tile that causal or window cut has code of its own, which skips what is hidden; every other one runs without a branch.
// tiles_mma_sm80.h chooses the tiles by the bytes that ldmatrix reads for an mma.
#pragma once

#include "attention/general_scores.cuh"
#include "attention/mask.h"
#include "attention/shared_tile.cuh"
#include "attention/tiles_mma_sm80.h"
#include "device/launch.h"
#include "device/mma.cuh"

namespace fa {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// Rows of Q in the workspace: tiles of block_m rows, each sequence from a tile of its own on. Of every head and tile the float32 sums of
// dQ, block_m x d, and block_m values of lse and of delta.
struct BackwardWorkspace {
    float *dq, *rows;
    int tiles;  // of one head
};

struct MmaBackwardParams {
    BackwardParams backward;
    BackwardWorkspace workspace;
    int tiles_q, tiles_k;   // of one head of the longest sequence
    int section;            // KV heads per section, see tiles_mma_sm80.h
    int block_m, tiles_dq;  // for the kernel that computes dQ alone: rows of a workspace tile, its own tiles of one head
    bool aligned_q, aligned_k, aligned_v, aligned_out, aligned_dout, aligned_dq, aligned_dk, aligned_dv;
};

// The first tile of a sequence within a head's: floor(q0 / block_m) + b leaves every sequence before it whole tiles enough.
__device__ __forceinline__ int first_tile_of(const MmaBackwardParams& params, int block_m, int b) {
    const AttentionParams& p = params.backward.forward;
    return p.cu_seqlens_q ? clamp_to(p.cu_seqlens_q[b], 0, p.total_q) / block_m + b : b * params.tiles_q;
}
__device__ __forceinline__ int64_t workspace_tile(const MmaBackwardParams& params, int block_m, int b, int head, int tile) {
    return int64_t(head) * params.workspace.tiles + first_tile_of(params, block_m, b) + tile;
}

struct BackwardWork {
    int b, head_k, key0;
};

template <typename T, BackwardTile const& kTile, int kD, int kDv>
struct MainSmem {
    alignas(128) T k[kTile.block_n * kD];
    alignas(128) T v[kTile.block_n * kDv];
    alignas(128) T q[kTile.stages_q][kTile.block_m * kD];
    alignas(128) T dout[kTile.stages_dout][kTile.block_m * kDv];
    alignas(128) T p[kTile.block_m * kTile.block_n];
    alignas(128) T ds[kTile.block_m * kTile.block_n];
    alignas(16) float lse_delta[kTile.stages_q][2][kTile.block_m];
    // What every step needs of the block, so that it takes no registers between.
    BackwardWork work;
    KeyRange rows, whole_rows;  // that see some keys of this block, that see all of them
    int first_tile, last_tile;  // of these rows
    const T *q_rows, *dout_rows;
    float *sums, *stats;  // of head 0 in the workspace
};

// Keys [begin, end) that some row of the sequence sees through causal and window.
__device__ __forceinline__ KeyRange keys_seen(const AttentionParams& p, const Sequence& s) {
    if (s.seqlen_q == 0) return {0, 0};
    const int begin = key_range(p, s, 0).begin;
    return {begin, max(begin, key_range(p, s, s.seqlen_q - 1).end)};
}

// Rows [begin, end) that see some of the keys key0 .. last_key.
__device__ __forceinline__ KeyRange rows_seeing(const AttentionParams& p, const Sequence& s, int key0, int last_key) {
    int64_t begin = 0, end = s.seqlen_q;
    if (p.window_right >= 0 && int64_t(key0) - s.shift - p.window_right > begin) begin = int64_t(key0) - s.shift - p.window_right;
    if (p.window_left >= 0 && int64_t(last_key) - s.shift + p.window_left + 1 < end) end = int64_t(last_key) - s.shift + p.window_left + 1;
    if (begin > s.seqlen_q) begin = s.seqlen_q;
    return {int(begin), int(end > begin ? end : begin)};
}

// Rows [begin, end) that see all of the keys key0 .. last_key.
__device__ __forceinline__ KeyRange rows_seeing_all(const AttentionParams& p, const Sequence& s, int key0, int last_key) {
    int64_t begin = 0, end = s.seqlen_q;
    if (p.window_right >= 0 && int64_t(last_key) - s.shift - p.window_right > begin) begin = int64_t(last_key) - s.shift - p.window_right;
    if (p.window_left >= 0 && int64_t(key0) - s.shift + p.window_left + 1 < end) end = int64_t(key0) - s.shift + p.window_left + 1;
    if (begin > s.seqlen_q || last_key >= s.seqlen_k) begin = s.seqlen_q;
    return {int(begin), int(end > 0 ? end : 0)};
}

// Elements of pairs that causal or window hide, and of rows past the sequence, become zero.
template <int kMmas, int kTilesN>
__device__ __forceinline__ void hide(float (&X)[kMmas][kTilesN][4], const AttentionParams& p, int b, int row0, int key0, int lane) {
    lane = opaque(lane);  // keeps what this needs out of the main loop's registers: it runs on few tiles
    const Sequence s = sequence_of(p, opaque(b));
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + 16 * m + mma_row(lane, 2 * half);
            const KeyRange range = row < s.seqlen_q ? key_range(p, s, row) : KeyRange{0, 0};
            const int begin = range.begin - key0 - mma_column(lane, 0), end = range.end - key0 - mma_column(lane, 0);
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < begin || 8 * n + e >= end) X[m][n][2 * half + e] = 0;
        }
}

// One m16 tile of general scores: S becomes P with dropout, dP becomes dS, both zero where mask or bias hide the pair.
template <typename T, int kCount>
__device__ __forceinline__ void general_gradients(const AttentionParams& p, const FragmentPlace& at, int quad, const float (&lse)[2],
                                                  const float (&delta)[2], float (&S)[kCount], float (&dP)[kCount]) {
    float slope[kCount];  // of softcap: 1 - tanh^2
#pragma unroll
    for (int i = 0; i < kCount; ++i) slope[i] = 1;
    if (p.softcap != 0) {
        const float inverse = p.scale / p.softcap;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float t = tanh_fast(S[i] * inverse);
            slope[i] = 1 - t * t;
        }
    }
    transform_fragment<T>(p, at, S);
    float keep[(kCount + 15) / 16 * 16];  // four column groups at a time
    if (p.dropout_threshold) {
#pragma unroll
        for (float& x : keep) x = p.dropout_scale;
        drop_fragment(p, at, quad, keep);
    } else {
#pragma unroll
        for (float& x : keep) x = 1;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int r = i / 2 % 2;
        const float P = exp2_approx((S[i] - lse[r]) * kLog2e);
        S[i] = P * keep[i];
        dP[i] = P == 0 ? 0 : P * (dP[i] * keep[i] - delta[r]) * slope[i];
    }
}

// C += A B^T of 16 kMmas rows and 8 kTilesN columns, both operands with the summed index along their rows: a and b are this lane's
// addresses of A's first 16 x 16 block, rows lane % 16, and of B's, rows lane % 8 + lane / 16 * 8. After each step after(step) runs.
template <typename T, typename TileA, typename TileB, int kSteps, int kMmas, int kTilesN, typename After>
__device__ __forceinline__ void multiply_rows(float (&C)[kMmas][kTilesN][4], uint32_t a, uint32_t b, const After& after) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t A[kMmas][4];
#pragma unroll
        for (int m = 0; m < kMmas; ++m) ldmatrix_x4(A[m], TileA::advance(a, step) + 16 * m * TileA::kPitch);
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
            uint32_t B[4];
            ldmatrix_x4(B, TileB::advance(b, step) + 8 * n * TileB::kPitch);
#pragma unroll
            for (int m = 0; m < kMmas; ++m) {
                mma<T>(C[m][n], A[m], B[0], B[1]);
                mma<T>(C[m][n + 1], A[m], B[2], B[3]);
            }
        }
        after(step);
    }
}

// C += A B, B with the summed index down its columns, A too when kTransposed. The warp's columns are every kStride-th pair of tiles: b
// points at the first pair, rows lane % 16. Steps kBegin .. kEnd - 1 of 16 summed elements.
template <typename T, typename TileA, typename TileB, bool kTransposed, int kStride, int kBegin, int kEnd, int kMmas, int kTilesN>
__device__ __forceinline__ void multiply_columns(float (&C)[kMmas][kTilesN][4], uint32_t a, uint32_t b) {
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
        uint32_t A[kMmas][4];
#pragma unroll
        for (int m = 0; m < kMmas; ++m) {
            if (kTransposed) ldmatrix_x4_trans(A[m], TileA::advance(a, m) + 16 * step * TileA::kPitch);
            else ldmatrix_x4(A[m], TileA::advance(a, step) + 16 * m * TileA::kPitch);
        }
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
            uint32_t B[2][2];
            ldmatrix_x4_trans(B, TileB::advance(b, kStride * n / 2) + 16 * step * TileB::kPitch);
#pragma unroll
            for (int m = 0; m < kMmas; ++m) {
                mma<T>(C[m][n], A[m], B[0][0], B[0][1]);
                mma<T>(C[m][n + 1], A[m], B[1][0], B[1][1]);
            }
        }
    }
}
template <int kMmas, int kTilesN>
__device__ __forceinline__ void clear(float (&C)[kMmas][kTilesN][4]) {
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTilesN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) C[m][n][i] = 0;
}

// to[row][column] = scale C, plus what was there with `accumulate`, in 16-byte pieces: tile n of the warp holds columns
// 16 (kStride (n / 2) + first) + 8 (n % 2) .. + 7. Rows and columns past the given numbers are left alone.
template <typename T, int kStride, int kMmas, int kTilesN>
__device__ __forceinline__ void store_rows(const float (&C)[kMmas][kTilesN][4], float scale, T* to, int64_t row_stride, int row0, int rows,
                                           int first, int columns, bool aligned, bool accumulate, int lane) {
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
            const int column0 = 16 * (kStride * (n / 2) + first);
            uint32_t word[4];  // two columns of: tile n, row g | tile n + 1, row g | tile n, row g + 8 | tile n + 1, row g + 8
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float* pair = C[m][n + x % 2] + x / 2 * 2;
                float value[2] = {pair[0] * scale, pair[1] * scale};
                const int row = row0 + 16 * m + mma_row(lane, x / 2 * 2), column = column0 + x % 2 * 8 + mma_column(lane, 0);
                if (accumulate && row < rows) {
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (column + e < columns) value[e] += to_float(to[row * row_stride + column + e]);
                }
                word[x] = pack_16<T>(value[0], value[1]);
            }
            transpose_quad(word, lane % 4);  // now eight columns of one of the four
            if (accumulate) __syncwarp();    // what other lanes overwrite has been read
            const int quad = lane % 4, row = row0 + 16 * m + mma_row(lane, quad / 2 * 2), column = column0 + quad % 2 * 8;
            if (row >= rows) continue;
            T* piece = to + row * row_stride + column;
            if (aligned) {
                if (column < columns) *reinterpret_cast<uint4*>(piece) = make_uint4(word[0], word[1], word[2], word[3]);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (column + e < columns) reinterpret_cast<uint16_t*>(piece)[e] = uint16_t(word[e / 2] >> (e % 2 * 16));
            }
        }
}

template <int kD, int kDv, MmaSm kSm>
inline constexpr BackwardTile kBackwardTileOf = backward_mma_tile(kD, kSm);

// ---- before: delta and lse of block_m rows of a head, zeros for the sums of their dQ ----

constexpr int kSideThreads = 256;

template <typename T, int kBlockM, int kD, int kDv>
__global__ void __launch_bounds__(kSideThreads) before_kernel(const __grid_constant__ MmaBackwardParams params) {
    constexpr int kLanes = kDv <= 64 ? 8 : kDv <= 128 ? 16 : 32, kRowsAtOnce = kSideThreads / kLanes;  // eight columns for each lane
    const AttentionParams& p = params.backward.forward;
    const int tile = blockIdx.x % params.tiles_q, head = blockIdx.x / params.tiles_q % p.nheads, b = blockIdx.x / params.tiles_q / p.nheads;
    const int row0 = tile * kBlockM;
    const Sequence s = sequence_of(p, b);
    if (row0 >= s.seqlen_q) return;
    const int64_t place = workspace_tile(params, kBlockM, b, head, tile);
    if (!params.backward.deterministic) {
        float4* sums = reinterpret_cast<float4*>(params.workspace.dq + place * kBlockM * kD);
        for (int x = threadIdx.x; x < kBlockM * kD / 4; x += kSideThreads) sums[x] = float4{};
    }
    const T* out = static_cast<const T*>(p.out.data) + s.out + head * p.out.head;
    const T* dout =
        static_cast<const T*>(params.backward.dout.data) + gradients_of(params.backward, b).dout + head * params.backward.dout.head;
    const float* lse = p.lse + lse_offset(p, s, head);
    float* rows = params.workspace.rows + place * 2 * kBlockM;
    const int column = threadIdx.x % kLanes * 8;
    const bool aligned = params.aligned_out && params.aligned_dout;
#pragma unroll
    for (int pass = 0; pass < (kBlockM + kRowsAtOnce - 1) / kRowsAtOnce; ++pass) {
        const int r = pass * kRowsAtOnce + threadIdx.x / kLanes, i = row0 + r;
        const T *x = out + i * p.out.row + column, *y = dout + i * params.backward.dout.row + column;
        float sum = 0;
        if (r < kBlockM && i < s.seqlen_q && column < p.headdim_v) {
            if (aligned) {
                alignas(16) T a[8], c[8];
                *reinterpret_cast<uint4*>(a) = *reinterpret_cast<const uint4*>(x);
                *reinterpret_cast<uint4*>(c) = *reinterpret_cast<const uint4*>(y);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum += to_float(a[e]) * to_float(c[e]);
            } else {
                for (int e = 0; e < 8 && column + e < p.headdim_v; ++e) sum += to_float(x[e]) * to_float(y[e]);
            }
        }
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(kFullWarp, sum, lane);
        if (r < kBlockM && column == 0) {
            const float own = i < s.seqlen_q ? lse[i] : -INFINITY;
            rows[r] = own == -INFINITY ? INFINITY : own;
            rows[kBlockM + r] = sum;
        }
    }
}

// ---- main: dK and dV of a tile of keys, their share of dQ ----

// Blocks start in order of their index: section by section, in a section the first keys of every head first, because with a causal mask
// most rows see them.
__device__ __forceinline__ BackwardWork work_of(const MmaBackwardParams& params, int block, int block_n) {
    const AttentionParams& p = params.backward.forward;
    const int first = block / (params.section * params.tiles_k) * params.section, index = block % (params.section * params.tiles_k);
    const int heads = min(params.section, p.nheads_k * p.batch - first), head = first + index % heads;
    return {head / p.nheads_k, head % p.nheads_k, index / heads * block_n};
}

template <typename T, int kD, int kDv, MmaSm kSm, bool kGeneral>
__global__ void __launch_bounds__(kBackwardTileOf<kD, kDv, kSm>.warps * 32, kBackwardTileOf<kD, kDv, kSm>.blocks_per_sm)
    gradient_kernel(const __grid_constant__ MmaBackwardParams params) {
#if defined(__CUDA_ARCH__)
    if (kSm == MmaSm::k228 && __CUDA_ARCH__ < 900) return;  // never launched there: leaves the code out
    if (kSm == MmaSm::k164 && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)) return;
#endif
    constexpr BackwardTile kTile = kBackwardTileOf<kD, kDv, kSm>;
    constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = kTile.warps * 32;
    constexpr int kStagesQ = kTile.stages_q, kStagesDout = kTile.stages_dout;
    static_assert(kStagesQ >= kStagesDout && kStagesQ <= 2, "the next Q is asked for no later than the next dO");
    constexpr bool kAnyAlignment = kSm == MmaSm::kAny;
    constexpr bool kOneBody = kAnyAlignment || kD > 192;  // else steps without an edge have code of their own, without a branch
    // How the warps share out S, dK and dV, and dQ: rows x columns of warps.
    constexpr int kRowsS = kTile.warps_m_s, kColumnsS = kTile.warps / kRowsS, kRowsKv = kTile.warps_n_kv,
                  kColumnsKv = kTile.warps / kRowsKv;
    constexpr int kRowsDq = kTile.warps_m_dq, kColumnsDq = kTile.warps / kRowsDq;
    constexpr int kMmasS = kBlockM / kRowsS / 16, kTilesS = kBlockN / kColumnsS / 8, kMmasKv = kBlockN / kRowsKv / 16;
    constexpr int kTilesK = kD / kColumnsKv / 8, kTilesV = kDv / kColumnsKv / 8, kMmasDq = kBlockM / kRowsDq / 16,
                  kTilesDq = kD / kColumnsDq / 8;
    static_assert(kMmasS * kRowsS * 16 == kBlockM && kTilesS * kColumnsS * 8 == kBlockN && kTilesS % 2 == 0, "S is shared out evenly");
    static_assert(kMmasKv * kRowsKv * 16 == kBlockN && kTilesK * kColumnsKv * 8 == kD && kTilesK % 2 == 0 &&
                      kTilesV * kColumnsKv * 8 == kDv && kTilesV % 2 == 0,
                  "dK and dV are shared out evenly");
    static_assert(kMmasDq * kRowsDq * 16 == kBlockM && kTilesDq * kColumnsDq * 8 == kD && kTilesDq % 2 == 0, "dQ is shared out evenly");
    constexpr int kPartTiles = kD > 192 || kMmasDq * kTilesDq > 16 ? 8 / kMmasDq : kTilesDq,
                  kPartsDq = kTilesDq / kPartTiles;  // of dQ at a time
    // Halves of a step that an edge may hide: rows above the first keys, keys past the last rows. Beyond 192 registers are short.
    constexpr bool kHalfRows = kBlockM > kBlockN && kD <= 192, kHalfKeys = kBlockN > kBlockM;
    // P waits for dP in registers where they are enough, else in shared memory, rounded.
    constexpr bool kPInRegisters = kGeneral || kMmasS * kTilesS * 4 <= 32;
    using TileQ = SharedTile<T, kD>;
    using TileV = SharedTile<T, kDv>;
    using TileP = SharedTile<T, kBlockN>;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<MainSmem<T, kBackwardTileOf<kD, kDv, kSm>, kD, kDv>*>(shared);
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;

    const BackwardWork work = work_of(params, blockIdx.x, kBlockN);
    const int b = work.b, head_k = work.head_k, key0 = work.key0;
    const Sequence s = sequence_of(p, b);
    if (key0 >= s.seqlen_k) return;
    const KeyRange keys = keys_seen(p, s), rows = rows_seeing(p, s, key0, min(key0 + kBlockN, s.seqlen_k) - 1);
    if (threadIdx.x == 0) {
        smem.work = work, smem.rows = rows, smem.whole_rows = rows_seeing_all(p, s, key0, key0 + kBlockN - 1);
        smem.first_tile = rows.begin / kBlockM, smem.last_tile = (rows.end - 1) / kBlockM;
        smem.q_rows = static_cast<const T*>(p.q.data) + s.q;
        smem.dout_rows = static_cast<const T*>(backward.dout.data) + gradients_of(backward, b).dout;
        const int64_t place = workspace_tile(params, kBlockM, b, 0, 0);
        smem.sums = params.workspace.dq + place * (kBlockM * kD), smem.stats = params.workspace.rows + place * (2 * kBlockM);
    }
    __syncthreads();
    // A step is a tile of queries of one of the heads that read this block's keys.
    struct Step {
        int head, tile;
    };
    const Step first{head_k * p.group, rows.begin / kBlockM};
    const int end_head = rows.end > rows.begin ? (head_k + 1) * p.group : 0;

    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);  // the same in all lanes, and the compiler knows
    // Addresses of this lane's rows for ldmatrix: 16 rows x 32 bytes with the halves side by side, or one row group after the other.
    const int row_a = lane % 16, piece_a = lane / 16, row_b = lane % 8 + lane / 16 * 8, piece_b = lane / 8 % 2;
    // Warps that a causal diagonal leaves without work should not share an SM's quarter, which warps have in turn.
    const auto row_of_s = [](int warp) { return (kRowsS < kColumnsS ? warp % kRowsS : warp / kColumnsS) * (16 * kMmasS); };
    const auto key_of_s = [](int warp) { return (kRowsS < kColumnsS ? warp / kRowsS : warp % kColumnsS) * (8 * kTilesS); };
    const int s_row = row_of_s(warp), s_key = key_of_s(warp);
    const uint32_t q_a = shared_address(smem.q) + TileQ::offset(s_row + row_a, piece_a);
    const uint32_t dout_a = shared_address(smem.dout) + TileV::offset(s_row + row_a, piece_a);
    const uint32_t k_b = shared_address(smem.k) + TileQ::offset(s_key + row_b, piece_b);
    const uint32_t v_b = shared_address(smem.v) + TileV::offset(s_key + row_b, piece_b);
    const uint32_t p_store = shared_address(smem.p) + TileP::offset(s_row + lane / 4, s_key / 8) + lane % 4 * 4;
    const int kv_key = warp / kColumnsKv * (16 * kMmasKv), kv_column = warp % kColumnsKv;
    const int dq_row = warp / kColumnsDq * (16 * kMmasDq), dq_column = warp % kColumnsDq;
    constexpr uint32_t kToDs = sizeof smem.p;  // dS lies behind P, in the same order

    const auto load_q = [&](Step step, int stage) {
        const int row0 = step.tile * kBlockM;
        const T* q = smem.q_rows + step.head * p.q.head + row0 * p.q.row;
        load_tile<kBlockM, kD, kThreads, kAnyAlignment>(smem.q[stage], q, p.q.row, smem.rows.begin - row0, smem.rows.end - row0, p.headdim,
                                                        params.aligned_q);
        if (threadIdx.x < kBlockM / 2) {  // lse and delta, 16 bytes for each thread
            const float* from = smem.stats + (int64_t(step.head) * params.workspace.tiles + step.tile) * (2 * kBlockM);
            cp_async_16(shared_address(smem.lse_delta[stage]) + 16 * threadIdx.x, from + 4 * threadIdx.x, 16);
        }
    };
    const auto load_dout = [&](Step step, int stage) {
        const int row0 = step.tile * kBlockM;
        const T* dout = smem.dout_rows + step.head * backward.dout.head + row0 * backward.dout.row;
        load_tile<kBlockM, kDv, kThreads, kAnyAlignment>(smem.dout[stage], dout, backward.dout.row, smem.rows.begin - row0,
                                                         smem.rows.end - row0, p.headdim_v, params.aligned_dout);
    };

    float dK[kMmasKv][kTilesK][4], dV[kMmasKv][kTilesV][4];
    clear(dK), clear(dV);

    if (first.head < end_head) {
        const T* k = static_cast<const T*>(p.k.data) + s.k + head_k * p.k.head + key0 * p.k.row;
        const T* v = static_cast<const T*>(p.v.data) + s.v + head_k * p.v.head + key0 * p.v.row;
        load_tile<kBlockN, kD, kThreads, kAnyAlignment>(smem.k, k, p.k.row, keys.begin - key0, keys.end - key0, p.headdim,
                                                        params.aligned_k);
        load_tile<kBlockN, kDv, kThreads, kAnyAlignment>(smem.v, v, p.v.row, keys.begin - key0, keys.end - key0, p.headdim_v,
                                                         params.aligned_v);
        load_q(first, 0), load_dout(first, 0);
    }
    if (kGeneral && (p.mask.data || p.bias.data) && first.head < end_head) {
        // A key that mask or bias hide from every row has dS = 0, but 0 x NaN is NaN: its K must not be read for dQ.
        int* const visible = reinterpret_cast<int*>(smem.p);  // P is not yet in use
        if (threadIdx.x < kBlockN) visible[threadIdx.x] = 0;
        __syncthreads();
        const int column = opaque(threadIdx.x) % kBlockN, j = key0 + column;
        const int heads_seen = p.mask.head || p.bias.head ? p.group : 1;
        bool seen = j >= s.seqlen_k;
        for (int head = first.head; head < first.head + heads_seen; ++head)
            for (int i = rows.begin + opaque(threadIdx.x) / kBlockN; !seen && i < rows.end; i += kThreads / kBlockN) {
                const KeyRange range = key_range(p, s, i);
                seen = j >= range.begin && j < range.end;
                if (p.mask.data) {
                    const int64_t at = b * p.mask.batch + head * p.mask.head + i * p.mask.row + j;
                    seen = seen && static_cast<const uint8_t*>(p.mask.data)[at];
                }
                if (p.bias.data) {
                    const int64_t at = b * p.bias.batch + head * p.bias.head + i * p.bias.row + j;
                    seen = seen && load_as_float(p.bias.data, at, p.bias_dtype) != -INFINITY;
                }
            }
        if (seen) visible[column] = 1;
        cp_async_wait_all();
        __syncthreads();
        for (int x = threadIdx.x; x < kBlockN * TileQ::kPieces; x += kThreads)
            if (!visible[x / TileQ::kPieces]) reinterpret_cast<uint4*>(smem.k)[x] = make_uint4(0, 0, 0, 0);
    }

    Step step = first;
    int stage = 0;
    const auto next = [&] { return step.tile < smem.last_tile ? Step{step.head, step.tile + 1} : Step{step.head + 1, smem.first_tile}; };
    const auto load_next = [&](bool with_q, bool with_dout) {
        const Step to = next();
        if (to.head >= end_head) return;
        if (with_q) load_q(to, kStagesQ == 2 ? stage ^ 1 : 0);
        if (with_dout) load_dout(to, kStagesDout == 2 ? stage ^ 1 : 0);
    };
    // What follows the arrival of Q and dO; on_edge: some pairs of the tile may be hidden.
    const auto compute = [&](auto on_edge, bool cut) {
        constexpr bool kEdge = decltype(on_edge)::value;
        const int stage_q = kStagesQ == 2 ? stage : 0, stage_dout = kStagesDout == 2 ? stage : 0, row0 = step.tile * kBlockM;
        const uint32_t to_q = stage_q * uint32_t(sizeof smem.q[0]), to_dout = stage_dout * uint32_t(sizeof smem.dout[0]);
        const auto hide_pairs = [&](float(&X)[kMmasS][kTilesS][4]) {
            const int who = opaque(warp);
            hide(X, p, smem.work.b, row0 + row_of_s(who), smem.work.key0 + key_of_s(who), lane);
        };
        // Does any of `count` rows of the tile from `row` on see any of `keys` keys from `key` on? Away from edges all do.
        const auto see = [&](int row, int count, int key, int keys) {
            if (!kEdge || !cut) return true;
            const BackwardWork work = smem.work;
            const Sequence s = sequence_of(p, work.b);
            const KeyRange seeing = rows_seeing(p, s, work.key0 + key, min(work.key0 + key + keys, s.seqlen_k) - 1);
            return work.key0 + key < s.seqlen_k && row0 + row < seeing.end && row0 + row + count > seeing.begin;
        };

        // ---- S = Q K^T, P, dP = dO V^T, dS ----
        const bool does_s = see(row_of_s(opaque(warp)), 16 * kMmasS, key_of_s(opaque(warp)), 8 * kTilesS);
        float lse[kMmasS][2], delta[kMmasS][2];
        const auto load_rows = [&](float(&x)[kMmasS][2], int which) {
#pragma unroll
            for (int r = 0; r < 2 * kMmasS; ++r) x[r / 2][r % 2] = smem.lse_delta[stage_q][which][s_row + 8 * r + lane / 4];
        };
        load_rows(lse, 0);
        // Stores one m16 tile of P, or with kToDs of dS.
        const auto store = [&](const float(&X)[kTilesS][4], uint32_t to, int m) {
#pragma unroll
            for (int n = 0; n < kTilesS; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    store_shared_4((p_store ^ n * 16) + to + (16 * m + 8 * half) * TileP::kPitch,
                                   pack_16<T>(X[n][2 * half], X[n][2 * half + 1]));
        };
        const auto nothing = [](int) {};
        constexpr int kStepsD = kD / 16, kStepsDv = kDv / 16;
        float S[kMmasS][kTilesS][4];
        clear(S);
        if (does_s) multiply_rows<T, TileQ, TileQ, kStepsD>(S, q_a + to_q, k_b, nothing);
        if (kGeneral) {
            float dP[kMmasS][kTilesS][4];
            clear(dP);
            if (does_s) multiply_rows<T, TileV, TileV, kStepsDv>(dP, dout_a + to_dout, v_b, nothing);
            load_rows(delta, 1);
            const int here = opaque(lane);  // what an option needs for this lane is computed where it is used
            const BackwardWork work = smem.work;
            const Sequence now = sequence_of(p, work.b);
#pragma unroll
            for (int m = 0; m < kMmasS; ++m) {
                const int row = row0 + s_row + 16 * m + mma_row(here, 0), key = work.key0 + s_key + mma_column(here, 0);
                const FragmentPlace at{work.b, step.head, row, key, now.seqlen_q, now.seqlen_k, now.shift};
                general_gradients<T>(p, at, here % 4, lse[m], delta[m], flat(S[m]), flat(dP[m]));
            }
            if (kEdge && cut) hide_pairs(S), hide_pairs(dP);
#pragma unroll
            for (int m = 0; m < kMmasS; ++m) store(S[m], 0, m), store(dP[m], kToDs, m);
        } else {
            const auto exponentials = [&](int begin, int end) {  // of the thread's pairs of neighbouring keys
#pragma unroll
                for (int x = begin; x < end; ++x) {
                    const int m = x / (2 * kTilesS), half = x % 2;
                    float* pair = S[m][x / 2 % kTilesS] + 2 * half;
                    pair[0] = exp2_approx(fmaf(pair[0], p.scale, -lse[m][half]) * kLog2e);
                    pair[1] = exp2_approx(fmaf(pair[1], p.scale, -lse[m][half]) * kLog2e);
                }
            };
            constexpr int kPairs = 2 * kMmasS * kTilesS;
            float dP[kMmasS][kTilesS][4];
            if (kPInRegisters) {
                clear(dP);
                if (does_s)
                    multiply_rows<T, TileV, TileV, kStepsDv>(
                        dP, dout_a + to_dout, v_b, [&](int x) { exponentials(kPairs * x / kStepsDv, kPairs * (x + 1) / kStepsDv); });
            } else if (does_s) {
                exponentials(0, kPairs);
            }
            if (kEdge && cut) hide_pairs(S);
#pragma unroll
            for (int m = 0; m < kMmasS; ++m) store(S[m], 0, m);
            if (!kPInRegisters) {
                clear(dP);
                if (does_s) multiply_rows<T, TileV, TileV, kStepsDv>(dP, dout_a + to_dout, v_b, nothing);
            }
            load_rows(delta, 1);
#pragma unroll
            for (int m = 0; m < kMmasS; ++m)
#pragma unroll
                for (int n = 0; n < kTilesS; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float* pair = dP[m][n] + 2 * half;
                        float P[2] = {S[m][n][2 * half], S[m][n][2 * half + 1]};
                        if (!kPInRegisters) unpack_16<T>(P, load_shared_4((p_store ^ n * 16) + (16 * m + 8 * half) * TileP::kPitch));
                        pair[0] = P[0] * (pair[0] - delta[m][half]);
                        pair[1] = P[1] * (pair[1] - delta[m][half]);
                    }
            if (kEdge && cut) hide_pairs(dP);  // 0 x NaN is NaN
#pragma unroll
            for (int m = 0; m < kMmasS; ++m) store(dP[m], kToDs, m);
        }
        __syncthreads();  // P and dS are here

        // ---- dV += P^T dO, dK += dS^T Q ----
        const int here = opaque(lane), row = here % 16, piece = here / 16;  // addresses that take no registers while S and dP do
        const uint32_t p_a = shared_address(smem.p) + TileP::offset(here % 8 + here / 16 * 8, kv_key / 8 + here / 8 % 2);
        const uint32_t dout_b = shared_address(smem.dout) + TileV::offset(row, 2 * kv_column + piece);
        const uint32_t q_b = shared_address(smem.q) + TileQ::offset(row, 2 * kv_column + piece);
        const bool does_kv = see(0, kBlockM, opaque(warp) / kColumnsKv * (16 * kMmasKv), 16 * kMmasKv);
        const bool has_first_rows = !kHalfRows || see(0, kBlockM / 2, 0, kBlockN);
        constexpr int kSteps = kBlockM / 16, kHalf = kHalfRows ? kSteps / 2 : 0;
        if (does_kv) {
            if (has_first_rows) multiply_columns<T, TileP, TileV, true, kColumnsKv, 0, kHalf>(dV, p_a, dout_b + to_dout);
            multiply_columns<T, TileP, TileV, true, kColumnsKv, kHalf, kSteps>(dV, p_a, dout_b + to_dout);
        }
        if (kStagesQ == 2 && kStagesDout == 1) {
            __syncthreads();  // nobody reads dO any more
            load_next(false, true);
        }
        if (does_kv) {
            if (has_first_rows) multiply_columns<T, TileP, TileQ, true, kColumnsKv, 0, kHalf>(dK, p_a + kToDs, q_b + to_q);
            multiply_columns<T, TileP, TileQ, true, kColumnsKv, kHalf, kSteps>(dK, p_a + kToDs, q_b + to_q);
        }
        if (kStagesQ == 1) {
            __syncthreads();  // nobody reads Q and dO any more
            load_next(true, true);
        }

        // ---- dQ += dS K ----
        if (!backward.deterministic && see(opaque(warp) / kColumnsDq * (16 * kMmasDq), 16 * kMmasDq, 0, kBlockN)) {
            const bool has_last_keys = !kHalfKeys || see(0, kBlockM, kBlockN / 2, kBlockN / 2);
            const uint32_t ds_a = shared_address(smem.ds) + TileP::offset(dq_row + row, piece);
            const uint32_t k_columns = shared_address(smem.k) + TileQ::offset(row, 2 * dq_column + piece);
            float* sums =
                smem.sums + (int64_t(step.head) * params.workspace.tiles + step.tile) * (kBlockM * kD) + warp * (kMmasDq * kTilesDq * 128);
#pragma unroll
            for (int part = 0; part < kPartsDq; ++part) {
                float dQ[kMmasDq][kPartTiles][4];
                clear(dQ);
                constexpr int kKeySteps = kBlockN / 16, kFirstHalf = kHalfKeys ? kKeySteps / 2 : kKeySteps;
                const uint32_t columns = TileQ::advance(k_columns, kColumnsDq * kPartTiles / 2 * part);
                multiply_columns<T, TileP, TileQ, false, kColumnsDq, 0, kFirstHalf>(dQ, ds_a, columns);
                if (has_last_keys) multiply_columns<T, TileP, TileQ, false, kColumnsDq, kFirstHalf, kKeySteps>(dQ, ds_a, columns);
#pragma unroll
                for (int m = 0; m < kMmasDq; ++m)
#pragma unroll
                    for (int n = 0; n < kPartTiles; ++n)
                        red_add_fragment(sums + (m * kTilesDq + kPartTiles * part + n) * 128, dQ[m][n], lane);
            }
        }
    };
#pragma unroll 1
    for (; step.head < end_head; stage ^= 1) {
        cp_async_wait_all();
        __syncthreads();  // Q and dO of this step are here; nobody reads P, dS and the stages of the step before any more
        if (kStagesQ == 2) load_next(true, kStagesDout == 2);
        const int row0 = step.tile * kBlockM;
        const bool cut = row0 < smem.whole_rows.begin || row0 + kBlockM > smem.whole_rows.end;
        if (kOneBody || cut) compute(std::true_type{}, cut);
        else compute(std::false_type{}, cut);
        step = next();
    }

    const BackwardWork done = work_of(params, opaque(blockIdx.x), kBlockN);  // found again rather than kept in registers through the loop
    const int thread = opaque(threadIdx.x), seqlen_k = sequence_of(p, done.b).seqlen_k;
    const int row = done.key0 + thread / 32 / kColumnsKv * (16 * kMmasKv), column = thread / 32 % kColumnsKv;
    const GradientSequence to = gradients_of(backward, done.b);
    T* dk = static_cast<T*>(backward.dk.data) + to.dk + done.head_k * backward.dk.head;
    T* dv = static_cast<T*>(backward.dv.data) + to.dv + done.head_k * backward.dv.head;
    store_rows<T, kColumnsKv>(dK, p.scale, dk, backward.dk.row, row, seqlen_k, column, p.headdim, params.aligned_dk, backward.accumulate,
                              thread % 32);
    store_rows<T, kColumnsKv>(dV, 1.0f, dv, backward.dv.row, row, seqlen_k, column, p.headdim_v, params.aligned_dv, backward.accumulate,
                              thread % 32);
}

// ---- after: dQ = scale x the sums of a tile, read as the warps of the main kernel wrote them ----

template <typename T, int kD, int kDv, MmaSm kSm>
__global__ void __launch_bounds__(kBackwardTileOf<kD, kDv, kSm>.warps * 32) after_kernel(const __grid_constant__ MmaBackwardParams params) {
    constexpr BackwardTile kTile = kBackwardTileOf<kD, kDv, kSm>;
    constexpr int kBlockM = kTile.block_m, kRowsDq = kTile.warps_m_dq, kColumnsDq = kTile.warps / kRowsDq;
    constexpr int kMmasDq = kBlockM / kRowsDq / 16, kTilesDq = kD / kColumnsDq / 8;
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int tile = blockIdx.x % params.tiles_q, head = blockIdx.x / params.tiles_q % p.nheads, b = blockIdx.x / params.tiles_q / p.nheads;
    const Sequence s = sequence_of(p, b);
    if (tile * kBlockM >= s.seqlen_q) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* sums =
        params.workspace.dq + workspace_tile(params, kBlockM, b, head, tile) * (kBlockM * kD) + warp * (kMmasDq * kTilesDq * 128);
    float dQ[kMmasDq][kTilesDq][4];
#pragma unroll
    for (int m = 0; m < kMmasDq; ++m)
#pragma unroll
        for (int n = 0; n < kTilesDq; ++n) load_fragment(dQ[m][n], sums + (m * kTilesDq + n) * 128, lane);
    T* dq = static_cast<T*>(backward.dq.data) + gradients_of(backward, b).dq + head * backward.dq.head;
    store_rows<T, kColumnsDq>(dQ, p.scale, dq, backward.dq.row, tile * kBlockM + warp / kColumnsDq * (16 * kMmasDq), s.seqlen_q,
                              warp % kColumnsDq, p.headdim, params.aligned_dq, backward.accumulate, lane);
}

// ---- dQ alone, for sums that do not depend on timing: a block owns 64 queries, a warp 16 whole rows, and dS stays in registers ----

constexpr int kDqRows = 64, kDqThreads = 128;

template <typename T, int kD, int kDv>
struct DqSmem {
    static constexpr int kKeys = kD <= 128 ? 64 : 32, kStages = kD <= 128 ? 2 : 1;
    alignas(128) T q[kDqRows * kD];
    alignas(128) T dout[kDqRows * kDv];
    alignas(128) T k[kStages][kKeys * kD];
    alignas(128) T v[kStages][kKeys * kDv];
    int used[kKeys];  // a mask or bias: does any row of this block have a dS of this key?
};

template <typename T, int kD, int kDv, bool kGeneral>
__global__ void __launch_bounds__(kDqThreads, kD <= 128 ? 2 : 1) dq_kernel(const __grid_constant__ MmaBackwardParams params) {
    using Shared = DqSmem<T, kD, kDv>;
    constexpr int kKeys = Shared::kKeys, kStages = Shared::kStages, kTilesN = kKeys / 8;
    using TileQ = SharedTile<T, kD>;
    using TileV = SharedTile<T, kDv>;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<Shared*>(shared);
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int tile = params.tiles_dq - 1 - blockIdx.x % params.tiles_dq;  // with a causal mask the last rows see most keys
    const int head = blockIdx.x / params.tiles_dq % p.nheads, b = blockIdx.x / params.tiles_dq / p.nheads, row0 = tile * kDqRows;
    const Sequence s = sequence_of(p, b);
    if (row0 >= s.seqlen_q) return;
    const GradientSequence g = gradients_of(backward, b);
    const int first_key = key_range(p, s, row0).begin, end_key = max(first_key, key_range(p, s, min(row0 + kDqRows, s.seqlen_q) - 1).end);
    const int first_tile = first_key / kKeys, end_tile = (end_key + kKeys - 1) / kKeys;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = row0 + 16 * warp;
    const uint32_t q_a = shared_address(smem.q) + TileQ::offset(16 * warp + lane % 16, lane / 16);
    const uint32_t dout_a = shared_address(smem.dout) + TileV::offset(16 * warp + lane % 16, lane / 16);
    const uint32_t k_b = shared_address(smem.k) + TileQ::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_b = shared_address(smem.v) + TileV::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t k_columns = shared_address(smem.k) + TileQ::offset(lane % 16, lane / 16);

    const T* k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head;
    const T* v = static_cast<const T*>(p.v.data) + s.v + head / p.group * p.v.head;
    const auto load = [&](int t, int stage) {
        load_tile<kKeys, kD, kDqThreads, true>(smem.k[stage], k + t * kKeys * p.k.row, p.k.row, first_key - t * kKeys, end_key - t * kKeys,
                                               p.headdim, params.aligned_k);
        load_tile<kKeys, kDv, kDqThreads, true>(smem.v[stage], v + t * kKeys * p.v.row, p.v.row, first_key - t * kKeys, end_key - t * kKeys,
                                                p.headdim_v, params.aligned_v);
    };
    float lse[1][2], delta[1][2];
    if (first_tile < end_tile) {
        const T* q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head + row0 * p.q.row;
        const T* dout = static_cast<const T*>(backward.dout.data) + g.dout + head * backward.dout.head + row0 * backward.dout.row;
        load_tile<kDqRows, kD, kDqThreads, true>(smem.q, q, p.q.row, 0, s.seqlen_q - row0, p.headdim, params.aligned_q);
        load_tile<kDqRows, kDv, kDqThreads, true>(smem.dout, dout, backward.dout.row, 0, s.seqlen_q - row0, p.headdim_v,
                                                  params.aligned_dout);
        load(first_tile, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(warp_row + mma_row(lane, 2 * half), s.seqlen_q - 1);
            const float* from =
                params.workspace.rows + workspace_tile(params, params.block_m, b, head, row / params.block_m) * 2 * params.block_m;
            lse[0][half] = from[row % params.block_m], delta[0][half] = from[params.block_m + row % params.block_m];
        }
    }
    float dQ[1][kD / 8][4];
    clear(dQ);
#pragma unroll 1
    for (int t = first_tile; t < end_tile; ++t) {
        const int stage = kStages == 2 ? (t - first_tile) & 1 : 0, key0 = t * kKeys;
        cp_async_wait_all();
        __syncthreads();  // K and V of this tile are here; nobody reads the tile before it any more
        if (kStages == 2 && t + 1 < end_tile) load(t + 1, stage ^ 1);
        const uint32_t to_k = stage * uint32_t(sizeof smem.k[0]), to_v = stage * uint32_t(sizeof smem.v[0]);
        float S[1][kTilesN][4], dP[1][kTilesN][4];
        clear(S), clear(dP);
        const auto nothing = [](int) {};
        multiply_rows<T, TileQ, TileQ, kD / 16>(S, q_a, k_b + to_k, nothing);
        multiply_rows<T, TileV, TileV, kDv / 16>(dP, dout_a, v_b + to_v, nothing);
        const bool cut = warp_row + 16 > s.seqlen_q || key0 + kKeys > key_range(p, s, warp_row).end ||
                         key0 < key_range(p, s, min(warp_row + 16, s.seqlen_q) - 1).begin;
        if (kGeneral) {
            const int here = opaque(lane);
            const FragmentPlace at{b, head, warp_row + mma_row(here, 0), key0 + mma_column(here, 0), s.seqlen_q, s.seqlen_k, s.shift};
            general_gradients<T>(p, at, here % 4, lse[0], delta[0], flat(S[0]), flat(dP[0]));
        } else {
#pragma unroll
            for (int i = 0; i < 4 * kTilesN; ++i) {
                const int half = i / 2 % 2;
                const float P = exp2_approx(fmaf(flat(S[0])[i], p.scale, -lse[0][half]) * kLog2e);
                flat(dP[0])[i] = P * (flat(dP[0])[i] - delta[0][half]);
            }
        }
        if (cut) hide(dP, p, b, warp_row, key0, lane);
        if (kGeneral && (p.mask.data || p.bias.data)) {
            // A key that nobody here uses has dS = 0, but 0 x NaN is NaN: its K must not be read.
            if (threadIdx.x < kKeys) smem.used[threadIdx.x] = 0;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4 * kTilesN; ++i)
                if (flat(dP[0])[i] != 0) smem.used[8 * (i / 4) + mma_column(lane, i)] = 1;
            __syncthreads();
            for (int x = opaque(threadIdx.x); x < kKeys * TileQ::kPieces; x += kDqThreads)
                if (!smem.used[x / TileQ::kPieces]) reinterpret_cast<uint4*>(smem.k[stage])[x] = make_uint4(0, 0, 0, 0);
            __syncthreads();
        }
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            uint32_t A[4];
            fragment_of<T>(A, &dP[0][2 * step]);
#pragma unroll
            for (int n = 0; n < kD / 8; n += 2) {
                uint32_t B[2][2];
                ldmatrix_x4_trans(B, TileQ::advance(k_columns + to_k, n / 2) + 16 * step * TileQ::kPitch);
                mma<T>(dQ[0][n], A, B[0][0], B[0][1]);
                mma<T>(dQ[0][n + 1], A, B[1][0], B[1][1]);
            }
        }
        if (kStages == 1) {
            __syncthreads();  // nobody reads K and V any more
            if (t + 1 < end_tile) load(t + 1, 0);
        }
    }
    T* dq = static_cast<T*>(backward.dq.data) + g.dq + head * backward.dq.head;
    store_rows<T, 1>(dQ, p.scale, dq, backward.dq.row, warp_row, s.seqlen_q, 0, p.headdim, params.aligned_dq, backward.accumulate, lane);
}

// ---- launches ----

// Tiles of all the sequences of a head in the workspace, and its bytes.
inline int workspace_tiles(const AttentionParams& p, int block_m) {
    return p.cu_seqlens_q ? p.total_q / block_m + p.batch : (p.seqlen_q + block_m - 1) / block_m * p.batch;
}
inline size_t workspace_bytes(const BackwardParams& b, int block_m, int d) {
    return size_t(workspace_tiles(b.forward, block_m)) * b.forward.nheads * block_m * (b.deterministic ? 2 : d + 2) * sizeof(float) + 128;
}

template <typename T, int kD, int kDv>
cudaError_t launch_bucket(const BackwardParams& backward, size_t shared_memory, cudaStream_t stream) {
    const AttentionParams& p = backward.forward;
    MmaBackwardParams params{};
    params.backward = backward;
    params.aligned_q = aligned_rows<T>(p, p.q, p.nheads, p.headdim), params.aligned_out = aligned_rows<T>(p, p.out, p.nheads, p.headdim_v);
    params.aligned_k = aligned_rows<T>(p, p.k, p.nheads_k, p.headdim), params.aligned_v = aligned_rows<T>(p, p.v, p.nheads_k, p.headdim_v);
    params.aligned_dout = aligned_rows<T>(p, backward.dout, p.nheads, p.headdim_v);
    params.aligned_dq = aligned_rows<T>(p, backward.dq, p.nheads, p.headdim);
    params.aligned_dk = aligned_rows<T>(p, backward.dk, p.nheads_k, p.headdim);
    params.aligned_dv = aligned_rows<T>(p, backward.dv, p.nheads_k, p.headdim_v);
    const bool aligned = params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_dout, general = p.general_scores();

    const auto run = [&](auto sm, auto is_general) {
        constexpr MmaSm kSm = decltype(sm)::value;
        constexpr bool kGeneral = decltype(is_general)::value;
        constexpr const BackwardTile& kTile = kBackwardTileOf<kD, kDv, kSm>;
        params.tiles_q = (p.seqlen_q + kTile.block_m - 1) / kTile.block_m,
        params.tiles_k = (p.seqlen_k + kTile.block_n - 1) / kTile.block_n;
        params.workspace.tiles = workspace_tiles(p, kTile.block_m);
        const int64_t rows = int64_t(params.workspace.tiles) * p.nheads * kTile.block_m, heads = int64_t(p.nheads_k) * p.batch;
        params.workspace.dq = static_cast<float*>(align_up(p.workspace, 128));
        params.workspace.rows = params.workspace.dq + (backward.deterministic ? 0 : rows * kD);
        const int64_t row_bytes = (kD + kDv) * int64_t(sizeof(T)) + kD * int64_t(sizeof(float));
        const int64_t section = heads_per_section(p.seqlen_q, p.group * row_bytes, 1);
        params.section = int(section < heads ? section : heads);
        const unsigned blocks_q = unsigned(params.tiles_q * p.nheads) * p.batch, blocks_k = unsigned(params.tiles_k * heads);
        cudaError_t error = cudaSuccess;
        if (blocks_q) error = launch_kernel(before_kernel<T, kTile.block_m, kD, kDv>, blocks_q, kSideThreads, 0, stream, params);
        if (error == cudaSuccess && blocks_k)
            error = launch_kernel(gradient_kernel<T, kD, kDv, kSm, kGeneral>, blocks_k, kTile.warps * 32,
                                  sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, kSm>, kD, kDv>), stream, params);
        if (error != cudaSuccess || !blocks_q) return error;
        if (!backward.deterministic) return launch_kernel(after_kernel<T, kD, kDv, kSm>, blocks_q, kTile.warps * 32, 0, stream, params);
        params.block_m = kTile.block_m;
        params.tiles_dq = (p.seqlen_q + kDqRows - 1) / kDqRows;
        return launch_kernel(dq_kernel<T, kD, kDv, kGeneral>, unsigned(params.tiles_dq * p.nheads) * p.batch, kDqThreads,
                             sizeof(DqSmem<T, kD, kDv>), stream, params);
    };
    const auto serves = [&](const BackwardTile& tile, size_t shared_bytes) {
        return !general && aligned && size_t(tile.blocks_per_sm) * (shared_bytes + 1024) <= shared_memory + 1024;
    };
    using K228 = std::integral_constant<MmaSm, MmaSm::k228>;
    using K164 = std::integral_constant<MmaSm, MmaSm::k164>;
    using Any = std::integral_constant<MmaSm, MmaSm::kAny>;
    constexpr const BackwardTile &k228 = kBackwardTileOf<kD, kDv, MmaSm::k228>, &k164 = kBackwardTileOf<kD, kDv, MmaSm::k164>;
    if constexpr (!(k228 == k164)) {
        constexpr size_t kBytes = sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, MmaSm::k228>, kD, kDv>);
        if (serves(k228, kBytes)) return run(K228{}, std::false_type{});
    }
    static_assert(
        sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, MmaSm::kAny>, kD, kDv>) <= 99 * 1024 && sizeof(DqSmem<T, kD, kDv>) <= 99 * 1024,
        "a block of sm_86 and 89 has no more");
    constexpr size_t kBytes = sizeof(MainSmem<T, kBackwardTileOf<kD, kDv, MmaSm::k164>, kD, kDv>);
    if (serves(k164, kBytes)) return run(K164{}, std::false_type{});
    return general ? run(Any{}, std::true_type{}) : run(Any{}, std::false_type{});
}

template <typename T>
cudaError_t launch(const BackwardParams& b, size_t shared_memory, cudaStream_t stream) {
    return with_backward_bucket(b.forward.headdim, b.forward.headdim_v, [&](auto d, auto dv) {
        return launch_bucket<T, decltype(d)::value, decltype(dv)::value>(b, shared_memory, stream);
    });
}

}  // namespace
}  // namespace fa
