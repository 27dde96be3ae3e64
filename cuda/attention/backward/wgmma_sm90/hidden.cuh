// wgmma_sm90/hidden.cuh: rows of shared memory that the Hopper backward must zero before a product reads them. Rows that nobody sees have P
// = dS = 0, but they may hold anything, and 0 x NaN is NaN.
#pragma once

#include <climits>

#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/mask.h"
#include "attention/common/params.h"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// Whether each of the eight values is finite.
template <typename T>
__device__ __forceinline__ bool finite_16(const uint4& x) {
    constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7C00u : 0x7F80u;
    bool finite = true;
    for (const uint32_t pair : {x.x, x.y, x.z, x.w})
        finite = finite && (pair & kExponent) != kExponent && (pair >> 16 & kExponent) != kExponent;
    return finite;
}

// Whether the boolean mask and the bias leave the pair visible.
__device__ __forceinline__ bool pair_is_visible(const AttentionParams& p, int batch, int head, int query, int key) {
    if (p.bias.data &&
        load_as_float(p.bias.data, batch * p.bias.batch + head * p.bias.head + query * p.bias.row + key, p.bias_dtype) == -INFINITY)
        return false;
    return !p.mask.data || static_cast<const uint8_t*>(p.mask.data)[batch * p.mask.batch + head * p.mask.head + query * p.mask.row + key];
}

// Named barriers 1 and 2 belong to main warpgroups 0 and 1.
__device__ __forceinline__ void main_warpgroup_sync(int wg) { bar_sync(1 + wg, 128); }

// Places from this one on belong to the last query tile of a sequence if it reaches past the end: into rows of the next sequence (varlen),
// or, under a bias that the rows share, into rows of zeros that have that bias, too, also where it is NaN. INT_MAX: no such tile.
template <bool kBias = false>
FA_HOST_DEVICE int ragged_place(const AttentionParams& p, const BackwardWork& w, int block_m) {
    const bool reads = p.cu_seqlens_q || (kBias && p.bias.row == 0);
    return reads && w.seqlen_q % block_m ? w.seqlen_q / block_m * w.width : INT_MAX;
}
// Zeroes the rows past the end in such a tile of Q or dout. Called by a whole main warpgroup; both may write the same zeros.
template <int kRows, typename T, int kCount>
__device__ __forceinline__ void zero_rows_past_end(const BackwardWork& w, T (&tile)[kCount]) {
#pragma unroll 1
    for (int i = opaque(int(threadIdx.x % 128)); i < kCount / 8; i += 128)
        if (i / 8 % kRows >= w.seqlen_q % kRows) reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    bar_sync(opaque(int(threadIdx.x)) / 128, 128);  // main_warpgroup_sync, without holding `wg` in a register
}

// Zeroes those of the 64 keys from row0 on, in a tile of K or V, that no query of the sequence sees: keys past the end, cut off by causal
// or a window, or hidden by a mask or a bias in every row. Past the end of a dense tensor the copy engine has written zeros. Called by a
// whole main warpgroup. masked, in plans with options: bit i says that a mask of keys hides key i of the warp's sixteen.
template <BackwardPlanId kId, typename T, int kCount>
__device__ __forceinline__ void zero_hidden_keys(const AttentionParams& p, const BackwardWork& w, T (&tile)[kCount], int row0,
                                                 uint32_t masked = 0) {
    constexpr bool kOptions = kBackwardPlan<kId>.options, kPairs = kBackwardPlan<kId>.general || kBackwardPlan<kId>.bias();
    constexpr bool kIntervals = kBackwardPlan<kId>.intervals, kMasks = kBackwardPlan<kId>.masks;
    constexpr int kBlockN = kBackwardPlan<kId>.block_n, kPieces = kCount / kBlockN / 8;  // pieces of eight columns
    const int begin = clamp_to(w.left, 0, w.seqlen_k), end = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
    const bool outside = w.key0 < begin || (w.key0 + kBlockN > end && (p.cu_seqlens_q || end < w.seqlen_k));
    bool may_hide = (kPairs && (p.bias.data || p.mask.data)) || (kOptions && (kMasks || p.mask.data));
    if constexpr (kIntervals) may_hide = may_have_unseen_key(static_cast<const BackwardIntervalWork&>(w).bounds);
    if (!outside && !may_hide) return;
    // Two neighbouring threads share a row.
    const int t = opaque(int(threadIdx.x % 128)), row = row0 + t / 2, key = w.key0 + row;
    uint4* pieces = reinterpret_cast<uint4*>(tile);
    bool hidden = key < begin || key >= end;
    if constexpr (kOptions) hidden = hidden || (masked >> t % 32 / 2 & 1);
    if constexpr (kPairs) {
        const uint32_t pair = 3u << t % 32 / 2 * 2;
        bool finite = true;
        if (may_hide && !hidden)
            for (int i = t % 2; i < kPieces; i += 2) finite = finite && finite_16<T>(pieces[swizzled_offset(kBlockN, row, i) / 16]);
        if (!__all_sync(pair, finite)) {  // finite keys are harmless; looking through a whole column is slow
            bool seen = false;
            for (int i = t % 2; i < w.seqlen_q && !seen; i += 2)
                for (int head = w.head_k * p.group; head < (w.head_k + 1) * p.group && !seen; ++head)
                    seen = key >= i + w.left && key <= i + w.right && pair_is_visible(p, w.batch, head, i, key);
            hidden = !__any_sync(pair, seen);
        }
    }
    if (hidden)
        for (int i = t % 2; i < kPieces; i += 2) pieces[swizzled_offset(kBlockN, row, i) / 16] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    __syncwarp();
    bar_sync(opaque(int(threadIdx.x)) / 128, 128);  // main_warpgroup_sync, without holding `wg` in a register
}

}  // namespace fa
