// key_rows.cuh: elements of K or V as floats, for kernels that load them one by one.
#pragma once

#include "attention/common/params.h"
#include "common/element.cuh"
#include "device/widen.cuh"

namespace fa {

// Rows of q's dtype at a fixed stride: plain K and V, and contiguous caches. `start`: offset of the first row in the tensor.
template <typename T>
struct StridedRows {
    static constexpr int kUnroll = 4;  // loads that one thread may have in flight
    const T* row0;
    int64_t stride;

    __device__ StridedRows(const AttentionParams&, const TensorView& kv, const CacheScale&, int64_t start, int, int head)
        : row0(static_cast<const T*>(kv.data) + start + head * kv.head), stride(kv.row) {}
    __device__ float operator()(int key, int d) const { return to_float(row0[key * stride + d]); }
};

// Rows of any cache: in pages, of 8-bit elements, or both.
template <typename T>
struct CachedRows {
    static constexpr int kUnroll = 1;  // branches between the loads serialise them anyway
    const CacheView& cache;
    const TensorView& kv;
    const CacheScale& scale;
    int b, head;

    __device__ CachedRows(const AttentionParams& p, const TensorView& kv, const CacheScale& scale, int64_t, int b, int head)
        : cache(p.cache), kv(kv), scale(scale), b(b), head(head) {}
    __device__ float operator()(int key, int d) const {
        const CachePlace at = cache_place(cache, b, key);
        const int64_t index = at.entry * kv.batch + at.row * kv.row + head * kv.head + d;
        if (!scale.data) return to_float(static_cast<const T*>(kv.data)[index]);
        const float factor = scale.data[at.entry * scale.batch + at.row * scale.row + head * scale.head];
        if (cache.dtype == DType::kInt8) return factor * float(static_cast<const int8_t*>(kv.data)[index]);
        const uint32_t pair = widen_pair_e4m3(static_cast<const uint8_t*>(kv.data)[index]);
        return factor * __half2float(__ushort_as_half(uint16_t(pair)));
    }
};

}  // namespace fa
