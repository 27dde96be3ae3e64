// registry_w4.cpp: the kernels for products with 4-bit weights and for chains of such products, best first on each device: what each kernel
// refuses, and which calls it leaves to a faster one.
//
//     rows of x    the first choice on Hopper
//     1            small_w4 up to 4096 columns and about 17,000 features; else mma_w4 if x needs a norm or rounding, and few_w4_sm90 if not
//     2 .. 16      few_w4_sm90; but mma_w4 for most calls of up to 8 rows that need a norm or rounding, if its blocks have room to do it
//     17 .. 32     few_w4_sm90 for the smaller weights, wgmma_w4_few_sm90 for the larger
//     33 ..        wgmma_w4_few_sm90 where tiles of up to 64 rows are estimated to be faster, else wgmma_w4_sm90
//
// Other GPUs from sm_80 on have small_w4 and mma_w4. The limits were measured on an H200.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "api/common/dispatch.h"
#include "api/transformer/registry.h"
#include "cpu/transformer/kernels.h"

#if FA_WITH_CUDA
#include "transformer/w4/kernels.h"
#endif

namespace fa {
namespace {

using Params = W4LinearParams;

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
long long rows_of(const Params& p) { return static_cast<long long>(p.rows); }
#endif

// ---- sm_80 and newer ----

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
const char* small_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    constexpr int kMostBlocks = 8;  // for each multiprocessor
    if (small_w4_blocks(p, device) <= kMostBlocks * device.multiprocessors) return nullptr;
    return say(text, size, "%d x %d: mma_w4 is faster for so many features", p.out_features, p.in_features);
}
#endif

// ---- Hopper ----

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
const char* few_refuses(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (few_w4_sm90_fits(p, device)) return nullptr;
    return say(text, size, "rows=%lld: above 32, or too many for shared memory", rows_of(p));
}
// Whether x needs a norm or rounding. few_w4_sm90 does it in a separate launch first.
bool rounds_first(const Params& p, const DeviceInfo& device) { return few_w4_sm90_workspace(p, device) > 0; }
// mma_w4 does it inside its own blocks, if they have room.
bool mma_rounds_itself(const Params& p, const DeviceInfo& device) { return mma_w4_workspace(p, device) == 0; }

const char* few_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    const bool rounds = rounds_first(p, device);
    if (p.rows == 1 && rounds) return "one row that needs a norm or rounding: mma_w4 is faster";
    if (p.rows <= 8 && rounds && mma_rounds_itself(p, device)) {
        if (few_w4_sm90_blocks_per_sm(p, device) == 2) return nullptr;  // W is tall
        if (!p.programmatic && p.in_features <= 1024) return nullptr;
        return "x needs a norm or rounding, which mma_w4 does in its blocks";
    }
    if (p.rows <= 16 || p.out_features <= 4096) return nullptr;
    constexpr int64_t kMillion = 1000000;
    const int64_t weights = int64_t(p.out_features) * p.in_features;
    const bool low = p.rows <= 24 && p.programmatic && rounds;  // measured: here only the height of W matters
    if (low ? p.out_features <= 6144 : weights <= (p.rows > 24 ? 20 : 60) * kMillion) return nullptr;
    return say(text, size, "rows=%lld of a %d x %d weight: wgmma_w4_few_sm90 is faster", rows_of(p), p.out_features, p.in_features);
}

const char* wgmma_yields(const Params& p, const DeviceInfo&, char* text, size_t size) {
    if (p.rows > 16) return nullptr;
    return say(text, size, "rows=%lld: mma_w4 is faster up to 16 rows", rows_of(p));
}
const char* wgmma_few_yields(const Params& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = wgmma_yields(p, device, text, size)) return reason;
    if (wgmma_w4_few_sm90_wins(p, device)) return nullptr;
    return say(text, size, "rows=%lld: wgmma_w4_sm90 is faster", rows_of(p));
}
#endif

constexpr LinearKernel kKernels[] = {
    {.name = "small_w4",
     .summary = "mma.sync, one row; weights in registers before x is there",
     .device = FA_CUDA,
     .limits = {kFromSm80},
     .refuses = FA_SM80(small_w4_refuses),
     .yields = FA_SM80(small_yields),
     .launch = FA_SM80(small_w4)},
    {.name = "few_w4_sm90",
     .summary = "mma.sync, up to 32 rows of x; a ring of weights for each warp, one of x for the block",
     .device = FA_CUDA,
     .limits = {kHopper},
     .refuses = FA_SM90(few_refuses),
     .yields = FA_SM90(few_yields),
     .workspace = FA_SM90(few_w4_sm90_workspace),
     .launch = FA_SM90(few_w4_sm90)},
    {.name = "wgmma_w4_few_sm90",
     .summary = "wgmma, tiles of up to 64 rows of x, which spare warps bring into the weight's order",
     .device = FA_CUDA,
     .limits = {kHopper},
     .yields = FA_SM90(wgmma_few_yields),
     .workspace = FA_SM90(wgmma_w4_sm90_workspace),
     .launch = FA_SM90(wgmma_w4_few_sm90)},
    {.name = "wgmma_w4_sm90",
     .summary = "wgmma, tiles of 128 and 256 rows of x; weights widened into registers",
     .device = FA_CUDA,
     .limits = {kHopper},
     .yields = FA_SM90(wgmma_yields),
     .workspace = FA_SM90(wgmma_w4_sm90_workspace),
     .launch = FA_SM90(wgmma_w4_sm90)},
    {.name = "mma_w4",
     .summary = "mma.sync, any number of rows of x, 8, 16 or 32 to a block",
     .device = FA_CUDA,
     .limits = {kFromSm80},
     .workspace = FA_SM80(mma_w4_workspace),
     .launch = FA_SM80(mma_w4)},
    {.name = "cpu",
     .summary = "threads and vectors, any number of rows",
     .device = FA_CPU,
     .limits = {kAnyGpu},
     .workspace = [](const Params& p, const DeviceInfo&) { return size_t(cpu::w4_linear_workspace(p)); },
     .run = cpu::w4_linear},
};

// ---- chains ----

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
const char* chain_yields(const W4ChainParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* const forced = std::getenv(kLinearVariable); forced && *forced)
        return "FLASH_ATTN_LINEAR_KERNEL names a kernel of single products";
    if (p.count == 1) return "one product: its own kernel waits for nobody";
    if (p.products[0].rows > 1 || (p.count > 2 && p.bytes() >= W4ChainParams::kLarge)) return nullptr;
    constexpr int kMegabyte = 1 << 20;
    return say(text, size, "rows=1, %d products of %lld MB: launches of their own are as fast below 3 and %lld MB", p.count,
               static_cast<long long>(p.bytes() / kMegabyte), static_cast<long long>(W4ChainParams::kLarge / kMegabyte));
}
#endif

// one_by_one, and the CPU: each product by its own kernel; all use the same workspace.
template <fa_device device>
fa_status kernel_of(const Params& p, const DeviceInfo& info, const LinearKernel** kernel) {
    return choose(nullptr, device, p, info, linear_kernels(), kLinearVariable, kernel, nullptr);
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
            bytes = std::max(bytes, workspace_of(*kernel, chain.products[i], info));
    return bytes;
}
template <fa_device device>
fa_status each_launch(const W4ChainParams& chain, const DeviceInfo& info, void* stream) {
    for (int i = 0; i < chain.count; ++i) {
        const LinearKernel* kernel;
        if (const fa_status status = kernel_of<device>(chain.products[i], info, &kernel); status != FA_OK) return status;
        if (chain.products[i].rows == 0) continue;
        if (const fa_status status = launch(*kernel, chain.products[i], info, stream); status != FA_OK) return status;
    }
    return FA_OK;
}

constexpr ChainKernel kChainKernels[] = {
    {.name = "chain_w4_sm90",
     .summary = "one launch; the ring of weights runs on from product to product",
     .device = FA_CUDA,
     .limits = {kHopper},
     .refuses = FA_SM90(chain_w4_sm90_refuses),
     .yields = FA_SM90(chain_yields),
     .launch = FA_SM90(chain_w4_sm90)},
    {.name = "one_by_one",
     .summary = "a launch for each product",
     .device = FA_CUDA,
     .limits = {kAnyGpu},
     .refuses = FA_GPU(each_refuses<FA_CUDA>),
     .workspace = FA_GPU(each_workspace<FA_CUDA>),
     .others = FA_GPU(each_launch<FA_CUDA>)},
    {.name = "cpu",
     .summary = "one product behind the other",
     .device = FA_CPU,
     .limits = {kAnyGpu},
     .refuses = each_refuses<FA_CPU>,
     .workspace = each_workspace<FA_CPU>,
     .others = each_launch<FA_CPU>},
};

}  // namespace

Table<LinearKernel> linear_kernels() { return table_of(kKernels); }
Table<ChainKernel> chain_kernels() { return table_of(kChainKernels); }

}  // namespace fa
