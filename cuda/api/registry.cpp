#include "registry.h"

#include <cstdio>
#include <mutex>
#include <new>

#include "cpu/kernels.h"
#include "status.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>

#include "attention/kernels.h"
#endif

namespace fa {
namespace {

const char* serves_all(const AttentionParams&, const DeviceInfo&, char*, size_t) { return nullptr; }

// ---- CPU ----

template <cpu::Isa isa>
const char* needs_isa(const AttentionParams&, const DeviceInfo&, char*, size_t) {
    return cpu::isa_available(isa) ? nullptr : "this processor, or this build, lacks the instruction set";
}
template <cpu::Isa isa>
size_t cpu_workspace(const AttentionParams& p, const DeviceInfo&) {
    return cpu::forward_workspace(p, isa);
}

// Starting threads takes host memory, and no exception may cross the C ABI.
template <typename Work>
fa_status on_host(const Work& work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        return fail(FA_OUT_OF_MEMORY, "no host memory left to start the worker threads");
    }
    return FA_OK;
}

template <cpu::Isa isa>
fa_status cpu_launch(const AttentionParams& p, const DeviceInfo&, void*) {
    return on_host([&] { cpu::forward(p, isa); });
}
template <cpu::Isa isa>
constexpr Kernel cpu_kernel(const char* name, const char* summary) {
    return {name, summary, FA_CPU, needs_isa<isa>, cpu_workspace<isa>, cpu_launch<isa>};
}
size_t cpu_naive_workspace(const AttentionParams& p, const DeviceInfo&) { return cpu::forward_naive_workspace(p); }
fa_status cpu_naive_launch(const AttentionParams& p, const DeviceInfo&, void*) { return on_host([&] { cpu::forward_naive(p); }); }

// ---- CUDA ----

#if FA_WITH_CUDA
size_t no_workspace(const AttentionParams&, const DeviceInfo&) { return 0; }

fa_status launched(const char* name, cudaError_t error) {
    if (error == cudaSuccess) return FA_OK;
    return fail(FA_CUDA_ERROR, "kernel %s: %s (%s)", name, cudaGetErrorString(error), cudaGetErrorName(error));
}

constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;

const char* minimal_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    const int64_t blocks = (int64_t(p.seqlen_q) + 63) / 64 * p.nheads * p.batch;
    if (blocks <= kMaxGrid) return nullptr;
    std::snprintf(text, size, "batch=%d x nheads=%d x seqlen_q=%d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q);
    return text;
}
fa_status minimal_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("minimal", forward_minimal(p, static_cast<cudaStream_t>(stream)));
}

const char* naive_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    const int64_t tiles = ((int64_t(p.seqlen_q) + 15) / 16) * ((int64_t(p.seqlen_k > p.headdim_v ? p.seqlen_k : p.headdim_v) + 15) / 16);
    const int64_t heads = int64_t(p.batch) * p.nheads;
    if (heads == 0 || tiles <= kMaxGrid / heads) return nullptr;
    std::snprintf(text, size, "S of %d x %d x %d x %d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q, p.seqlen_k);
    return text;
}
size_t naive_workspace(const AttentionParams& p, const DeviceInfo&) { return forward_naive_workspace(p); }
fa_status naive_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("naive", forward_naive(p, static_cast<cudaStream_t>(stream)));
}
#endif

// Best first within a device.
constexpr Kernel kKernels[] = {
#if FA_WITH_CUDA
    {"minimal", "online softmax on CUDA cores: any head dim, dtype, mask and option", FA_CUDA, minimal_refuses, no_workspace, minimal_launch},
    {"naive", "standard attention in three steps, S in the workspace", FA_CUDA, naive_refuses, naive_workspace, naive_launch},
#endif
    cpu_kernel<cpu::Isa::kAvx512>("cpu_avx512", "tiled online softmax, 16 lanes"),
    cpu_kernel<cpu::Isa::kAvx2>("cpu_avx2", "tiled online softmax, 8 lanes"),
    cpu_kernel<cpu::Isa::kNeon>("cpu_neon", "tiled online softmax, 4 lanes"),
    cpu_kernel<cpu::Isa::kPortable>("cpu_portable", "tiled online softmax, whatever the compiler makes of it"),
    {"cpu_naive", "standard attention in three steps, S in the workspace", FA_CPU, serves_all, cpu_naive_workspace, cpu_naive_launch},
};

}  // namespace

int kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const Kernel* kernel_at(int index) { return index >= 0 && index < kernel_count() ? &kKernels[index] : nullptr; }

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
// Facts of a device never change, so every thread would write the same values.
fa_status device_facts(int index, DeviceInfo* info) {
    constexpr int kMaxDevices = 64;
    static DeviceInfo known[kMaxDevices];
    static std::once_flag once[kMaxDevices];
    if (index < 0 || index >= kMaxDevices) return fail(FA_UNSUPPORTED, "CUDA device %d: only %d devices are supported", index, kMaxDevices);
    std::call_once(once[index], [index] {
        int major = 0, minor = 0, sms = 0, shared = 0;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index);
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
        known[index] = {index, 10 * major + minor, sms, size_t(shared)};
    });
    *info = known[index];
    return info->compute ? FA_OK : fail(FA_CUDA_ERROR, "CUDA device %d does not answer", index);
}
}  // namespace

fa_status find_device(fa_device device, const void* q, DeviceInfo* info) {
    *info = {-1, 0, 0, 0};
    if (device == FA_CPU) return FA_OK;
    int index = -1;
    if (q) {
        cudaPointerAttributes attributes{};
        if (const cudaError_t error = cudaPointerGetAttributes(&attributes, q); error != cudaSuccess) {
            cudaGetLastError();
            return fail(FA_CUDA_ERROR, "device=FA_CUDA: %s", cudaGetErrorString(error));
        }
        if (attributes.type == cudaMemoryTypeUnregistered) return fail(FA_BAD_ARGUMENT, "q.data=%p is host memory, but device is FA_CUDA", q);
        if (attributes.type == cudaMemoryTypeDevice) index = attributes.device;
    }
    if (index < 0)
        if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
            cudaGetLastError();
            return fail(FA_CUDA_ERROR, "device=FA_CUDA: %s", cudaGetErrorString(error));
        }
    if (!q && cuda_device_count() == 0) return fail(FA_CUDA_ERROR, "device=FA_CUDA: no CUDA device or driver on this machine");
    return device_facts(index, info);
}

CurrentDevice::CurrentDevice(int index) {
    int current = -1;
    if (index < 0 || cudaGetDevice(&current) != cudaSuccess || current == index) return;
    if (cudaSetDevice(index) == cudaSuccess) previous_ = current;
}
CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

#else

int cuda_device_count() { return 0; }

fa_status find_device(fa_device device, const void*, DeviceInfo* info) {
    *info = {-1, 0, 0, 0};
    return device == FA_CPU ? FA_OK : fail(FA_UNSUPPORTED, "device=FA_CUDA: this build has the CPU backend only");
}

CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}

#endif

fa_status launch_merge(const MergeParams& params, fa_device device, [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(device, params.out_a.data, &info); status != FA_OK) return status;
    if (params.batch == 0 || params.seqlen == 0) return FA_OK;
    if (device == FA_CPU) return on_host([&] { cpu::merge(params); });
#if FA_WITH_CUDA
    const CurrentDevice scope(info.index);
    return launched("merge", merge(params, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

}  // namespace fa
