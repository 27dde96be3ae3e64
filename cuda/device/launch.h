// launch.h: kernel launches. Every launch opts in to the shared memory it asks for and reports its error.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "device/driver.h"

namespace fa {

// How a launch differs from a plain one.
struct LaunchOptions {
    bool programmatic = false;  // sm_90: it may start while the kernel before it still runs, see grid_dependency_wait in ptx.cuh
    unsigned cluster = 0;       // sm_90: blocks of a cluster, 2 .. 16, the grid a multiple of it; 0 and 1: no clusters, on any GPU
    // Ask for the maximum shared-memory carveout. Kernels with different carveouts cannot share an SM, so a programmatic successor needs
    // the same one.
    bool prefers_shared = false;
    bool cooperative = false;  // all blocks run at once, or the launch fails: they may wait for each other
    unsigned blocks_y = 1;     // the second extent of the grid
};

// What a kernel has to be granted before a launch that needs it.
enum class Grant : uint64_t {
    kShared,    // more than the default shared memory
    kClusters,  // clusters of more than eight blocks
    kCarveout   // the maximum shared-memory carveout
};

// The grants of this process. A grant belongs to a kernel in a context: every thread shares it, and it ends with the context
// (cudaDeviceReset). So the key is the kernel, what is granted, and the context's id, which the driver gives out once. A place is written
// once, under the lock, and never changes: readers take no lock. A kernel that finds no place is granted again before every launch, which
// is harmless but takes 0.4 us.
class Grants {
public:
    constexpr Grants() = default;
    bool has(const void* function, Grant grant, uint64_t context) const {
        const uint64_t key = key_of(function, grant);
        for (int i = 0; i < kProbes; ++i) {
            const Place& place = places_[place_of(key, context, i)];
            const uint64_t found = place.key.load(std::memory_order_acquire);
            if (found == 0) return false;
            if (found == key && place.context == context) return true;
        }
        return false;
    }
    // Calls give(), which returns a cudaError_t, and remembers its success. context: nullptr where it is unknown.
    template <typename Give>
    cudaError_t add(const void* function, Grant grant, const uint64_t* context, const Give& give) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const cudaError_t error = give();
        if (error != cudaSuccess || !context || has(function, grant, *context)) return error;
        const uint64_t key = key_of(function, grant);
        for (int i = 0; i < kProbes; ++i) {
            Place& place = places_[place_of(key, *context, i)];
            if (place.key.load(std::memory_order_relaxed) != 0) continue;
            place.context = *context;
            place.key.store(key, std::memory_order_release);
            break;
        }
        return error;
    }

private:
    static constexpr int kPlaces = 4096, kProbes = 8;
    struct Place {
        std::atomic<uint64_t> key{0};  // 0: the place is free
        uint64_t context = 0;
    };
    static uint64_t key_of(const void* function, Grant grant) { return reinterpret_cast<uintptr_t>(function) * 4 + uint64_t(grant); }
    static size_t place_of(uint64_t key, uint64_t context, int probe) {
        return (((key * 0x9E3779B97F4A7C15u ^ context * 0xC2B2AE3D27D4EB4Fu) >> 40) + uint64_t(probe)) % kPlaces;
    }

    Place places_[kPlaces];
    std::mutex mutex_;  // of writers
};
inline Grants grants;
inline DriverFunction<decltype(cuCtxGetId)> context_id("cuCtxGetId");

// The limit is raised once, to all that the device has beside the kernel's static arrays, so no other launch of the kernel can lower it.
// It is a limit alone: how many blocks fit on a multiprocessor, and how it divides its memory into shared memory and L1, follow from what a
// launch asks for and from the carveout.
inline cudaError_t grant_shared(const void* function) {
    int device = -1, most = 0;
    cudaFuncAttributes own{};
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&own, function);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most - int(own.sharedSizeBytes));
}

// Asks the runtime for what the launch of a kernel needs, where the current context has not granted it yet; again: in any case.
inline cudaError_t opt_in(const void* function, size_t shared_bytes, const LaunchOptions& options, bool again = false) {
    constexpr size_t kDefault = 32 * 1024;  // every kernel may have 48 KB, but its static arrays are among them
    const bool large = shared_bytes > kDefault, wide = options.cluster > 8, prefers = options.prefers_shared;
    if (!large && !wide && !prefers) return cudaSuccess;
    unsigned long long id = 0;
    const auto id_of = context_id.get();
    const bool known = id_of && id_of(nullptr, &id) == CUDA_SUCCESS;
    const uint64_t context = id;
    const auto ask = [&](Grant grant, const auto& give) {
        if (known && !again && grants.has(function, grant, context)) return cudaSuccess;
        return grants.add(function, grant, known ? &context : nullptr, give);
    };
    cudaError_t error = cudaSuccess;
    if (large) error = ask(Grant::kShared, [&] { return grant_shared(function); });
    if (wide && error == cudaSuccess)
        error = ask(Grant::kClusters, [&] { return cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1); });
    if (prefers && error == cudaSuccess)
        error = ask(Grant::kCarveout, [&] {
            return cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        });
    return error;
}

// The kernel at `function`, whose parameters are at `arguments`.
inline cudaError_t launch_function(const void* function, unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                                   void** arguments, const LaunchOptions& options) {
    const auto launch = [&] {
        if (!options.programmatic && !options.cooperative && options.cluster <= 1)
            return cudaLaunchKernel(function, dim3(blocks, options.blocks_y), dim3(threads), arguments, shared_bytes, stream);
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
        if (options.cluster > 1) {
            attributes[count].id = cudaLaunchAttributeClusterDimension;
            attributes[count].val.clusterDim.x = options.cluster;
            attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
            ++count;
        }
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(blocks, options.blocks_y), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes,
        config.stream = stream;
        config.attrs = attributes, config.numAttrs = count;
        return cudaLaunchKernelExC(&config, function, arguments);
    };
    cudaError_t error = opt_in(function, shared_bytes, options);
    if (error == cudaSuccess) error = launch();
    // Nothing was queued. A grant may have ended although the id of its context goes on: ask once more.
    if (error == cudaErrorInvalidValue || error == cudaErrorInvalidClusterSize) {
        cudaGetLastError();
        error = opt_in(function, shared_bytes, options, true);
        if (error == cudaSuccess) error = launch();
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
