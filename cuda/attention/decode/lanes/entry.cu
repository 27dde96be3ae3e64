// lanes/entry.cu: the kernel of lanes/kernel.cuh for float32, with and without a cluster.
#include "attention/decode/lanes/kernel.cuh"

#include <atomic>

namespace fa {
namespace {

// Clusters of 16 blocks, one block per multiprocessor, that the current device holds at a time.
cudaError_t count_wide_clusters(const DeviceInfo& device, int* count) {
    const auto function = reinterpret_cast<const void*>(decode_lanes_cluster_kernel<LanePlan<float, 64, 1>>);
    LaunchOptions options;
    options.cluster = kMostCluster;
    const size_t bytes = device.shared_memory / 4 * 3;  // no room for a second block
    if (const cudaError_t error = opt_in(function, bytes, options)) return error;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kMostCluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kMostCluster), config.blockDim = dim3(kLaneThreads), config.dynamicSmemBytes = bytes;
    config.attrs = &cluster, config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(count, function, &config);
}

DriverFunction<decltype(cuDevicePrimaryCtxGetState)> context_state("cuDevicePrimaryCtxGetState");

// Whether the GPU can be asked without creating a context, which takes memory and lasts as long as the process. Calls that pass GPU memory
// have a context; a query for the workspace may come without one.
bool has_context(const DeviceInfo& device, int current) {
    if (current == device.index && has_current_context()) return true;
    unsigned flags = 0;
    int active = 0;
    const auto get = context_state.get();
    return get && get(device.index, &flags, &active) == CUDA_SUCCESS && active;
}

}  // namespace

int decode_most_cluster_blocks(const DeviceInfo& device) {
    constexpr int kPortable = 8, kMultiprocessors = 128, kMostDevices = 64;
    if (device.compute < 90 || device.multiprocessors < kMultiprocessors || unsigned(device.index) >= kMostDevices) return kPortable;
    static std::atomic<int> known[kMostDevices];  // by device: the answer; 0: not asked yet. The hardware does not change
    if (const int answer = known[device.index].load(std::memory_order_relaxed)) return answer;
    int current = -1, count = 0;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && !has_context(device, current)) return kMostCluster;  // all such GPUs said so; asked again next time
    if (error == cudaSuccess && current != device.index) error = cudaSetDevice(device.index);
    if (error == cudaSuccess) error = count_wide_clusters(device, &count);
    if (current >= 0 && current != device.index) cudaSetDevice(current);
    if (error != cudaSuccess) cudaGetLastError();
    const bool refused = error == cudaErrorInvalidClusterSize || error == cudaErrorInvalidValue || error == cudaErrorNotSupported;
    if (error != cudaSuccess && !refused) return kPortable;  // no answer: asked again next time
    const int answer = count > 0 ? kMostCluster : kPortable;
    known[device.index].store(answer, std::memory_order_relaxed);
    return answer;
}

cudaError_t decode_lanes(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream) {
    if (has_8bit_cache(d.attention)) return decode_lanes_8bit(d, stream);
    if (!d.shape.cluster && decode_scores_are_natural(d.attention)) return decode_lanes_options(d, device, stream);
    return d.attention.dtype == DType::kFloat32 ? launch_lanes_of<float>(d, append, device, stream)
                                                : decode_lanes_16bit(d, append, device, stream);
}

}  // namespace fa
