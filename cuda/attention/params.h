// params.h: what a kernel is given. Plain data, validated by api/ and passed by value to every kernel, host or device.
// Inputs (batch, seqlen, heads, dim) by strides in elements; last axis contiguous. See flash_attn.h for the meaning of each option.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FA_HOST_DEVICE inline
#endif

namespace fa {

enum class DType : int32_t { kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3, kFloat8E4M3 = 4 };

struct TensorView {
    void* data;
    int64_t batch, row, head;  // strides in elements
};

struct ScoreView {
    const void* data;  // nullptr = option off
    int64_t batch, head, row;
};

struct DescaleView {
    const float* data;
    int64_t batch, head;  // strides
};

struct AttentionParams {
    TensorView q, k, v, out;
    float* lse;  // (batch, nheads, seqlen_q), varlen (nheads, total_q); nullptr = not wanted
    DType dtype, out_dtype;

    int32_t batch, nheads, nheads_k;
    int32_t group;  // nheads / nheads_k: query head h reads key head h / group
    int32_t headdim, headdim_v;
    int32_t seqlen_q, seqlen_k;  // varlen: upper bounds over the batch

    const int32_t* cu_seqlens_q;  // nullptr = dense
    const int32_t* cu_seqlens_k;
    int32_t total_q, total_k;

    float scale;    // softmax_scale, always set
    float softcap;  // 0 = off
    const float* alibi_slopes;
    int64_t alibi_batch;
    ScoreView bias;
    DType bias_dtype;
    ScoreView mask;  // uint8
    bool top_left;
    int32_t window_left, window_right;  // -1 = open; causal is window_right = 0
    const float* sinks;

    uint32_t dropout_threshold;  // an element is dropped iff its 16 random bits are below this; 0 = no dropout
    float dropout_scale;         // 65536 / (65536 - threshold)
    uint32_t dropout_key[2];     // philox.h: dropout_key(seed, offset)

    bool allow_tf32;
    int32_t num_threads;
    void* workspace;

    DescaleView q_descale, k_descale, v_descale;  // fp8 only: by query head, by key head, by key head

    // True when a score is more than scale * (q . k) under a window: the general instantiation of a kernel.
    FA_HOST_DEVICE bool general_scores() const { return softcap != 0 || alibi_slopes || bias.data || mask.data || dropout_threshold; }
};

struct ScoreGradient {
    float* data;               // nullptr = not wanted
    int64_t batch, head, row;  // strides; 0 = summed over the axis
};

struct BackwardParams {
    AttentionParams forward;  // out and lse are inputs now; workspace and num_threads are the backward call's
    TensorView dout, dq, dk, dv;
    ScoreGradient dbias;
    float* dsinks;  // (nheads)
    bool accumulate, deterministic;
};

// Sequence b of a dense or varlen call: element offsets of its first row in each tensor, and its true lengths.
struct Sequence {
    int64_t q, k, v, out, lse;  // add head * stride (lse: row) to reach a row of a head
    int32_t seqlen_q, seqlen_k;
    int32_t shift;  // i_aligned = i + shift
};

FA_HOST_DEVICE int32_t clamp_to(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

// Device-side cu_seqlens cannot be checked before the launch, so out-of-range entries are clamped: wrong lengths, never a wild address.
FA_HOST_DEVICE Sequence sequence_of(const AttentionParams& p, int32_t b) {
    Sequence s;
    if (p.cu_seqlens_q) {
        const int32_t q0 = clamp_to(p.cu_seqlens_q[b], 0, p.total_q), q1 = clamp_to(p.cu_seqlens_q[b + 1], q0, p.total_q);
        const int32_t k0 = clamp_to(p.cu_seqlens_k[b], 0, p.total_k), k1 = clamp_to(p.cu_seqlens_k[b + 1], k0, p.total_k);
        s.seqlen_q = clamp_to(q1 - q0, 0, p.seqlen_q);
        s.seqlen_k = clamp_to(k1 - k0, 0, p.seqlen_k);
        s.q = q0 * p.q.row, s.out = q0 * p.out.row, s.lse = q0;
        s.k = k0 * p.k.row, s.v = k0 * p.v.row;
    } else {
        s.seqlen_q = p.seqlen_q, s.seqlen_k = p.seqlen_k;
        s.q = b * p.q.batch, s.out = b * p.out.batch, s.lse = int64_t(b) * p.nheads * p.seqlen_q;
        s.k = b * p.k.batch, s.v = b * p.v.batch;
    }
    s.shift = p.top_left ? 0 : s.seqlen_k - s.seqlen_q;
    return s;
}

// The same of the tensors that only the backward pass has.
struct GradientSequence {
    int64_t dout, dq, dk, dv;
};

FA_HOST_DEVICE GradientSequence gradients_of(const BackwardParams& p, int32_t b) {
    if (!p.forward.cu_seqlens_q) return {b * p.dout.batch, b * p.dq.batch, b * p.dk.batch, b * p.dv.batch};
    const int64_t q0 = clamp_to(p.forward.cu_seqlens_q[b], 0, p.forward.total_q);
    const int64_t k0 = clamp_to(p.forward.cu_seqlens_k[b], 0, p.forward.total_k);
    return {q0 * p.dout.row, q0 * p.dq.row, k0 * p.dk.row, k0 * p.dv.row};
}

// Offset of lse[b, head, row 0]: rows of one head are contiguous.
FA_HOST_DEVICE int64_t lse_offset(const AttentionParams& p, const Sequence& s, int32_t head) {
    return s.lse + int64_t(head) * (p.cu_seqlens_q ? p.total_q : p.seqlen_q);
}

// A workspace may start anywhere: a kernel that wants an alignment asks for as many bytes more.
inline void* align_up(void* pointer, uintptr_t alignment) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(pointer) + alignment - 1) / alignment * alignment);
}

struct MergeParams {
    TensorView out_a, out_b, out;  // (batch, seqlen, nheads, headdim_v)
    const float *lse_a, *lse_b;    // (batch, nheads, seqlen)
    float* lse;
    DType dtype;
    int32_t batch, nheads, headdim_v, seqlen;
    int32_t num_threads;
};

}  // namespace fa
