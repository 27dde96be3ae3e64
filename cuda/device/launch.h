// launch.h: kernel launches. Every launch opts in to the shared memory it asks for and reports its error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace fa {

// How a launch differs from a plain one.
struct LaunchOptions {
    bool programmatic = false;  // sm_90: it may start while the kernel before it still runs, see grid_dependency_wait in ptx.cuh
    unsigned cluster = 0;       // sm_90: blocks of a cluster, 1 .. 16, the grid a multiple of it; 0 = no clusters
    // Ask for the maximum shared-memory carveout. Kernels with different carveouts cannot share an SM, so a programmatic successor needs
    // the same one.
    bool prefers_shared = false;
    bool cooperative = false;  // all blocks run at once, or the launch fails: they may wait for each other
    unsigned blocks_y = 1;     // the second extent of the grid
};

// Asks the runtime once for what a kernel needs on the current device: more than the default shared memory, clusters of more than eight
// blocks, the carveout. Each thread remembers the answers in a table indexed by the kernel's address. A kernel that has lost its place asks
// again, which is harmless but takes 0.4 us.
inline cudaError_t opt_in(const void* function, size_t shared_bytes, const LaunchOptions& options) {
    constexpr size_t kDefault = 32 * 1024;  // every kernel may have 48 KB, but its static arrays are among them
    const bool large = shared_bytes > kDefault, wide = options.cluster > 8, prefers = options.prefers_shared;
    if (!large && !wide && !prefers) return cudaSuccess;
    struct Grant {
        const void* function;
        size_t shared_bytes;
        int device;
        bool wide, prefers;
    };
    constexpr int kSlots = 64;
    thread_local Grant grants[kSlots]{};
    int device = -1;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const uintptr_t place = reinterpret_cast<uintptr_t>(function) / 16;
    Grant& grant = grants[(place ^ place / kSlots) % kSlots];
    if (grant.function != function || grant.device != device) grant = {nullptr, 0, device, false, false};
    Grant asked = grant;
    asked.function = function;
    cudaError_t error = cudaSuccess;
    if (large && grant.shared_bytes < shared_bytes) {
        error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
        asked.shared_bytes = shared_bytes;
    }
    if (error == cudaSuccess && wide && !grant.wide) {
        error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        asked.wide = true;
    }
    if (error == cudaSuccess && prefers && !grant.prefers) {
        error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        asked.prefers = true;
    }
    if (error == cudaSuccess) grant = asked;
    return error;
}

// The kernel at `function`, whose parameters are at `arguments`.
inline cudaError_t launch_function(const void* function, unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                                   void** arguments, const LaunchOptions& options) {
    cudaError_t error = opt_in(function, shared_bytes, options);
    if (error == cudaSuccess && (options.programmatic || options.cooperative || options.cluster > 0)) {
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
        config.gridDim = dim3(blocks, options.blocks_y), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes,
        config.stream = stream;
        config.attrs = attributes, config.numAttrs = count;
        error = cudaLaunchKernelExC(&config, function, arguments);
    } else if (error == cudaSuccess) {
        error = cudaLaunchKernel(function, dim3(blocks, options.blocks_y), dim3(threads), arguments, shared_bytes, stream);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(params...), any size of shared memory the device has.
template <typename... Params>
cudaError_t launch_kernel(void (*kernel)(Params...), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                          const LaunchOptions& options, const Params&... params) {
    void* arguments[] = {const_cast<Params*>(&params)...};
    return launch_function(reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, stream, arguments, options);
}
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                          const Params& params, const LaunchOptions& options) {
    return launch_kernel(kernel, blocks, threads, shared_bytes, stream, options, params);
}
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                          const Params& params, bool programmatic = false) {
    LaunchOptions options;
    options.programmatic = programmatic;
    return launch_kernel(kernel, blocks, threads, shared_bytes, stream, params, options);
}

}  // namespace fa
