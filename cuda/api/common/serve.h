// serve.h: shared by the registries: running a kernel on each device, and common reasons to refuse.
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

#if FA_WITH_CUDA
constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;

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
    if (blocks > kMaxGrid) return fail(FA_UNSUPPORTED, "%s: %lld blocks are more than a grid has", name, static_cast<long long>(blocks));
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

inline const char* needs_hopper(const DeviceInfo& device, char* text, size_t size) {
    if (device.compute == 90) return nullptr;
    return say(text, size, "needs sm_90 (Hopper), this device is sm_%d", device.compute);
}
inline const char* needs_sm80(const DeviceInfo& device, char* text, size_t size) {
    if (device.compute >= 80) return nullptr;
    return say(text, size, "needs sm_80 or newer, this device is sm_%d", device.compute);
}

// nullptr if TMA can read the tensor: 16-byte aligned, with strides that are positive multiples of 16 bytes below 2^40. Otherwise the
// reason why not. The stride of an axis with one element does not matter.
inline const char* no_tensor_map(const char* name, const TensorView& t, int64_t batch, int64_t rows, int64_t heads, int element_bytes,
                                 char* text, size_t size) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16) return say(text, size, "%s.data=%p is not aligned to 16 bytes", name, t.data);
    const struct {
        const char* axis;
        int64_t extent, stride;
    } axes[] = {{"batch", batch, t.batch}, {"row", rows, t.row}, {"head", heads, t.head}};
    const int64_t step = 16 / element_bytes, end = (int64_t(1) << 40) / element_bytes;
    for (const auto& [axis, extent, stride] : axes)
        if (extent > 1 && (stride <= 0 || stride % step || stride >= end))
            return say(text, size, "%s.%s_stride=%lld: TMA takes positive multiples of %d elements below 2^40 bytes", name, axis,
                       static_cast<long long>(stride), int(step));
    return nullptr;
}

}  // namespace fa
