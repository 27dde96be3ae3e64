// device.cpp: asks the CUDA runtime which device runs a call. The properties of each device are read at its first call.
#include "api/common/device.h"

#include "api/common/status.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>

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
constexpr int kMaxDevices = 64;
struct KnownDevice {
    std::atomic<bool> known{false};  // once true, `info` is complete and never changes
    DeviceInfo info{};
};
KnownDevice known_devices[kMaxDevices];
std::mutex known_devices_writing;

cudaError_t read_facts(int index, DeviceInfo* info) {
    int major = 0, minor = 0, sms = 0, shared = 0;
    const struct {
        int* to;
        cudaDeviceAttr attribute;
    } facts[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                 {&minor, cudaDevAttrComputeCapabilityMinor},
                 {&sms, cudaDevAttrMultiProcessorCount},
                 {&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin}};
    for (const auto& fact : facts)
        if (const cudaError_t error = cudaDeviceGetAttribute(fact.to, fact.attribute, index); error != cudaSuccess) return error;
    *info = {index, 10 * major + minor, sms, size_t(shared)};
    return cudaSuccess;
}

// The properties of a device never change, so they are read once and kept for the life of the process. A failure is not kept, because a
// driver may be unable to answer for a while.
fa_status device_facts(int index, DeviceInfo* info) {
    if (index < 0 || index >= kMaxDevices) return fail(FA_UNSUPPORTED, "CUDA device %d: only %d devices are supported", index, kMaxDevices);
    KnownDevice& device = known_devices[index];
    if (!device.known.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> lock(known_devices_writing);
        if (!device.known.load(std::memory_order_relaxed)) {
            if (const cudaError_t error = read_facts(index, &device.info); error != cudaSuccess) {
                cudaGetLastError();
                return fail(FA_CUDA_ERROR, "CUDA device %d does not answer: %s (%s)", index, cudaGetErrorString(error),
                            cudaGetErrorName(error));
            }
            device.known.store(true, std::memory_order_release);
        }
    }
    *info = device.info;
    return FA_OK;
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

CurrentDevice::CurrentDevice(int index) {
    int current = -1;
    if (index < 0) return;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && current == index && has_current_context()) return;
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
