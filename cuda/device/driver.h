// driver.h: functions of the CUDA driver, found through the runtime. The library does not link libcuda, so it loads without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

namespace fa {

// The driver function `name` in its CUDA 12 version; nullptr without a driver. `Function` is its type.
template <typename Function>
Function* driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else  // in the version of the toolkit
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

// A driver function that is looked up until it is found and then remembered: a loaded driver is never unloaded. Meant for static objects.
template <typename Function>
class DriverFunction {
public:
    constexpr explicit DriverFunction(const char* name) : name_(name) {}
    Function* get() {
        Function* function = found_.load(std::memory_order_acquire);
        if (!function) found_.store(function = driver_function<Function>(name_), std::memory_order_release);
        return function;
    }

private:
    const char* name_;
    std::atomic<Function*> found_{nullptr};
};

}  // namespace fa
