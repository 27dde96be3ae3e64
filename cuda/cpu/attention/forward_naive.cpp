// forward_naive.cpp: standard attention, with all of S in the workspace. Its three loops define attention; they are slow.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/common/dropout.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/score.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

// Computes row i of S. `q` is scratch for one row of Q in float32.
template <DType dtype>
void scores(const AttentionParams& p, const Sequence& s, int32_t b, int32_t head, int32_t i, float* q, float* row) {
    const int64_t q0 = s.q + head * p.q.head + i * p.q.row;
    const int32_t head_k = head / p.group;
    const KeyRange range = key_range(p, s, i);
    for (int32_t d = 0; d < p.headdim; ++d) q[d] = load(p.q.data, q0 + d, p.dtype);
    for (int32_t j = 0; j < s.seqlen_k; ++j) {
        row[j] = -INFINITY;
        if (j < range.begin || j >= range.end) continue;
        const float dot = dot_product<dtype>(q, p.k.data, key_row(p, p.k, s.k, b, j) + head_k * p.k.head, p.headdim);
        const float scale = cache_scale(p, p.cache.k_scale, b, j, head_k);
        row[j] = transform(p, s, b, head, i, j, dot * scale).value;
        if (std::fabs(dot) < INFINITY) continue;
        double exact = 0;  // the score may be finite although the product overflows float32
        for (int32_t d = 0; d < p.headdim; ++d)
            exact += double(q[d]) * element<dtype>(p.k.data, key_row(p, p.k, s.k, b, j) + head_k * p.k.head + d);
        row[j] = float(transform(p, s, b, head, i, j, exact * scale).value);
    }
}

// Turns a row of S into a row of P, writes lse, and adds the row before dropout to key_sums if they are wanted. A hidden key keeps its
// -inf, by which output() skips its value: 0 x NaN would be NaN.
void softmax(const AttentionParams& p, const Sequence& s, int32_t b, int32_t head, int32_t i, float* row, float* key_sums) {
    float row_max = p.sinks ? p.sinks[head] : -INFINITY;
    for (int32_t j = 0; j < s.seqlen_k; ++j) row_max = std::fmax(row_max, row[j]);
    if (row_max == -INFINITY) row_max = 0;
    float row_sum = p.sinks ? std::exp(p.sinks[head] - row_max) : 0;
    for (int32_t j = 0; j < s.seqlen_k; ++j)
        if (row[j] != -INFINITY) row_sum += row[j] = std::exp(row[j] - row_max);
    for (int32_t j = 0; j < s.seqlen_k; ++j) {
        if (row[j] == -INFINITY) continue;
        row[j] /= row_sum;
        if (key_sums) key_sums[j] += row[j];
        if (p.dropout_threshold) row[j] = dropped(p, dropout_block(p, b, head, i, j), j) ? 0 : row[j] * p.dropout_scale;
    }
    if (p.lse) p.lse[lse_offset(p, s, head) + i] = row_sum == 0 ? -INFINITY : row_max + std::log(row_sum);
}

// Computes row i of out = P v. `out` is scratch for one row of out in float32.
template <DType dtype>
void output(const AttentionParams& p, const Sequence& s, int32_t b, int32_t head, int32_t i, const float* row, float* out) {
    const int64_t out0 = s.out + head * p.out.head + i * p.out.row;
    const int32_t head_k = head / p.group;
    for (int32_t d = 0; d < p.headdim_v; ++d) out[d] = 0;
    for (int32_t j = 0; j < s.seqlen_k; ++j) {
        if (row[j] == -INFINITY) continue;
        const int64_t v0 = key_row(p, p.v, s.v, b, j) + head_k * p.v.head;
        const float weight = row[j] * cache_scale(p, p.cache.v_scale, b, j, head_k);
        for (int32_t d = 0; d < p.headdim_v; ++d) out[d] += weight * element<dtype>(p.v.data, v0 + d);
    }
    for (int32_t d = 0; d < p.headdim_v; ++d) store(p.out.data, out0 + d, p.out_dtype, out[d]);
}

// Floats that one thread needs: S, and one row of Q or of out.
size_t scratch_size(const AttentionParams& p) { return size_t(p.seqlen_q) * p.seqlen_k + std::max(p.headdim, p.headdim_v); }

template <DType dtype>  // of K and V
void attend(const AttentionParams& p, int32_t b, int32_t head, float* scratch) {
    const Sequence s = sequence_of(p, b);
    float *const S = scratch, *const line = scratch + size_t(p.seqlen_q) * p.seqlen_k;
    const int64_t n = s.seqlen_k;
    for (int32_t i = 0; i < s.seqlen_q; ++i) scores<dtype>(p, s, b, head, i, line, S + i * n);
    if (p.max_score) p.max_score[int64_t(b) * p.nheads + head] = std::accumulate(S, S + s.seqlen_q * n, -INFINITY, fmaxf) + 0.0f;
    float* const key_sums = p.key_sums ? p.key_sums + key_sums_offset(p, b, head) : nullptr;
    if (key_sums) std::fill_n(key_sums, n, 0.0f);
    for (int32_t i = 0; i < s.seqlen_q; ++i) softmax(p, s, b, head, i, S + i * n, key_sums);
    for (int32_t i = 0; i < s.seqlen_q; ++i) output<dtype>(p, s, b, head, i, S + i * n, line);
}

}  // namespace

size_t forward_naive_workspace(const AttentionParams& p) {
    size_t bytes;  // may overflow, because S grows with the product of the lengths: up to 2^62 floats per thread
    if (__builtin_mul_overflow(size_t(p.num_threads) * sizeof(float), scratch_size(p), &bytes) || bytes > kMostWorkspace)
        return kMostWorkspace;
    return bytes + alignof(float);
}

void forward_naive(const AttentionParams& p) {
    float* const workspace = static_cast<float*>(align_up(p.workspace, alignof(float)));
    const double work = double(p.batch) * p.nheads * p.seqlen_q * p.seqlen_k * (p.headdim + p.headdim_v);  // multiply-adds
    const int threads = worthwhile_threads(work / 5, p.num_threads);
    const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
    const auto attend_as = dtype == DType::kFloat32      ? attend<DType::kFloat32>
                           : dtype == DType::kFloat16    ? attend<DType::kFloat16>
                           : dtype == DType::kBFloat16   ? attend<DType::kBFloat16>
                           : dtype == DType::kFloat8E4M3 ? attend<DType::kFloat8E4M3>
                                                         : attend<DType::kInt8>;
    parallel_for(int64_t(p.batch) * p.nheads, threads, [&](int64_t task, int thread) {
        attend_as(p, int32_t(task / p.nheads), int32_t(task % p.nheads), workspace + thread * scratch_size(p));
    });
}

}  // namespace fa::cpu
