// driver.h: functions of the CUDA driver, found through the runtime: the library does not link libcuda, so that it loads without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fa {

// The driver's function of that name as CUDA 12 has it; nullptr without a driver. `Function` is its type.
template <typename Function>
Function* driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else  // the function as the toolkit's own version has it
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

}  // namespace fa
