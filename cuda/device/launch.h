// launch.h: element types and kernel launches. Every launch opts in to the shared memory it asks for and reports its error.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

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

// How a launch differs from a plain one.
struct LaunchOptions {
    bool programmatic = false;  // sm_90: it may start while the kernel before it still runs, see grid_dependency_wait in ptx.cuh
    unsigned cluster = 0;       // sm_90: blocks of a cluster, 1 .. 16, the grid a multiple of it; 0 = no clusters
    // A multiprocessor's memory shall be shared memory, with as little L1 cache as there can be. Kernels that divide it differently are
    // never on it together, however little they use: what follows a kernel of much shared memory programmatically asks for this.
    bool prefers_shared = false;
    bool cooperative = false;  // all blocks run at once, or the launch fails: they may wait for each other
};

// Once for each kernel and device.
inline cudaError_t prefer_shared(const void* function) {
    constexpr int kSlots = 64;
    thread_local struct {
        const void* function;
        int device;
    } asked[kSlots]{};  // by address: what has lost its place asks again, which is harmless, but 0.4 us
    int device = -1;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    auto& last = asked[reinterpret_cast<uintptr_t>(function) / 16 % kSlots];
    if (last.function == function && last.device == device) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess) last = {function, device};
    return error;
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(params), any size of shared memory the device has.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                          const Params& params, LaunchOptions options) {
    const void* function = reinterpret_cast<const void*>(kernel);
    constexpr size_t kFree = 32 * 1024;  // 48 KB are there for the asking, but a kernel's static arrays are among them
    if (shared_bytes > kFree || options.cluster > 8) {
        thread_local struct {
            const void* function;
            int device;
            size_t bytes;
            unsigned cluster;
        } granted{};  // the thread's last request: repeating it is harmless, but 0.4 us
        int device = -1;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess && (granted.function != function || granted.device != device || granted.bytes < shared_bytes ||
                                     granted.cluster < options.cluster)) {
            if (shared_bytes > kFree)
                error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
            if (error == cudaSuccess && options.cluster > 8)
                error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
            if (error == cudaSuccess) granted = {function, device, shared_bytes, options.cluster};
        }
        if (error != cudaSuccess) {
            cudaGetLastError();
            return error;
        }
    }
    if (options.prefers_shared) {
        if (const cudaError_t error = prefer_shared(function)) {
            cudaGetLastError();
            return error;
        }
    }
    void* arguments[] = {const_cast<Params*>(&params)};
    cudaError_t error;
    if (options.programmatic || options.cooperative || options.cluster > 0) {
        cudaLaunchAttribute attributes[3]{};
        unsigned count = 0;
        if (options.programmatic) {
            attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[count++].val.programmaticStreamSerializationAllowed = 1;
        }
        if (options.cooperative) {
            attributes[count].id = cudaLaunchAttributeCooperative;
            attributes[count++].val.cooperative = 1;
        }
        if (options.cluster > 0) {
            attributes[count].id = cudaLaunchAttributeClusterDimension;
            attributes[count].val.clusterDim.x = options.cluster;
            attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
            ++count;
        }
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes, config.stream = stream;
        config.attrs = attributes, config.numAttrs = count;
        error = cudaLaunchKernelExC(&config, function, arguments);
    } else {
        error = cudaLaunchKernel(function, dim3(blocks), dim3(threads), arguments, shared_bytes, stream);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                          const Params& params, bool programmatic = false) {
    LaunchOptions options;
    options.programmatic = programmatic;
    return launch_kernel(kernel, blocks, threads, shared_bytes, stream, params, options);
}

}  // namespace fa
