// serve.h: what the registries of both passes share: how a kernel is run on each device, and reasons to refuse.
#pragma once

#include <cstdint>
#include <cstdio>
#include <new>

#include "attention/params.h"
#include "flash_attn.h"
#include "status.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>
#if FA_WITH_WGMMA_SM90
#include "device/tensor_map.h"
#endif
#endif

namespace fa {

// Starting threads takes host memory, and no exception may cross the C ABI.
template <typename Work>
fa_status on_host(const Work& work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        return fail(FA_OUT_OF_MEMORY, "no host memory left to start the worker threads");
    }
    return FA_OK;
}

#if FA_WITH_CUDA
constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;

inline fa_status launched(const char* name, cudaError_t error) {
    if (error == cudaSuccess) return FA_OK;
#if FA_WITH_WGMMA_SM90
    if (const char* const why = tensor_map_failure(); *why) return fail(FA_CUDA_ERROR, "kernel %s: %s", name, why);
#endif
    return fail(FA_CUDA_ERROR, "kernel %s: %s (%s)", name, cudaGetErrorString(error), cudaGetErrorName(error));
}

// launch() queues a kernel of that many blocks.
template <typename Launch>
fa_status start(const char* name, int64_t blocks, const Launch& launch) {
    if (blocks > kMaxGrid) return fail(FA_UNSUPPORTED, "%s: %lld blocks are more than a grid has", name, static_cast<long long>(blocks));
    return launched(name, launch());
}
#endif

constexpr const char* kNoFloat8 = "takes no float8_e4m3: of all kernels only fp8_sm90 (Hopper) does";
constexpr const char* kNo8BitCache = "cache_dtype: it takes no 8-bit cache";
inline bool is_float8(const AttentionParams& p) { return p.dtype == DType::kFloat8E4M3; }

// What the copy engine can walk: 16-byte aligned, strides in 1 .. 2^40 bytes and multiples of 16.
inline const char* no_tensor_map(const char* name, const TensorView& t, int64_t batch, int64_t rows, int64_t heads, int element_bytes,
                                 char* text, size_t size) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16) {
        std::snprintf(text, size, "%s.data=%p is not aligned to 16 bytes", name, t.data);
        return text;
    }
    const struct {
        const char* axis;
        int64_t extent, stride;
    } axes[] = {{"batch", batch, t.batch}, {"row", rows, t.row}, {"head", heads, t.head}};
    const int64_t step = 16 / element_bytes, end = (int64_t(1) << 40) / element_bytes;
    for (const auto& [axis, extent, stride] : axes)
        if (extent > 1 && (stride <= 0 || stride % step || stride >= end)) {
            std::snprintf(text, size, "%s.%s_stride=%lld: TMA takes positive multiples of %d elements below 2^40 bytes", name, axis,
                          static_cast<long long>(stride), int(step));
            return text;
        }
    return nullptr;
}

}  // namespace fa
