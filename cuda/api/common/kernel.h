// kernel.h: one row of a table of kernels: its name, what it can serve, and how it is launched.
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
    // nullptr if the kernel can serve the call on that device, otherwise the reason why not. A reason with values is written to `text`,
    // which is a valid pointer even when size is 0.
    const char* (*refuses)(const Params&, const DeviceInfo&, char* text, size_t size);
    size_t (*workspace)(const Params&, const DeviceInfo&);
    // Returns FA_OK or records the error.
    fa_status (*launch)(const Params&, const DeviceInfo&, void* stream);
    // nullptr, or the reason why a later kernel of the table that can serve the call is faster. Not asked of a forced kernel.
    const char* (*yields)(const Params&, const DeviceInfo&, char* text, size_t size) = nullptr;
};

}  // namespace fa
