// launch.h: element types and kernel launches. Every launch opts in to the shared memory it asks for and reports its error.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "attention/params.h"

namespace fa {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Calls body with a value of the element type; validation has refused every other dtype.
template <typename Body>
cudaError_t with_dtype(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::kFloat32: return body(float{});
        case DType::kFloat16: return body(__half{});
        case DType::kBFloat16: return body(__nv_bfloat16{});
        default: return cudaErrorInvalidValue;
    }
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(params), any size of shared memory the device has. A programmatic launch (sm_90)
// may start while the kernel before it still runs: see grid_dependency_wait in ptx.cuh.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                          const Params& params, bool programmatic = false) {
    const void* function = reinterpret_cast<const void*>(kernel);
    if (shared_bytes > 48 * 1024) {
        thread_local struct {
            const void* function;
            int device;
            size_t bytes;
        } granted{};  // the thread's last request: repeating it is harmless, but 0.4 us
        int device = -1;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess && (granted.function != function || granted.device != device || granted.bytes < shared_bytes)) {
            error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
            if (error == cudaSuccess) granted = {function, device, shared_bytes};
        }
        if (error != cudaSuccess) {
            cudaGetLastError();
            return error;
        }
    }
    void* arguments[] = {const_cast<Params*>(&params)};
    cudaError_t error;
    if (programmatic) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes, config.stream = stream;
        config.attrs = &attribute, config.numAttrs = 1;
        error = cudaLaunchKernelExC(&config, function, arguments);
    } else {
        error = cudaLaunchKernel(function, dim3(blocks), dim3(threads), arguments, shared_bytes, stream);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

}  // namespace fa
