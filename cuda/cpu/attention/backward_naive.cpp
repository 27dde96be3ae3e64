// backward_naive.cpp: the gradients of standard attention, one row of S at a time. These loops define the backward pass. They are slow; the
// results do not depend on the number of threads.
//
//     P_ij = exp(S_ij - lse_i)      dP_ij = dout_i . v_j
//     delta_i = dout_i . out_i - dlse_i      dS_ij = P_ij (dP_ij - delta_i)
//     dv_j = sum_i P_ij dout_i      dk_j = sum_i dS_ij slope_ij q_i      dq_i = sum_j dS_ij slope_ij k_j
//     dbias_ij = dS_ij, summed over the broadcast axes of bias      dsink = -sum_i exp(sink - lse_i) delta_i
// slope is d S_ij / d (q_i . k_j). Dropout multiplies dP, and the P of dv, by 0 or 1 / (1 - p).
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/common/dropout.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/score.h"
#include "cpu/attention/statistics.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

// Scratch of one thread. weight, grad, slope and key have an entry for each key that the query sees.
struct Scratch {
    float *q, *dout, *dq;  // of one query: headdim, headdim_v, headdim
    float *weight, *grad;  // of each visible key: P after dropout, dS
    float* slope;          // of each visible key
    int32_t* key;          // the visible keys
    float *dk, *dv;        // of all keys of one head: seqlen_k x headdim, seqlen_k x headdim_v
    static size_t size(const AttentionParams& p) {
        return 2 * size_t(p.headdim) + p.headdim_v + size_t(p.seqlen_k) * (4 + p.headdim + p.headdim_v);
    }
    Scratch(float* base, const AttentionParams& p) {
        const size_t keys = p.seqlen_k;
        q = base, dout = q + p.headdim, dq = dout + p.headdim_v;
        weight = dq + p.headdim, grad = weight + keys, slope = grad + keys;
        key = reinterpret_cast<int32_t*>(slope + keys);
        dk = slope + 2 * keys, dv = dk + keys * p.headdim;
    }
};

// Offsets of row 0 of a head in sequence `batch`.
struct Head {
    Sequence s;
    int64_t q, k, v, out, dout, dq, lse;
    int32_t batch, head;
    Head(const BackwardParams& b, int32_t batch, int32_t head) : s(sequence_of(b.forward, batch)), batch(batch), head(head) {
        const AttentionParams& p = b.forward;
        const GradientSequence g = gradients_of(b, batch);
        q = s.q + head * p.q.head, k = s.k + head / p.group * p.k.head, v = s.v + head / p.group * p.v.head;
        out = s.out + head * p.out.head, dout = g.dout + head * b.dout.head, dq = g.dq + head * b.dq.head;
        lse = lse_offset(p, s, head);
    }
};

float delta(const BackwardParams& b, const Head& h, int32_t i) {
    const AttentionParams& p = b.forward;
    float sum = 0;
    for (int32_t d = 0; d < p.headdim_v; ++d)
        sum += load(b.dout.data, h.dout + i * b.dout.row + d, p.dtype) * load(p.out.data, h.out + i * p.out.row + d, p.dtype);
    return b.dlse ? sum - b.dlse[h.lse + i] : sum;
}

// Stores the scores of query i in row.grad and returns the number of keys that the query sees.
template <DType dtype>
int32_t scores(const BackwardParams& b, const Head& h, int32_t i, const Scratch& row) {
    const AttentionParams& p = b.forward;
    if (p.lse[h.lse + i] == -INFINITY) return 0;
    for (int32_t d = 0; d < p.headdim; ++d) row.q[d] = load(p.q.data, h.q + i * p.q.row + d, dtype);
    const KeyRange range = key_range(p, h.s, i);
    int32_t count = 0;
    for (int32_t j = range.begin; j < range.end; ++j) {
        const float dot = dot_product<dtype>(row.q, p.k.data, h.k + j * p.k.row, p.headdim);
        const auto score = transform(p, h.s, h.batch, h.head, i, j, dot);
        if (score.value == -INFINITY) continue;
        row.key[count] = j, row.grad[count] = score.value, row.slope[count] = score.slope;
        ++count;
    }
    return count;
}

// The statistics of query i, from its scores in row.grad.
RowStatistics statistics(const AttentionParams& p, const Head& h, int32_t i, const Scratch& row, int32_t count) {
    const float lse = p.lse[h.lse + i];
    if (!is_large(lse)) return {lse, 0};
    float row_max = p.sinks ? p.sinks[h.head] : -INFINITY;
    for (int32_t x = 0; x < count; ++x) row_max = std::fmax(row_max, row.grad[x]);
    float row_sum = p.sinks ? std::exp(p.sinks[h.head] - row_max) : 0;
    for (int32_t x = 0; x < count; ++x) row_sum += std::exp(row.grad[x] - row_max);
    return apart(lse, row_max, row_sum);
}

// Fills `row` for query i and returns the number of keys that the query sees.
template <DType dtype>
int32_t gradients(const BackwardParams& b, const Head& h, int32_t i, const Scratch& row) {
    const AttentionParams& p = b.forward;
    const int32_t count = scores<dtype>(b, h, i, row);
    const RowStatistics own = statistics(p, h, i, row, count);
    const float own_delta = delta(b, h, i);
    for (int32_t d = 0; d < p.headdim_v; ++d) row.dout[d] = load(b.dout.data, h.dout + i * b.dout.row + d, dtype);
    for (int32_t x = 0; x < count; ++x) {
        const int32_t j = row.key[x];
        float keep = 1;
        if (p.dropout_threshold) keep = dropped(p, dropout_block(p, h.batch, h.head, i, j), j) ? 0 : p.dropout_scale;
        const float P = probability(row.grad[x], own);
        const float dP = keep * dot_product<dtype>(row.dout, p.v.data, h.v + j * p.v.row, p.headdim_v);
        row.weight[x] = P * keep, row.grad[x] = P * (dP - own_delta);
    }
    return count;
}

void write(void* data, int64_t at, DType dtype, bool accumulate, const float* value, int32_t count) {
    for (int32_t d = 0; d < count; ++d) store(data, at + d, dtype, value[d] + (accumulate ? load(data, at + d, dtype) : 0));
}

// dq, dk and dv for the query heads that share a key head.
template <DType dtype>
void backward_head(const BackwardParams& b, int32_t batch, int32_t head_k, const Scratch& row) {
    const AttentionParams& p = b.forward;
    const Sequence s = sequence_of(p, batch);
    std::fill(row.dk, row.dk + int64_t(s.seqlen_k) * p.headdim, 0.0f);
    std::fill(row.dv, row.dv + int64_t(s.seqlen_k) * p.headdim_v, 0.0f);
    for (int32_t head = head_k * p.group; head < (head_k + 1) * p.group; ++head) {
        const Head h(b, batch, head);
        for (int32_t i = 0; i < s.seqlen_q; ++i) {
            const int32_t count = gradients<dtype>(b, h, i, row);
            std::fill(row.dq, row.dq + p.headdim, 0.0f);
            for (int32_t x = 0; x < count; ++x) {
                const int64_t j = row.key[x];
                const float dS = row.grad[x] * row.slope[x];
                for (int32_t d = 0; d < p.headdim; ++d) row.dq[d] += dS * load(p.k.data, h.k + j * p.k.row + d, dtype);
                for (int32_t d = 0; d < p.headdim; ++d) row.dk[j * p.headdim + d] += dS * row.q[d];
                for (int32_t d = 0; d < p.headdim_v; ++d) row.dv[j * p.headdim_v + d] += row.weight[x] * row.dout[d];
            }
            write(b.dq.data, h.dq + i * b.dq.row, dtype, b.accumulate, row.dq, p.headdim);
        }
    }
    const GradientSequence g = gradients_of(b, batch);
    for (int64_t j = 0; j < s.seqlen_k; ++j) {
        write(b.dk.data, g.dk + head_k * b.dk.head + j * b.dk.row, dtype, b.accumulate, row.dk + j * p.headdim, p.headdim);
        write(b.dv.data, g.dv + head_k * b.dv.head + j * b.dv.row, dtype, b.accumulate, row.dv + j * p.headdim_v, p.headdim_v);
    }
}

// One batch entry and head of dbias. All parts are added in a fixed order.
template <DType dtype>
void backward_bias(const BackwardParams& b, int32_t own_batch, int32_t own_head, const Scratch& row) {
    const AttentionParams& p = b.forward;
    float* const dbias = b.dbias.data + own_batch * b.dbias.batch + own_head * b.dbias.head;
    if (!b.accumulate)
        for (int64_t i = 0; i < (b.dbias.row ? p.seqlen_q : 1); ++i) std::fill_n(dbias + i * b.dbias.row, p.seqlen_k, 0.0f);
    for (int32_t batch = own_batch; batch < (b.dbias.batch ? own_batch + 1 : p.batch); ++batch)
        for (int32_t head = own_head; head < (b.dbias.head ? own_head + 1 : p.nheads); ++head) {
            const Head h(b, batch, head);
            for (int32_t i = 0; i < h.s.seqlen_q; ++i) {
                const int32_t count = gradients<dtype>(b, h, i, row);
                for (int32_t x = 0; x < count; ++x) dbias[i * b.dbias.row + row.key[x]] += row.grad[x];
            }
        }
}

template <DType dtype>
void backward_sink(const BackwardParams& b, int32_t head, const Scratch& row) {
    const AttentionParams& p = b.forward;
    double sum = 0;
    for (int32_t batch = 0; batch < p.batch; ++batch) {
        const Head h(b, batch, head);
        for (int32_t i = 0; i < h.s.seqlen_q; ++i) {
            const float lse = p.lse[h.lse + i];
            if (lse == -INFINITY || p.sinks[head] == -INFINITY) continue;
            const int32_t count = is_large(lse) ? scores<dtype>(b, h, i, row) : 0;
            sum -= probability(p.sinks[head], statistics(p, h, i, row, count)) * delta(b, h, i);
        }
    }
    b.dsinks[head] = float(sum) + (b.accumulate ? b.dsinks[head] : 0);
}

template <typename Work>
void with_dtype(DType dtype, const Work& work) {
    if (dtype == DType::kFloat32) work(std::integral_constant<DType, DType::kFloat32>{});
    else if (dtype == DType::kFloat16) work(std::integral_constant<DType, DType::kFloat16>{});
    else work(std::integral_constant<DType, DType::kBFloat16>{});
}

int threads_for(const AttentionParams& p) {
    const double work = double(p.batch) * p.nheads * p.seqlen_q * p.seqlen_k * (p.headdim + p.headdim_v);  // multiply-adds
    return work < 1e6 ? 1 : p.num_threads;                                                                 // too little to share
}

Scratch scratch_of(const AttentionParams& p, int thread) {
    return {static_cast<float*>(align_up(p.workspace, alignof(float))) + thread * Scratch::size(p), p};
}

}  // namespace

size_t backward_naive_workspace(const BackwardParams& b) {
    return size_t(b.forward.num_threads) * Scratch::size(b.forward) * sizeof(float) + alignof(float);
}

void backward_naive(const BackwardParams& b) {
    const AttentionParams& p = b.forward;
    with_dtype(p.dtype, [&](auto dtype) {
        parallel_for(int64_t(p.batch) * p.nheads_k, threads_for(p), [&](int64_t task, int thread) {
            backward_head<dtype()>(b, int32_t(task / p.nheads_k), int32_t(task % p.nheads_k), scratch_of(p, thread));
        });
    });
}

void backward_scores(const BackwardParams& b) {
    const AttentionParams& p = b.forward;
    const int32_t batches = b.dbias.batch ? p.batch : 1, heads = b.dbias.head ? p.nheads : 1;
    with_dtype(p.dtype, [&](auto dtype) {
        if (b.dsinks)
            parallel_for(p.nheads, threads_for(p),
                         [&](int64_t head, int thread) { backward_sink<dtype()>(b, int32_t(head), scratch_of(p, thread)); });
        if (!b.dbias.data) return;
        parallel_for(int64_t(batches) * heads, threads_for(p), [&](int64_t task, int thread) {
            backward_bias<dtype()>(b, int32_t(task / heads), int32_t(task % heads), scratch_of(p, thread));
        });
    });
}

}  // namespace fa::cpu
