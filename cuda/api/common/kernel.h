// kernel.h: a row of a table of kernels: the kernel's name, what the kernel can serve, and how it is launched.
#pragma once

#include <cstddef>

#include "api/common/device.h"
#include "flash_attn.h"

namespace fa {

template <typename Params>
struct KernelOf {
    const char* name;
    const char* summary;
    fa_device device;
    // nullptr when the kernel serves the call on that device, otherwise the reason why not. A reason that quotes values is written to
    // `text`, which is there even where its size is 0.
    const char* (*refuses)(const Params&, const DeviceInfo&, char* text, size_t size);
    size_t (*workspace)(const Params&, const DeviceInfo&);
    // Returns FA_OK or records the error.
    fa_status (*launch)(const Params&, const DeviceInfo&, void* stream);
    // nullptr, or the reason why a kernel further down the table, which serves the call too, is faster. A forced kernel is not asked.
    const char* (*yields)(const Params&, const DeviceInfo&, char* text, size_t size) = nullptr;
};

}  // namespace fa
