// large_rows.cuh: rows whose lse is so large that P = exp(S - lse) would be wrong. Neighbouring float32 numbers are 0.008 apart at 1e5 and
// 1 apart at 1e7, so log(sum) is lost when it is added to such a maximum. For rows with |lse| > kLargeLse, the kernels that run before the
// products of the backward pass compute the row's maximum and sum again and store them separately: P = exp((S - max) - rest), with rest =
// log(sum). They compute S in the summation order of the kernel that computes P, because at such sizes another order gives another P.
//
// Where S is softmax_scale times a product and nothing else, max is the largest product, and P = exp(scale (product - max) - rest). The
// difference of two products is exact where it matters. A maximum that is rounded after scaling would be off by half a step of float32,
// which is 512 in the exponent at scores of 1e10.
//
// The lse of a backward call may cover keys that the call does not have: those of other parts of the sequence. Then the sum found here is
// smaller than that in lse, and the row keeps its lse. Differences up to `slack` may be the rounding of another kernel and do not count.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/common/general_scores.cuh"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"
#include "common/constants.h"
#include "common/element.cuh"
#include "device/launch.h"
#include "device/mma.cuh"

namespace fa {

constexpr float kLargeLse = 4096;  // half a step of float32 here changes P by 2.4e-4
__device__ __forceinline__ bool is_large(float lse) { return fabsf(lse) > kLargeLse && fabsf(lse) < INFINITY; }

// P = exp((score - max) - rest), or exp(scale (product - max) - rest). Ordinary rows have max = 0 and rest = lse.
struct RowBase {
    float max, rest;
};

enum class LseCovers { kKeysOfCall, kPerhapsMore };

// The softmax of one row. `terms` is the largest sum of |q k| over the keys, as an exponent; it decides how much the order of a product's
// sum matters.
struct RowSoftmax {
    float max = -INFINITY, sum = 0, terms = 0;
};
// The RowBase of a large row, computed by one thread. row.max times `factor` is an exponent, as lse and sink are; `exponential` and
// `logarithm` are in that unit. Returns false where lse covers more than these keys, or where the row has no keys: such a row keeps an
// ordinary base.
template <typename Exponential, typename Logarithm>
__device__ __forceinline__ bool base_of_row(RowBase& base, LseCovers covers, float lse, const RowSoftmax& row, float factor, float sink,
                                            const Exponential& exponential, const Logarithm& logarithm) {
    if (row.max == -INFINITY) return false;
    const float above = fmaf(-row.max, factor, sink);  // how far the sink exceeds the maximum
    const float rest = above > 0 ? above + logarithm(row.sum * exponential(-above) + 1) : logarithm(row.sum + exponential(above));
    const float slack = fmaxf(0x1p-20f * fabsf(lse), 0x1p-22f * row.terms);
    if (covers == LseCovers::kPerhapsMore && !(fmaf(row.max, factor, rest) - lse >= -slack)) return false;
    base = {row.max, rest};
    return true;
}

// ---- kernels on CUDA cores: one warp per row; a product is a chain of multiply-adds in the order of the columns ----

// kProduct: max is the largest product, without options. kOptions: max is the largest score, from transform_score.
enum class ScoreForm { kProduct, kOptions };

template <typename T>
__device__ __noinline__ RowBase large_row(const AttentionParams& p, const Sequence& s, int b, int head, int i, ScoreForm form,
                                          LseCovers covers) {
    const T* const q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head + i * p.q.row;
    const T* const k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head;
    const KeyRange range = key_range(p, s, i);
    // With a scale below zero, the smallest product gives the largest score. With a scale of zero all scores are zero, and so is their
    // maximum.
    const bool is_product = form == ScoreForm::kProduct && p.scale != 0;
    const float sign = is_product && p.scale < 0 ? -1.0f : 1.0f, factor = is_product ? fabsf(p.scale) : 1.0f;
    RowSoftmax row;
    for (int j = range.begin + int(threadIdx.x % 32); j < range.end; j += 32) {
        float dot = 0, terms = 0;
        for (int d = 0; d < p.headdim; ++d) {
            const float a = to_float(q[d]), b = to_float(k[j * p.k.row + d]);
            dot = fmaf(a, b, dot), terms += fabsf(a * b);
        }
        const float value = is_product ? sign * dot : transform_score(p, s, b, head, i, j, dot);
        if (value == -INFINITY) continue;
        row.terms = fmaxf(row.terms, terms * fabsf(p.scale));
        if (value > row.max) row.sum *= exp_nonpositive((row.max - value) * factor), row.max = value;
        row.sum += exp_nonpositive((value - row.max) * factor);
    }
    const float max = reduce_max<32>(row.max);
    row.sum = reduce_sum<32>(row.max == -INFINITY ? 0.0f : row.sum * exp_nonpositive((row.max - max) * factor));
    row.max = max, row.terms = reduce_max<32>(row.terms);
    const float lse = p.lse[lse_offset(p, s, head) + i];
    RowBase base{0.0f, lse};
    const auto logarithm = [](float x) { return logf(x); };
    if (base_of_row(base, covers, lse, row, factor, sink_of(p.sinks, head), exp_nonpositive, logarithm)) base.max *= sign;
    return base;
}

// ---- kernels on tensor cores ----

// Scores are either natural, or products that scale_log2 > 0 turns into exponents of 2; products may have a mask and ALiBi, in their own
// unit. max and rest are in the unit of the scores.
//
// The main loops of these kernels take lse as an exponent of 2, subtract it in one multiply-add per score, and have no room for `rest`. For
// a large row they find the statistic kLargeRow in place of lse, and its RowBase elsewhere. They replace the row's scores by large_score
// and then exponentiate them like any others, because kLargeRow is zero. large_score is at most 0 even where this kernel adds the terms of
// a product in another order, so P <= 1.
constexpr float kLargeRow = -0.0f;
__device__ __forceinline__ bool is_large_row(float statistic) { return __float_as_uint(statistic) == 0x80000000u; }
// The statistic of an ordinary row; +inf for a row that sees no key. Never kLargeRow.
__device__ __forceinline__ float row_statistic(float lse) {
    const float x = lse == -INFINITY ? INFINITY : lse * kLog2e;
    return x == 0.0f ? 0.0f : x;
}
__device__ __forceinline__ float large_score(float S, float2 base) { return fminf((S - base.x) - base.y, 0.0f); }

constexpr float kZeroProbability = 1e4f;  // 2^-x is 0

// ALiBi of scores that are still products. The functions fix the rounding: at such sizes another rounding gives another P.
__device__ __forceinline__ float alibi_of_products(const AttentionParams& p, int batch, int head) {
    return __fdiv_rn(p.alibi_slopes[batch * p.alibi_batch + head], p.scale);
}
__device__ __forceinline__ float alibi_product(float product, float slope, int distance) {
    return __fsub_rn(product, __fmul_rn(slope, fabsf(float(distance))));
}
// The mask and ALiBi on a fragment of products.
template <int kCount>
__device__ __forceinline__ void change_products(const AttentionParams& p, const FragmentPlace& at, float (&S)[kCount]) {
    const float slope = p.alibi_slopes ? alibi_of_products(p, at.batch, at.head) : 0.0f;
    const uint8_t* attend = static_cast<const uint8_t*>(p.mask.data);
    const int64_t base = at.batch * p.mask.batch + at.head * p.mask.head;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int query = at.row + i / 2 % 2 * 8, key = at.key + i / 4 * 8 + i % 2;
        if (p.alibi_slopes) S[i] = alibi_product(S[i], slope, query + at.shift - key);
        if (p.mask.data && query < at.seqlen_q && key < at.seqlen_k && !attend[base + query * p.mask.row + key]) S[i] = -INFINITY;
    }
}

// Called by a whole warp. Calls store(i, base) for each large row i among row0 .. row0 + 15 of a head, in one lane each. kBlocks: scores
// that are products may have a mask by blocks.
template <typename T, bool kBlocks = false, typename Store>
__device__ __forceinline__ void find_large_rows_inline(const AttentionParams& p, const Sequence& s, int b, int head, int row0, bool natural,
                                                       LseCovers covers, const Store& store) {
    const int lane = threadIdx.x % 32, g = lane / 4, quad = lane % 4;
    float lse[2];
    for (int r = 0; r < 2; ++r) {
        const int i = row0 + g + 8 * r;
        lse[r] = i < s.seqlen_q ? p.lse[lse_offset(p, s, head) + i] : -INFINITY;
    }
    if (!__any_sync(~0u, is_large(lse[0]) || is_large(lse[1]))) return;

    const T* const q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head;
    const T* const k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head;
    // Columns `column` and `column` + 1 of a row; zeros past its end.
    const auto pair = [&](const T* row, bool exists, int column) -> uint32_t {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(row + column);
        const uint32_t low = exists && column < p.headdim ? x[0] : 0, high = exists && column + 1 < p.headdim ? x[1] : 0;
        return low | high << 16;
    };
    const float unit = natural ? 1.0f : kLog2e, factor = natural ? 1.0f : p.scale * kLog2e;  // these turn lse and scores into exponents
    const auto exponential = [&](float x) { return exp2_approx(natural ? x * kLog2e : x); };
    const KeyRange seen[2] = {key_range(p, s, min(row0 + g, s.seqlen_q - 1)), key_range(p, s, min(row0 + g + 8, s.seqlen_q - 1))};
    const int first = key_range(p, s, row0).begin, end = key_range(p, s, min(row0 + 15, s.seqlen_q - 1)).end;
    RowSoftmax row[2];
#pragma unroll 1
    for (int key0 = first / 8 * 8; key0 < end; key0 += 8) {
        float S[4] = {}, terms[4] = {};
#pragma unroll 1
        for (int column = 2 * quad; column < p.headdim + 2 * quad; column += 16) {
            uint32_t A[4], B[2];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int i = row0 + g + x % 2 * 8;
                A[x] = pair(q + i * p.q.row, i < s.seqlen_q, column + x / 2 * 8);
            }
#pragma unroll
            for (int x = 0; x < 2; ++x) B[x] = pair(k + (key0 + g) * p.k.row, key0 + g < s.seqlen_k, column + 8 * x);
            mma<T>(S, A, B[0], B[1]);
            constexpr uint32_t kNoSigns = 0x7FFF7FFFu;
            for (uint32_t& x : A) x &= kNoSigns;
            mma<T>(terms, A, B[0] & kNoSigns, B[1] & kNoSigns);
        }
        const int key = key0 + 2 * quad;
        const FragmentPlace at{b, head, row0 + g, key, s.seqlen_q, s.seqlen_k, s.shift};
        if (natural) {
            transform_fragment<T>(p, at, S);
            if (p.intervals.data) hide_by_intervals(p, at, S);
            if (p.blocks.data) hide_by_blocks(p, at, S);
        } else if (p.alibi_slopes || p.mask.data || p.intervals.data || (kBlocks && p.blocks.data)) {
            change_products(p, at, S);
            if (p.intervals.data) hide_by_intervals(p, at, S);
            if (kBlocks && p.blocks.data) hide_by_blocks(p, at, S);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int r = e / 2, j = key + e % 2;
            if (j < seen[r].begin || j >= seen[r].end || S[e] == -INFINITY) continue;
            row[r].terms = fmaxf(row[r].terms, terms[e] * fabsf(p.scale * unit));
            if (S[e] > row[r].max) row[r].sum *= exponential((row[r].max - S[e]) * factor), row[r].max = S[e];
            row[r].sum += exponential((S[e] - row[r].max) * factor);
        }
    }
    const float sink = sink_of(p.sinks, head);
    for (int r = 0; r < 2; ++r) {
        const float max = quad_max(row[r].max);
        row[r].sum = quad_sum(row[r].max == -INFINITY ? 0.0f : row[r].sum * exponential((row[r].max - max) * factor));
        row[r].max = max, row[r].terms = quad_max(row[r].terms);
        if (quad != 0 || !is_large(lse[r])) continue;
        RowBase base{0.0f, lse[r]};
        const auto logarithm = [&](float x) { return natural ? logf(x) : log2f(x); };
        const bool whole = base_of_row(base, covers, lse[r] * unit, row[r], factor, sink * unit, exponential, logarithm);
        if (!natural && !whole) continue;  // the row keeps its ordinary statistic
        if (!natural) base.rest = fminf(base.rest, kZeroProbability) / factor;
        store(row0 + g + 8 * r, base);
    }
}

// A function call instead, for kernels with few registers left: large rows are rare.
template <typename T, bool kBlocks = false, typename Store>
__device__ __noinline__ void find_large_rows(const AttentionParams& p, const Sequence& s, int b, int head, int row0, bool natural,
                                             LseCovers covers, const Store& store) {
    find_large_rows_inline<T, kBlocks>(p, s, b, head, row0, natural, covers, store);
}

// Statistics of all rows of a call, laid out like lse.
struct CallStatistics {
    float* lse;     // row_statistic, or kLargeRow
    float2* large;  // RowBase of the large rows
};
FA_HOST_DEVICE size_t row_count(const AttentionParams& p) {
    return size_t(p.cu_seqlens_q ? p.total_q : int64_t(p.batch) * p.seqlen_q) * p.nheads;
}

namespace {

constexpr int kStatisticsThreads = 128, kStatisticsRows = 16;  // threads of a block; rows of a warp
constexpr int64_t kMostRowBlocks = 1 << 16;                    // the most blocks of a grid; its warps loop over the rows

struct StatisticsParams {
    AttentionParams attention;
    CallStatistics to;
    bool natural;
    LseCovers covers;
};
template <typename T>
__global__ void __launch_bounds__(kStatisticsThreads) row_statistics_kernel(const __grid_constant__ StatisticsParams params) {
    constexpr int kWarps = kStatisticsThreads / 32;
    const AttentionParams& p = params.attention;
    const CallStatistics& to = params.to;
    const int groups = (p.seqlen_q + kStatisticsRows - 1) / kStatisticsRows, lane = threadIdx.x % 32;
    const int64_t all = int64_t(groups) * p.nheads * p.batch, first = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    for (int64_t at = first; at < all; at += int64_t(gridDim.x) * kWarps) {
        const int row0 = int(at % groups) * kStatisticsRows, head = int(at / groups % p.nheads), b = int(at / groups / p.nheads);
        const Sequence s = sequence_of(p, b);
        if (row0 >= s.seqlen_q) continue;
        const int64_t own = lse_offset(p, s, head);
        if (lane < kStatisticsRows && row0 + lane < s.seqlen_q) to.lse[own + row0 + lane] = row_statistic(p.lse[own + row0 + lane]);
        __syncwarp();
        find_large_rows_inline<T>(p, s, b, head, row0, params.natural, params.covers, [&](int i, const RowBase& base) {
            to.lse[own + i] = kLargeRow;
            to.large[own + i] = make_float2(base.max, base.rest);
        });
    }
}
template <typename T>
cudaError_t launch_row_statistics(const AttentionParams& p, const CallStatistics& to, bool natural, LseCovers covers, cudaStream_t stream) {
    constexpr int kWarps = kStatisticsThreads / 32;
    const int64_t warps = (int64_t(p.seqlen_q) + kStatisticsRows - 1) / kStatisticsRows * p.nheads * p.batch;
    const int64_t blocks = (warps + kWarps - 1) / kWarps;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(row_statistics_kernel<T>, unsigned(blocks < kMostRowBlocks ? blocks : kMostRowBlocks), kStatisticsThreads, 0,
                         stream, StatisticsParams{p, to, natural, covers});
}

}  // namespace

}  // namespace fa
