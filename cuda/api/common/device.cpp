// device.cpp: asks the CUDA runtime which device runs a call. The facts of each device are read once.
#include "api/common/device.h"

#include "api/common/status.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>

#include <array>

#include "device/driver.h"
#endif

namespace fa {

#if FA_WITH_CUDA

int cuda_device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();  // a machine without a GPU is not an error state
        return 0;
    }
    return count;
}

namespace {
// The facts of a device never change, so those of all devices are read once and kept for the life of the process.
fa_status device_facts(int index, DeviceInfo* info) {
    constexpr int kMaxDevices = 64;
    static const auto known = [] {
        std::array<DeviceInfo, kMaxDevices> all{};
        const int count = cuda_device_count();
        for (int i = 0; i < count && i < kMaxDevices; ++i) {
            int major = 0, minor = 0, sms = 0, shared = 0;
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i);
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i);
            cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, i);
            cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, i);
            all[i] = {i, 10 * major + minor, sms, size_t(shared)};
        }
        return all;
    }();
    if (index < 0 || index >= kMaxDevices) return fail(FA_UNSUPPORTED, "CUDA device %d: only %d devices are supported", index, kMaxDevices);
    *info = known[index];
    return info->compute ? FA_OK : fail(FA_CUDA_ERROR, "CUDA device %d does not answer", index);
}
}  // namespace

fa_status find_device(fa_device device, const void* data, DeviceInfo* info, const char* name) {
    *info = {-1, 0, 0, 0};
    if (device == FA_CPU) return FA_OK;
    int index = -1;
    if (data) {
        cudaPointerAttributes attributes{};
        if (const cudaError_t error = cudaPointerGetAttributes(&attributes, data); error != cudaSuccess) {
            cudaGetLastError();
            return fail(FA_CUDA_ERROR, "device=FA_CUDA: %s", cudaGetErrorString(error));
        }
        if (attributes.type == cudaMemoryTypeUnregistered)
            return fail(FA_BAD_ARGUMENT, "%s.data=%p is host memory, but device is FA_CUDA", name, data);
        if (attributes.type == cudaMemoryTypeDevice) index = attributes.device;
    }
    if (index < 0)
        if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
            cudaGetLastError();
            return fail(FA_CUDA_ERROR, "device=FA_CUDA: %s", cudaGetErrorString(error));
        }
    if (!data && cuda_device_count() == 0) return fail(FA_CUDA_ERROR, "device=FA_CUDA: no CUDA device or driver on this machine");
    return device_facts(index, info);
}

namespace {
bool has_context() {  // takes 20 ns; setting the device without asking takes many times as long
    static const auto current = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
    CUcontext context = nullptr;
    return current && current(&context) == CUDA_SUCCESS && context;
}
}  // namespace

CurrentDevice::CurrentDevice(int index) {
    int current = -1;
    if (index < 0) return;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && current == index && has_context()) return;
    if (error == cudaSuccess) error = cudaSetDevice(index);
    if (error != cudaSuccess) {
        cudaGetLastError();
        status_ = fail(FA_CUDA_ERROR, "CUDA device %d: %s (%s)", index, cudaGetErrorString(error), cudaGetErrorName(error));
    } else if (current != index) {
        previous_ = current;
    }
}
CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

#else

int cuda_device_count() { return 0; }

fa_status find_device(fa_device device, const void*, DeviceInfo* info, const char*) {
    *info = {-1, 0, 0, 0};
    return device == FA_CPU ? FA_OK : fail(FA_UNSUPPORTED, "device=FA_CUDA: this build has the CPU backend only");
}

CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}

#endif

}  // namespace fa
