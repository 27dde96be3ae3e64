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
    bool programmatic = false;  // sm_90: may start while the previous kernel still runs, see grid_dependency_wait in ptx.cuh
    unsigned cluster = 0;       // sm_90: blocks of a cluster, 2 .. 16, which must divide the grid; 0 and 1: no clusters, on any GPU
    // Ask for the maximum shared-memory carveout. Kernels with different carveouts cannot share an SM, so a kernel and its programmatic
    // successor should both ask for it.
    bool prefers_shared = false;
    bool cooperative = false;  // all blocks run at once, or the launch fails: they may wait for each other
    unsigned blocks_y = 1;     // the second extent of the grid
};

// Permissions that the runtime has to grant a kernel before certain launches.
enum class Grant : uint64_t {
    kShared,    // more than the default shared memory
    kClusters,  // clusters of more than eight blocks
    kCarveout   // the maximum shared-memory carveout
};

// The grants of this process. A grant belongs to a kernel in a context: all threads share it, and it ends with the context
// (cudaDeviceReset). The key is therefore the kernel, the kind of grant, and the context's id, which the driver never reuses. A slot is
// written once, under the lock, and never changes, so readers take no lock. A kernel that finds no free slot is granted again before every
// launch, which is harmless but takes 0.4 us.
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
    // Calls give(), which returns a cudaError_t, and remembers its success. `context` is nullptr when the context is unknown.
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
        std::atomic<uint64_t> key{0};  // 0: the slot is free
        uint64_t context = 0;
    };
    static uint64_t key_of(const void* function, Grant grant) { return reinterpret_cast<uintptr_t>(function) * 4 + uint64_t(grant); }
    static size_t place_of(uint64_t key, uint64_t context, int probe) {
        return (((key * 0x9E3779B97F4A7C15u ^ context * 0xC2B2AE3D27D4EB4Fu) >> 40) + uint64_t(probe)) % kPlaces;
    }

    Place places_[kPlaces];
    std::mutex mutex_;  // taken by writers
};
inline Grants grants;
inline DriverFunction<decltype(cuCtxGetId)> context_id("cuCtxGetId");

// Raises the limit once, to all shared memory that the kernel's static arrays leave on the device, so that no other launch of the kernel
// can lower it. It is only a limit. How many blocks fit on a multiprocessor, and how the memory is split between shared memory and L1,
// depend on the size of each launch and on the carveout.
inline cudaError_t grant_shared(const void* function) {
    int device = -1, most = 0;
    cudaFuncAttributes own{};
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&own, function);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most - int(own.sharedSizeBytes));
}

// Asks the runtime for the grants that a launch needs and that the current context does not have yet; `again` asks for all of them.
inline cudaError_t opt_in(const void* function, size_t shared_bytes, const LaunchOptions& options, bool again = false) {
    constexpr size_t kDefault = 32 * 1024;  // every kernel may have 48 KB, static arrays included
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

// Launches the kernel at `function`, whose parameters are at `arguments`.
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
    // These errors mean that nothing was queued. A grant may have ended although the id of its context lives on: ask once more.
    if (error == cudaErrorInvalidValue || error == cudaErrorInvalidClusterSize) {
        cudaGetLastError();
        error = opt_in(function, shared_bytes, options, true);
        if (error == cudaSuccess) error = launch();
    }
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(params...), with any size of shared memory that the device has.
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
