// registry.h: the tables of the kernels for products in this build, best first on each device.
#pragma once

#include "api/common/kernel.h"
#include "transformer/ops/ops.h"
#include "transformer/w4/common/params.h"

namespace fa {

// What can be said of these kernels as data: the GPUs that they run on.
struct OnGpus {
    Gpus gpus;

    template <typename Params>
    Refusal refuses(uint32_t, const Params&, const DeviceInfo& device, char* text, size_t size) const {
        return outside(gpus, device, text, size);
    }
    template <typename Params>
    const char* misplaces(const Params&, char*, size_t) const {
        return nullptr;
    }
    template <typename Params>
    static const char* too_large(const Params&, char*, size_t) {
        return "needs more blocks than a grid has";
    }
};
inline uint32_t features_of(const W4LinearParams&) { return 0; }
inline uint32_t features_of(const W4ChainParams&) { return 0; }
inline uint32_t features_of(const LinearParams&) { return 0; }

using LinearKernel = KernelOf<W4LinearParams, OnGpus>;     // products with 4-bit weights
using ChainKernel = KernelOf<W4ChainParams, OnGpus>;       // chains of such products
using DenseLinearKernel = KernelOf<LinearParams, OnGpus>;  // products with 16 or 32-bit weights

Table<LinearKernel> linear_kernels();
Table<ChainKernel> chain_kernels();
Table<DenseLinearKernel> dense_linear_kernels();
constexpr char kLinearVariable[] = "FLASH_ATTN_LINEAR_KERNEL";  // forces a kernel for products with 4-bit weights

}  // namespace fa
