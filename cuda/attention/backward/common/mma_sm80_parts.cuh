// mma_sm80_parts.cuh: code that mma_sm80/kernel.cuh and mma_sm80/side.cuh share: the workspace, the masks of edges, the options of a score,
// the two kinds of product, and the stores of rows.
#pragma once

#include "attention/common/general_scores.cuh"
#include "attention/common/large_rows.cuh"
#include "attention/common/mask.h"
#include "attention/common/shared_tile.cuh"
#include "attention/common/tiles_mma_sm80.h"
#include "common/constants.h"
#include "common/element.cuh"
#include "device/mma.cuh"

namespace fa {
namespace {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// kGeneral serves every option of a score; kPlain serves scale, causal and windows.
enum class Scores { kPlain, kGeneral };

// The workspace divides the rows of Q into tiles of block_m; each sequence begins a new tile. For every head and tile it holds the float32
// sums of dQ (block_m x d), block_m values of lse, and block_m of delta. lse is an exponent of 2, so that one multiply-add gives the
// exponent of P, or it is kLargeRow. `large` has the RowBase of large rows: room for two floats per row.
struct BackwardWorkspace {
    float *dq, *rows, *large;
    int* some_large;  // kSomeLarge if some row of the call may be large; set before the main kernel, cleared after it
    int tiles;        // tiles of one head
};
constexpr int kSomeLarge = 0x6C617267;

struct MmaBackwardParams {
    BackwardParams backward;
    BackwardWorkspace workspace;
    int tiles_q, tiles_k;   // tiles of one head of the longest sequence
    int section;            // key heads per section, see tiles_mma_sm80.h
    int block_m, tiles_dq;  // dq_kernel: rows of a workspace tile; dq_kernel's tiles per head
    float scale_log2;       // scale * log2(e)
    bool natural;           // scores have options (Scores::kGeneral)
    bool aligned_q, aligned_k, aligned_v, aligned_out, aligned_dout, aligned_dq, aligned_dk, aligned_dv;
};

// Sets which tensors have rows for 16-byte copies, in the parameters of a kernel: aligned_q .. aligned_dv.
template <typename T, typename Params>
void find_aligned_rows(Params& params) {
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    params.aligned_q = aligned_rows<T>(p, p.q, p.nheads, p.headdim), params.aligned_k = aligned_rows<T>(p, p.k, p.nheads_k, p.headdim);
    params.aligned_v = aligned_rows<T>(p, p.v, p.nheads_k, p.headdim_v);
    params.aligned_dout = aligned_rows<T>(p, backward.dout, p.nheads, p.headdim_v);
    params.aligned_dq = aligned_rows<T>(p, backward.dq, p.nheads, p.headdim);
    params.aligned_dk = aligned_rows<T>(p, backward.dk, p.nheads_k, p.headdim);
    params.aligned_dv = aligned_rows<T>(p, backward.dv, p.nheads_k, p.headdim_v);
}

// The number of a sequence's first tile among the tiles of a head. floor(q0 / block_m) + b leaves enough whole tiles for all earlier
// sequences.
__device__ __forceinline__ int first_tile_of(const MmaBackwardParams& params, int block_m, int b) {
    const AttentionParams& p = params.backward.forward;
    return p.cu_seqlens_q ? clamp_to(p.cu_seqlens_q[b], 0, p.total_q) / block_m + b : b * params.tiles_q;
}
__device__ __forceinline__ int64_t workspace_tile(const MmaBackwardParams& params, int block_m, int b, int head, int tile) {
    return int64_t(head) * params.workspace.tiles + first_tile_of(params, block_m, b) + tile;
}

// Keys [begin, end) that some row of the sequence sees under causal and window.
__device__ __forceinline__ KeyRange keys_seen(const AttentionParams& p, const Sequence& s) {
    if (s.seqlen_q == 0) return {0, 0};
    const int begin = window_range(p, s, 0).begin;
    return {begin, max(begin, window_range(p, s, s.seqlen_q - 1).end)};
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

// Zeroes the elements of pairs that causal or window hides, and of rows past the sequence.
template <int kMmas, int kTilesN>
__device__ __forceinline__ void hide(float (&X)[kMmas][kTilesN][4], const AttentionParams& p, const Sequence& s, int row0, int key0,
                                     int lane) {
    lane = opaque(lane);  // runs on few tiles: its operands must not take registers of the main loop
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + 16 * m + mma_row(lane, 2 * half);
            const KeyRange range = row < s.seqlen_q ? window_range(p, s, row) : KeyRange{0, 0};
            const int begin = range.begin - key0 - mma_column(lane, 0), end = range.end - key0 - mma_column(lane, 0);
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < begin || 8 * n + e >= end) X[m][n][2 * half + e] = 0;
        }
}

// Applies adjust(score, RowBase) to the large rows of an m16 tile, whose statistics are `lse`. large[0] belongs to the thread's first row.
template <int kCount, typename Adjust>
__device__ __forceinline__ void adjust_large(const float (&lse)[2], const float2* large, float (&S)[kCount], const Adjust& adjust) {
    if (!__any_sync(kFullWarp, is_large_row(lse[0]) || is_large_row(lse[1]))) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (!is_large_row(lse[r])) continue;
        const float2 base = large[8 * r];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (i / 2 % 2 == r) S[i] = adjust(S[i], base);
    }
    __syncwarp();
}

// One m16 tile of general scores: S becomes P after dropout, dP becomes dS; both are zero where mask or bias hides the pair.
template <typename T, int kCount>
__device__ __forceinline__ void general_gradients(const AttentionParams& p, const FragmentPlace& at, int quad, const float (&lse)[2],
                                                  const float2* large, const float (&delta)[2], float (&S)[kCount], float (&dP)[kCount]) {
    float slope[kCount];  // derivative of softcap: 1 - tanh^2
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
    if (p.intervals.data) hide_by_intervals(p, at, S);
    if (p.blocks.data) hide_by_blocks(p, at, S);
    adjust_large(lse, large, S, large_score);
    float keep[kCount];
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
        const float P = exp2_approx(fmaf(S[i], kLog2e, -lse[r]));
        S[i] = P * keep[i];
        dP[i] = P == 0 ? 0 : P * (dP[i] * keep[i] - delta[r]) * slope[i];
    }
}

// A callback of multiply_rows and multiply_columns that does nothing.
struct Nothing {
    __device__ void operator()(int) const {}
};

// C += A B^T, 16 kMmas rows by 8 kTilesN columns. The summed index runs along the rows of both operands. a and b are this lane's addresses
// in the first 16 x 16 block of A (row lane % 16) and of B (row lane % 8 + lane / 16 * 8). after(step) runs after each step.
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

// kAsStored: the summed index runs along the rows of A in shared memory. kTransposed: it runs down the columns of A.
enum class OperandA { kAsStored, kTransposed };

// C += A B. The summed index runs down the columns of B. The warp has every kStride-th pair of column tiles: b points at its first pair,
// row lane % 16. Steps kBegin .. kEnd - 1 sum 16 elements each; after(step) runs after each step.
template <typename T, typename TileA, typename TileB, OperandA kOperandA, int kStride, int kBegin, int kEnd, int kMmas, int kTilesN,
          typename After = Nothing>
__device__ __forceinline__ void multiply_columns(float (&C)[kMmas][kTilesN][4], uint32_t a, uint32_t b, const After& after = After{}) {
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
        uint32_t A[kMmas][4];
#pragma unroll
        for (int m = 0; m < kMmas; ++m) {
            if (kOperandA == OperandA::kTransposed) ldmatrix_x4_trans(A[m], TileA::advance(a, m) + 16 * step * TileA::kPitch);
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
        after(step);
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

// to[row][column] = scale C, plus the old value with `accumulate`, in 16-byte pieces. Tile n of the warp holds columns 16 (kStride (n / 2)
// + first) + 8 (n % 2) .. + 7. Rows from `rows` on and columns from `columns` on are not touched.
template <typename T, int kStride, int kMmas, int kTilesN>
__device__ __forceinline__ void store_rows(const float (&C)[kMmas][kTilesN][4], float scale, T* to, int64_t row_stride, int row0, int rows,
                                           int first, int columns, bool aligned, bool accumulate, int lane) {
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
            const int column0 = 16 * (kStride * (n / 2) + first);
            uint32_t word[4];  // two columns each of: tile n, row g | tile n + 1, row g | tile n, row g + 8 | tile n + 1, row g + 8
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
            transpose_quad(word, lane % 4);  // now eight columns of one of these four
            if (accumulate) __syncwarp();    // every lane has read what other lanes overwrite
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

}  // namespace
}  // namespace fa
