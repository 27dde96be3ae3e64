// wgmma_sm90/store.cuh: stores dK and dV from the registers of the Hopper backward.
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/params.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {

// Writes gradient fragment d, for keys `key` and key + 8, times `factor` to rows of dK or dV. The lanes of a quad exchange their pairs, so
// that each lane stores 16 contiguous bytes: columns from 8 (4 x + quad) on.
template <typename T, int kCount>
__device__ __forceinline__ void store_gradient(const float (&d)[kCount], const TensorView& view, int64_t offset, int columns, float factor,
                                               bool accumulate, int key, int seqlen_k) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        T* row = static_cast<T*>(view.data) + offset + (key + 8 * r) * view.row;
#pragma unroll
        for (int x = 0; x < kCount / 16; ++x) {
            const int column = 8 * (4 * x + quad);
            const bool inside = key + 8 * r < seqlen_k && column < columns;
            uint32_t pairs[4] = {};
            if (accumulate) {
                if (inside) reinterpret_cast<uint4&>(pairs) = *reinterpret_cast<const uint4*>(row + column);
                transpose_quad(pairs, quad);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* pair = d + 4 * (4 * x + j) + 2 * r;
                float low = pair[0] * factor, high = pair[1] * factor;
                if (accumulate) {
                    const float2 old = unpack_16<T>(pairs[j]);
                    low += old.x, high += old.y;
                }
                pairs[j] = pack_16<T>(low, high);
            }
            transpose_quad(pairs, quad);
            if (inside) *reinterpret_cast<uint4*>(row + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}
// Writes fragment d to rows of float sums: those of a part of a walk, which have the columns of the plan. add_parts scales them.
template <int kCount>
__device__ __forceinline__ void store_sums(const float (&d)[kCount], const TensorView& view, int64_t offset, int key, int seqlen_k) {
    constexpr int kColumns = 2 * kCount;
    float* const rows = static_cast<float*>(view.data) + offset + int64_t(key) * kColumns + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (key + 8 * r < seqlen_k)
#pragma unroll
            for (int x = 0; x < kCount / 4; ++x)
                *reinterpret_cast<float2*>(rows + 8 * r * kColumns + 8 * x) = make_float2(d[4 * x + 2 * r], d[4 * x + 2 * r + 1]);
}
// Writes zeros to the block's rows of dK or dV when no query sees them. Called by both main warpgroups.
template <typename T, int kBlockN>
__device__ __forceinline__ void store_zeros(const TensorView& view, int columns, const BackwardParams& b, const BackwardWork& w) {
    if (b.accumulate && !b.head_parts) return;
    const int64_t batch = b.forward.cu_seqlens_q ? 0 : w.batch * view.batch;
    const int64_t first = batch + int64_t(w.k_row + w.key0) * view.row + w.sums_k * view.head;
    const int bytes = b.head_parts ? sizeof(float) : sizeof(T);
    char* const rows = static_cast<char*>(view.data) + first * bytes;
    const int pieces = columns * bytes / 16, count = min(kBlockN, w.seqlen_k - w.key0) * pieces;
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < count; i += 32 * kMainWarps)
        *reinterpret_cast<uint4*>(rows + i / pieces * view.row * bytes + i % pieces * 16) = make_uint4(0, 0, 0, 0);
}
template <typename T, int kCount>
__device__ __forceinline__ void store_dk(const float (&dk)[kCount], const BackwardParams& b, const BackwardWork& w, int key) {
    const int64_t offset = (b.forward.cu_seqlens_q ? 0 : w.batch * b.dk.batch) + w.k_row * b.dk.row + w.sums_k * b.dk.head;
    if (b.head_parts) return store_sums(dk, b.dk, offset, key, w.seqlen_k);
    store_gradient<T>(dk, b.dk, offset, b.forward.headdim, b.forward.scale, b.accumulate, key, w.seqlen_k);
}
template <typename T, BackwardPlanId kId, int kCount>
__device__ __forceinline__ void store_dv(const float (&dv)[kCount], const BackwardParams& b, const BackwardWork& w, int key) {
    const int64_t offset = (b.forward.cu_seqlens_q ? 0 : w.batch * b.dv.batch) + w.k_row * b.dv.row + w.sums_k * b.dv.head;
    if (b.head_parts) return store_sums(dv, b.dv, offset, key, w.seqlen_k);
    const bool drops = kBackwardPlan<kId>.dropout || (kBackwardPlan<kId>.general && b.forward.dropout_threshold);
    const float factor = drops ? b.forward.dropout_scale : 1.0f;
    store_gradient<T>(dv, b.dv, offset, b.forward.headdim_v, factor, b.accumulate, key, w.seqlen_k);
}

}  // namespace fa
