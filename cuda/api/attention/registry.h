// registry.h: every attention kernel of this build, best first on each device, and what each can serve.
#pragma once

#include <cstddef>

#include "api/common/kernel.h"
#include "attention/common/params.h"
#include "attention/common/quantize_fp8.h"

namespace fa {

struct Kernel : KernelOf<AttentionParams> {
    // For a kernel that can do a whole cache call in one launch, appending and rotation included. nullptr or false:
    // launch_append runs first.
    bool (*appends)(const AppendParams&, const DeviceInfo&) = nullptr;
    fa_status (*launch_whole)(const AppendParams&, const DeviceInfo&, void* stream) = nullptr;
    bool gives_key_sums = false;  // true: its launch computes key_sums too; false: launch_key_sums follows
};
using BackwardKernel = KernelOf<BackwardParams>;

int kernel_count();
const Kernel* kernel_at(int index);  // nullptr outside 0 .. kernel_count() - 1
int decode_kernel_count();           // the first entries of kernel_at: kernels for few rows and many keys
const Kernel* decode_kernel_at(int index);
int backward_kernel_count();
const BackwardKernel* backward_kernel_at(int index);

// Whether wgmma_split_sm90 can serve the call and is the fastest kernel for it. Kernels before it in the table then yield to it.
bool wgmma_split_is_best(const AttentionParams&, const DeviceInfo&);

const char* key_sums_refuses(const AttentionParams&, const DeviceInfo&, char* text, size_t size);
fa_status launch_key_sums(const AttentionParams&, const DeviceInfo&, void* stream);   // from the lse of a forward kernel
fa_status clear_statistics(const AttentionParams&, const DeviceInfo&, void* stream);  // for a call without queries, which runs no kernel
fa_status launch_append(const AppendParams&, const DeviceInfo&, void* stream);        // for a call with keys to append or a q to rotate
fa_status launch_merge(const MergeParams&, fa_device device, void* stream);
fa_status launch_quantize(const QuantizeParams&, fa_device device, void* stream);

}  // namespace fa
