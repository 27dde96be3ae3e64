// device.h: the device that runs a call.
#pragma once

#include "device/device_info.h"
#include "flash_attn.h"

namespace fa {

// The device that runs the call. For CUDA it is the device that owns `data`, the data of the argument called `name`; when data is null, it
// is the current device.
fa_status find_device(fa_device device, const void* data, DeviceInfo* info, const char* name = "q");

// Makes a device and its context current for the enclosing scope, if they are not current already. A thread that has not used CUDA yet has
// a current device but no context, and without a context tensor maps cannot be made. Every launch on a GPU is inside such a scope.
class CurrentDevice {
public:
    explicit CurrentDevice(int index);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    fa_status status() const { return status_; }

private:
    int previous_ = -1;
    fa_status status_ = FA_OK;
};

int cuda_device_count();

}  // namespace fa
