// device_info.h: the properties of a device that launch plans depend on.
#pragma once

#include <cstddef>

namespace fa {

struct DeviceInfo {
    int index;    // CUDA device, -1 for the CPU
    int compute;  // 90 for sm_90
    int multiprocessors;
    size_t shared_memory;  // bytes one block can opt in to
};

}  // namespace fa
