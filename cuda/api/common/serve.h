// serve.h: running a kernel on each device, and reasons with values.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <new>

#include "api/common/status.h"
#include "common/types.h"
#include "device/device_info.h"
#include "flash_attn.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>
#if FA_WITH_WGMMA_SM90
#include "device/tensor_map.h"
#endif
#endif

namespace fa {

// Runs a CPU kernel. Starting threads takes host memory, and no exception may cross the C ABI.
template <typename Work>
fa_status on_host(const Work& work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        return fail(FA_OUT_OF_MEMORY, "no host memory left to start the worker threads");
    }
    return FA_OK;
}

constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;  // of a grid

#if FA_WITH_CUDA
inline fa_status launched(const char* name, cudaError_t error) {
    if (error == cudaSuccess) return FA_OK;
#if FA_WITH_WGMMA_SM90
    if (const char* const why = tensor_map_failure(); *why) return fail(FA_CUDA_ERROR, "kernel %s: %s", name, why);
#endif
    return fail(FA_CUDA_ERROR, "kernel %s: %s (%s)", name, cudaGetErrorString(error), cudaGetErrorName(error));
}

// Checks the number of blocks, then calls launch(), which enqueues a kernel with that many blocks.
template <typename Launch>
fa_status start(const char* name, int64_t blocks, const Launch& launch) {
    if (blocks > kMostBlocks) return fail(FA_UNSUPPORTED, "%s: %lld blocks are more than a grid has", name, static_cast<long long>(blocks));
    return launched(name, launch());
}
#endif

// Writes a reason with values to `text` and returns it. With size 0 the caller only asks whether there is a reason: nothing is written.
[[gnu::format(printf, 3, 4)]] inline const char* say(char* text, size_t size, const char* format, ...) {
    if (!size) return text;
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, size, format, values);
    va_end(values);
    return text;
}

}  // namespace fa
