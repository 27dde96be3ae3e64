// registry.h: every attention kernel, best first on each device, and what each can serve.
#pragma once

#include <cstddef>

#include "api/attention/limits.h"
#include "api/common/kernel.h"
#include "attention/common/params.h"
#include "attention/common/quantize_fp8.h"

namespace fa {

using Kernel = KernelOf<AttentionParams, Limits>;
using BackwardKernel = KernelOf<BackwardParams, Limits>;

Table<Kernel> decode_kernels();   // for few rows and many keys: they stand before the others
Table<Kernel> forward_kernels();  // all of the forward pass
Table<BackwardKernel> backward_kernels();

// Whether the kernel can do a whole cache call in one launch, appending and rotation included. If not, launch_append runs first.
bool appends(const Kernel&, const AppendParams&);
fa_status launch_whole(const AppendParams&, const DeviceInfo&, void* stream);

// Whether wgmma_split_sm90 can serve the call and is the fastest kernel for it. Kernels before it in the table then yield to it.
bool wgmma_split_is_best(const AttentionParams&, const DeviceInfo&);

// The kernel that serves a call of up to 16 queries over 16-bit keys fastest, or nullptr: not such a call, or not Hopper.
const Kernel* fastest_for_few_queries(const AttentionParams&, const DeviceInfo&);

// Whether mma_sm80, which starts faster, is the faster kernel for a call of few queries and keys in 16 bits.
bool mma_wins_short_calls(const AttentionParams&, const DeviceInfo&);

const char* key_sums_refuses(const AttentionParams&, const DeviceInfo&, char* text, size_t size);
fa_status launch_key_sums(const AttentionParams&, const DeviceInfo&, void* stream);   // from the lse of a forward kernel
fa_status clear_statistics(const AttentionParams&, const DeviceInfo&, void* stream);  // for a call without queries, which runs no kernel
// dbias and dsinks, which no kernel of a GPU gives: from out, lse and dout, after the kernel. Its workspace follows the kernel's.
const char* scores_refuse(const BackwardParams&, const DeviceInfo&, char* text, size_t size);
size_t scores_workspace(const BackwardParams&, const DeviceInfo&);
fa_status launch_scores(const BackwardParams&, const DeviceInfo&, void* stream);
fa_status launch_append(const AppendParams&, const DeviceInfo&, void* stream);  // for a call with keys to append or a q to rotate
fa_status launch_merge(const MergeParams&, fa_device device, void* stream);
fa_status launch_quantize(const QuantizeParams&, fa_device device, void* stream);

}  // namespace fa
