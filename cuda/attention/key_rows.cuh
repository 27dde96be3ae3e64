// key_rows.cuh: elements of K or V as floats, for the kernels that fetch them one by one.
#pragma once

#include <cuda_fp8.h>

#include "device/launch.h"
#include "params.h"

namespace fa {

// Rows of q's dtype a stride apart: plain K and V, and contiguous caches. `start` is the first one's offset in the tensor.
template <typename T>
struct StridedRows {
    const T* row0;
    int64_t stride;

    __device__ StridedRows(const AttentionParams&, const TensorView& kv, const CacheScale&, int64_t start, int, int head)
        : row0(static_cast<const T*>(kv.data) + start + head * kv.head), stride(kv.row) {}
    __device__ float operator()(int key, int d) const { return to_float(row0[key * stride + d]); }
};

// Rows of any cache: in pages, of 8-bit elements, or both.
template <typename T>
struct CachedRows {
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
        return factor * float(static_cast<const __nv_fp8_e4m3*>(kv.data)[index]);
    }
};

}  // namespace fa
