// registry_w4.cpp: the products with 4-bit weights and chains of them, best first on each device, and what each refuses.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cpu/kernels.h"
#include "dispatch.h"
#include "registry.h"
#include "serve.h"

#if FA_WITH_CUDA
#include "linear/kernels.h"
#endif

namespace fa {
namespace {

using Params = W4LinearParams;

template <typename AnyParams>
const char* serves_all(const AnyParams&, const DeviceInfo&, char*, size_t) {
    return nullptr;
}
template <typename AnyParams>
size_t no_workspace(const AnyParams&, const DeviceInfo&) {
    return 0;
}

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
const char* few_w4_sm90_refuses(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = wgmma_w4_sm90_refuses(p, device, text, size)) return reason;
    if (few_w4_sm90_fits(p, size_of(device))) return nullptr;
    std::snprintf(text, size, "rows=%lld: above 32, or too many for shared memory", static_cast<long long>(p.rows));
    return text;
}
const char* few_w4_sm90_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.rows == 1) return "one row: gemv_w4_sm90 and gemv_w4 are faster";
    if (p.rows <= 8 && few_w4_sm90_workspace(p, size_of(device)) > 0)
        return "gemv_w4_sm90 and gemv_w4 norm and round up to 8 rows themselves";
    if (p.rows <= 16) return nullptr;
    // Against wgmma_w4_sm90 and mma_w4, measured on an H200. The blocks of a whole SM that programmatic calls get lose where W is tall.
    constexpr int64_t kMillion = 1000000;
    const int64_t weights = int64_t(p.out_features) * p.in_features;
    const bool wins = p.rows > 24 ? weights <= 20 * kMillion : p.programmatic ? p.out_features <= 6144 : weights <= 60 * kMillion;
    if (wins) return nullptr;
    std::snprintf(text, size, "rows=%lld of a %d x %d weight: wgmma_w4_sm90 is faster", static_cast<long long>(p.rows), p.out_features,
                  p.in_features);
    return text;
}
fa_status few_w4_sm90_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("few_w4_sm90", start<few_w4_sm90>(p, device, stream));
}
const char* few_w4_sm90_half_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.programmatic) return "programmatic: between the kernels of a model, few_w4_sm90 with its one block an SM is faster";
    return few_w4_sm90_yields(p, device, text, size);
}
fa_status few_w4_sm90_half_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("few_w4_sm90_half", start<few_w4_sm90_half>(p, device, stream));
}
const char* wgmma_w4_few_sm90_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = wgmma_w4_sm90_yields(p, device, text, size)) return reason;
    if (wgmma_w4_few_sm90_wins(p, size_of(device))) return nullptr;
    std::snprintf(text, size, "rows=%lld: wgmma_w4_sm90 is faster", static_cast<long long>(p.rows));
    return text;
}
fa_status wgmma_w4_few_sm90_launch(const Params& p, const DeviceInfo& device, void* stream) {
    return launched("wgmma_w4_few_sm90", start<wgmma_w4_few_sm90>(p, device, stream));
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
    {"few_w4_sm90_half", "few_w4_sm90 in blocks of half an SM", FA_CUDA, few_w4_sm90_refuses, workspace_of<few_w4_sm90_workspace>,
     few_w4_sm90_half_launch, few_w4_sm90_half_yields},
    {"few_w4_sm90", "mma.sync, rings of bulk copies and of x, up to 32 rows", FA_CUDA, few_w4_sm90_refuses,
     workspace_of<few_w4_sm90_workspace>, few_w4_sm90_launch, few_w4_sm90_yields},
    {"gemv_w4_sm90", "mma.sync, each warp its ring of bulk copies, up to 8 rows of x", FA_CUDA, gemv_w4_sm90_refuses, no_workspace,
     gemv_w4_sm90_launch, gemv_w4_sm90_yields},
#endif
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    {"gemv_w4", "mma.sync, weights as operand A, up to 16 rows of x", FA_CUDA, gemv_w4_refuses, workspace_of<gemv_w4_workspace>,
     gemv_w4_launch},
#endif
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
    {"wgmma_w4_few_sm90", "TMA and wgmma, up to 64 rows of x to a tile; spare warps bring x into the weight's order", FA_CUDA,
     wgmma_w4_sm90_refuses, workspace_of<wgmma_w4_sm90_workspace>, wgmma_w4_few_sm90_launch, wgmma_w4_few_sm90_yields},
    {"wgmma_w4_sm90", "TMA and wgmma, weights widened into registers", FA_CUDA, wgmma_w4_sm90_refuses,
     workspace_of<wgmma_w4_sm90_workspace>, wgmma_w4_sm90_launch, wgmma_w4_sm90_yields},
#endif
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    {"mma_w4", "mma.sync, 32 rows of x to a block", FA_CUDA, mma_w4_refuses, workspace_of<mma_w4_workspace>, mma_w4_launch},
#endif
    {"cpu", "threads and vectors, any number of rows", FA_CPU, serves_all, cpu_workspace, cpu_launch},
};

// ---- chains ----

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
const char* chain_w4_sm90_refuses(const W4ChainParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = wgmma_w4_sm90_refuses(p.products[0], device, text, size)) return reason;
    return chain_w4_sm90_refuses(p, size_of(device), text, size);
}
const char* chain_w4_sm90_yields(const W4ChainParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* const forced = std::getenv(kLinearVariable); forced && *forced)
        return "FLASH_ATTN_LINEAR_KERNEL names a kernel of single products";
    if (p.count == 1) return "one product: its own kernel waits for nobody";
    if (p.products[0].rows > 1 || (p.count > 2 && p.bytes() >= W4ChainParams::kLarge)) return nullptr;
    constexpr int kMegabyte = 1 << 20;
    std::snprintf(text, size, "rows=1, %d products of %lld MB: launches of their own are as fast below 3 and %lld MB", p.count,
                  static_cast<long long>(p.bytes() / kMegabyte), static_cast<long long>(W4ChainParams::kLarge / kMegabyte));
    return text;
}
fa_status chain_w4_sm90_launch(const W4ChainParams& p, const DeviceInfo& device, void* stream) {
    return launched("chain_w4_sm90", chain_w4_sm90(p, size_of(device), static_cast<cudaStream_t>(stream)));
}
#endif

// Each product by its own kernel, all with the same workspace.
template <fa_device device>
fa_status kernel_of(const Params& p, const DeviceInfo& info, const LinearKernel** kernel) {
    return choose(nullptr, device, p, info, linear_kernel_at, kLinearVariable, kernel, nullptr);
}
template <fa_device device>
const char* each_refuses(const W4ChainParams& chain, const DeviceInfo& info, char* text, size_t size) {
    for (int i = 0; i < chain.count; ++i)
        if (const LinearKernel * kernel; kernel_of<device>(chain.products[i], info, &kernel) != FA_OK) {
            std::snprintf(text, size, "products[%d]: %s", i, last_error());
            return text;
        }
    return nullptr;
}
template <fa_device device>
size_t each_workspace(const W4ChainParams& chain, const DeviceInfo& info) {
    size_t bytes = 0;
    for (int i = 0; i < chain.count; ++i)
        if (const LinearKernel * kernel; kernel_of<device>(chain.products[i], info, &kernel) == FA_OK)
            bytes = std::max(bytes, kernel->workspace(chain.products[i], info));
    return bytes;
}
template <fa_device device>
fa_status each_launch(const W4ChainParams& chain, const DeviceInfo& info, void* stream) {
    for (int i = 0; i < chain.count; ++i) {
        const LinearKernel* kernel;
        if (const fa_status status = kernel_of<device>(chain.products[i], info, &kernel); status != FA_OK) return status;
        if (chain.products[i].rows == 0) continue;
        if (const fa_status status = kernel->launch(chain.products[i], info, stream); status != FA_OK) return status;
    }
    return FA_OK;
}

constexpr ChainKernel kChainKernels[] = {
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
    {"chain_w4_sm90", "one launch, rings of bulk copies that run on from product to product", FA_CUDA, chain_w4_sm90_refuses, no_workspace,
     chain_w4_sm90_launch, chain_w4_sm90_yields},
#endif
#if FA_WITH_CUDA
    {"one_by_one", "a launch for each product", FA_CUDA, each_refuses<FA_CUDA>, each_workspace<FA_CUDA>, each_launch<FA_CUDA>},
#endif
    {"cpu", "one product behind the other", FA_CPU, each_refuses<FA_CPU>, each_workspace<FA_CPU>, each_launch<FA_CPU>},
};

}  // namespace

int chain_kernel_count() { return int(sizeof kChainKernels / sizeof kChainKernels[0]); }
const ChainKernel* chain_kernel_at(int index) { return index >= 0 && index < chain_kernel_count() ? &kChainKernels[index] : nullptr; }
int linear_kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const LinearKernel* linear_kernel_at(int index) { return index >= 0 && index < linear_kernel_count() ? &kKernels[index] : nullptr; }

}  // namespace fa
