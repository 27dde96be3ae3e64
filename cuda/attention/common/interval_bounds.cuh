// interval_bounds.cuh: masks by intervals on a GPU: the bounds (mask.h: HiddenBounds) of several keys, by which a block finds the tiles of
// which none of its rows sees a key.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/common/interval_bounds.h"
#include "attention/common/mask.h"
#include "attention/common/tile_intervals.h"

namespace fa {

// In the workspace: the bounds of every `keys` keys.
struct IntervalBounds {
    HiddenBounds* data;  // (heads of the array, bounds of all sequences); nullptr = no intervals
    int64_t head;        // from one head to the next
    int sequence;        // from one sequence to the next in a dense call

    // Of the keys of sequence b from its first on, for a query head.
    template <int kKeys>
    __device__ __forceinline__ const HiddenBounds* of(const AttentionParams& p, int b, int head_q) const {
        return data + head_q / p.intervals.heads_of_entry * head + first<kKeys>(p, b);
    }
    // Of a block of keys, for all heads of its group together.
    template <int kKeys>
    __device__ __forceinline__ HiddenBounds of_group(const AttentionParams& p, int b, int head_k, int block) const {
        const HiddenBounds* own = of<kKeys>(p, b, head_k * p.group) + block;
        HiddenBounds bounds;
        bounds.clear();
#pragma unroll 1
        for (int left = p.group; left > 0; left -= p.intervals.heads_of_entry, own += head) merge(bounds, *own);
        return bounds;
    }
    // The number of a sequence's first bound, for bounds of `keys` keys.
    __device__ __forceinline__ int64_t first(const AttentionParams& p, int keys, int b) const {
        return p.cu_seqlens_k ? first_key_row(p, b) / keys + b : int64_t(sequence) * b;
    }
    template <int kKeys>
    __device__ __forceinline__ int64_t first(const AttentionParams& p, int b) const {
        return first(p, kKeys, b);
    }
};

// Writes the bounds of every `keys` keys of a call with intervals to `workspace`, which has interval_bounds_bytes.
cudaError_t launch_interval_bounds(const AttentionParams& p, int keys, void* workspace, IntervalBounds* bounds, cudaStream_t stream);
// The same, and the bounds of groups where the call has them; else groups->data is nullptr. `workspace`: grouped_interval_bounds_bytes.
cudaError_t launch_grouped_interval_bounds(const AttentionParams& p, int keys, void* workspace, IntervalBounds* bounds,
                                           IntervalBounds* groups, cudaStream_t stream);

// One bound in two loads.
__device__ __forceinline__ HiddenBounds load_bounds(const HiddenBounds* at) {
    static_assert(sizeof(HiddenBounds) == 2 * sizeof(int4), "two loads");
    const int4 begin = reinterpret_cast<const int4*>(at)[0], end = reinterpret_cast<const int4*>(at)[1];
    return {{begin.x, begin.y}, {begin.z, begin.w}, {end.x, end.y}, {end.z, end.w}};
}

// The bounds of all lanes of a warp together. sm_80 and newer.
__device__ __forceinline__ void reduce_bounds(HiddenBounds& bounds) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        bounds.max_begin[x] = __reduce_max_sync(~0u, bounds.max_begin[x]),
        bounds.min_begin[x] = __reduce_min_sync(~0u, bounds.min_begin[x]);
        bounds.max_end[x] = __reduce_max_sync(~0u, bounds.max_end[x]), bounds.min_end[x] = __reduce_min_sync(~0u, bounds.min_end[x]);
    }
}

}  // namespace fa
