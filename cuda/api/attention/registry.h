// registry.h: every attention kernel of this build, best first on each device, and what each can serve.
#pragma once

#include <cstddef>

#include "api/common/kernel.h"
#include "attention/common/params.h"
#include "attention/common/quantize_fp8.h"

namespace fa {

struct Kernel : KernelOf<AttentionParams> {
    // A call over a cache that the kernel serves whole, appending and turning included; nullptr, or false: launch_append comes first.
    bool (*appends)(const AppendParams&, const DeviceInfo&) = nullptr;
    fa_status (*launch_whole)(const AppendParams&, const DeviceInfo&, void* stream) = nullptr;
    bool gives_key_sums = false;  // whether its launch gives key_sums, too; else launch_key_sums follows
};
using BackwardKernel = KernelOf<BackwardParams>;

int kernel_count();
const Kernel* kernel_at(int index);  // nullptr outside 0 .. kernel_count() - 1
int decode_kernel_count();           // those of kernel_at that attend with few rows to many keys: they come first
const Kernel* decode_kernel_at(int index);
int backward_kernel_count();
const BackwardKernel* backward_kernel_at(int index);

// Whether wgmma_split_sm90 serves the call and takes the least time. Kernels that stand before it in the table yield to it.
bool wgmma_split_is_best(const AttentionParams&, const DeviceInfo&);

const char* key_sums_refuses(const AttentionParams&, const DeviceInfo&, char* text, size_t size);
fa_status launch_key_sums(const AttentionParams&, const DeviceInfo&, void* stream);   // from the lse of a kernel of the forward pass
fa_status clear_statistics(const AttentionParams&, const DeviceInfo&, void* stream);  // of a call without queries: no kernel runs
fa_status launch_append(const AppendParams&, const DeviceInfo&, void* stream);        // of a call with something to append or to turn
fa_status launch_merge(const MergeParams&, fa_device device, void* stream);
fa_status launch_quantize(const QuantizeParams&, fa_device device, void* stream);

}  // namespace fa
