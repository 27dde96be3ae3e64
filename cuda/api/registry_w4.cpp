// registry_w4.cpp: the products with 4-bit weights, best first on each device, and what each refuses.
#include <cstdio>

#include "cpu/kernels.h"
#include "registry.h"
#include "serve.h"

#if FA_WITH_CUDA
#include "linear/kernels.h"
#endif

namespace fa {
namespace {

using Params = W4LinearParams;

const char* serves_all(const Params&, const DeviceInfo&, char*, size_t) { return nullptr; }

size_t cpu_workspace(const Params& p, const DeviceInfo&) { return size_t(cpu::w4_linear_workspace(p)); }
fa_status cpu_launch(const Params& p, const DeviceInfo&, void*) {
    return on_host([&] { cpu::w4_linear(p); });
}

#if FA_WITH_CUDA && (FA_WITH_MMA_SM80 || FA_WITH_WGMMA_SM90)
using Launch = cudaError_t(const Params&, const GpuSize&, cudaStream_t);
using Workspace = int64_t(const Params&, const GpuSize&);

GpuSize size_of(const DeviceInfo& device) { return {device.multiprocessors, device.shared_memory}; }
template <Workspace bytes>
size_t workspace_of(const Params& p, const DeviceInfo& device) {
    return size_t(bytes(p, size_of(device)));
}
size_t no_workspace(const Params&, const DeviceInfo&) { return 0; }
template <Launch launch>
cudaError_t start(const Params& p, const DeviceInfo& device, void* stream) {
    return launch(p, size_of(device), static_cast<cudaStream_t>(stream));
}
#endif

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
const char* mma_w4_refuses(const Params&, const DeviceInfo& device, char* text, size_t size) {
    if (device.compute >= 80) return nullptr;
    std::snprintf(text, size, "needs sm_80 or newer, this device is sm_%d", device.compute);
    return text;
}
fa_status mma_w4_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("mma_w4", start<mma_w4>(p, device, stream));
}
const char* small_w4_refuses(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = mma_w4_refuses(p, device, text, size)) return reason;
    return small_w4_refuses(p);
}
const char* small_w4_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (small_w4_fits(p, size_of(device))) return nullptr;
    std::snprintf(text, size, "%d x %d: gemv_w4 is faster for matrices beyond the GPU's registers", p.out_features, p.in_features);
    return text;
}
fa_status small_w4_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("small_w4", start<small_w4>(p, device, stream));
}
const char* gemv_w4_refuses(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = mma_w4_refuses(p, device, text, size)) return reason;
    if (p.rows <= 16) return nullptr;
    std::snprintf(text, size, "rows=%lld is above 16", static_cast<long long>(p.rows));
    return text;
}
fa_status gemv_w4_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("gemv_w4", start<gemv_w4>(p, device, stream));
}
#endif

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
const char* wgmma_w4_sm90_refuses(const Params&, const DeviceInfo& device, char* text, size_t size) {
    if (device.compute == 90) return nullptr;
    std::snprintf(text, size, "needs sm_90 (Hopper), this device is sm_%d", device.compute);
    return text;
}
const char* wgmma_w4_sm90_yields(const Params& p, const DeviceInfo&, char* text, size_t size) {
    if (p.rows > 32 || (p.rows > 16 && p.out_features >= 4096)) return nullptr;
    std::snprintf(text, size, "rows=%lld, out_features=%d: mma_w4 is faster up to 16 rows, and up to 32 below 4096 features",
                  static_cast<long long>(p.rows), p.out_features);
    return text;
}
const char* gemv_w4_sm90_refuses(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = wgmma_w4_sm90_refuses(p, device, text, size)) return reason;
    if (gemv_w4_sm90_fits(p, size_of(device))) return nullptr;
    std::snprintf(text, size, "rows=%lld, in_features=%d: above 8 rows, or too many for shared memory", static_cast<long long>(p.rows),
                  p.in_features);
    return text;
}
const char* gemv_w4_sm90_yields(const Params& p, const DeviceInfo&, char* text, size_t size) {
    if (!p.programmatic) return nullptr;
    std::snprintf(text, size, "programmatic: between the kernels of a model, gemv_w4 with its one block an SM is faster");
    return text;
}
fa_status gemv_w4_sm90_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("gemv_w4_sm90", start<gemv_w4_sm90>(p, device, stream));
}
fa_status wgmma_w4_sm90_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("wgmma_w4_sm90", start<wgmma_w4_sm90>(p, device, stream));
}
#endif

constexpr LinearKernel kKernels[] = {
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    {"small_w4", "mma.sync, weights in registers before x is there, one row", FA_CUDA, small_w4_refuses, no_workspace, small_w4_launch,
     small_w4_yields},
#endif
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
    {"gemv_w4_sm90", "mma.sync, each warp its ring of bulk copies, up to 8 rows of x", FA_CUDA, gemv_w4_sm90_refuses, no_workspace,
     gemv_w4_sm90_launch, gemv_w4_sm90_yields},
#endif
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    {"gemv_w4", "mma.sync, weights as operand A, up to 16 rows of x", FA_CUDA, gemv_w4_refuses, workspace_of<gemv_w4_workspace>,
     gemv_w4_launch},
#endif
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
    {"wgmma_w4_sm90", "TMA and wgmma, weights widened into registers", FA_CUDA, wgmma_w4_sm90_refuses,
     workspace_of<wgmma_w4_sm90_workspace>, wgmma_w4_sm90_launch, wgmma_w4_sm90_yields},
#endif
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    {"mma_w4", "mma.sync, 32 rows of x to a block", FA_CUDA, mma_w4_refuses, workspace_of<mma_w4_workspace>, mma_w4_launch},
#endif
    {"cpu", "threads and vectors, any number of rows", FA_CPU, serves_all, cpu_workspace, cpu_launch},
};

}  // namespace

int linear_kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const LinearKernel* linear_kernel_at(int index) { return index >= 0 && index < linear_kernel_count() ? &kKernels[index] : nullptr; }

}  // namespace fa
