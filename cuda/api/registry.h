// registry.h: every kernel of this build, best first on each device, and what each can serve.
#pragma once

#include <cstddef>

#include "attention/params.h"
#include "attention/quantize_fp8.h"
#include "flash_attn.h"
#include "linear/linear.h"
#include "ops/ops.h"

namespace fa {

struct DeviceInfo {
    int index;    // CUDA device, -1 for the CPU
    int compute;  // 90 for sm_90
    int multiprocessors;
    size_t shared_memory;  // bytes one block can opt in to
};

template <typename Params>
struct KernelOf {
    const char* name;
    const char* summary;
    fa_device device;
    // nullptr when the kernel serves the call on that device, else the reason; `text` is room for one that quotes values.
    const char* (*refuses)(const Params&, const DeviceInfo&, char* text, size_t size);
    size_t (*workspace)(const Params&, const DeviceInfo&);
    // Returns FA_OK or records the error.
    fa_status (*launch)(const Params&, const DeviceInfo&, void* stream);
    // nullptr, or why a kernel further down the list, which serves the call too, is the faster one; not asked of a forced kernel.
    const char* (*yields)(const Params&, const DeviceInfo&, char* text, size_t size) = nullptr;
    // A call over a cache that the kernel serves whole, appending and turning included; nullptr, or false: launch_append comes first.
    bool (*appends)(const AppendParams&, const DeviceInfo&) = nullptr;
    fa_status (*launch_whole)(const AppendParams&, const DeviceInfo&, void* stream) = nullptr;
};

using Kernel = KernelOf<AttentionParams>;
using BackwardKernel = KernelOf<BackwardParams>;
using LinearKernel = KernelOf<W4LinearParams>;  // products with 4-bit weights
using ChainKernel = KernelOf<W4ChainParams>;    // several of them
using DenseLinearKernel = KernelOf<LinearParams>;

int kernel_count();
const Kernel* kernel_at(int index);  // nullptr outside 0 .. kernel_count() - 1
int decode_kernel_count();           // those of kernel_at that attend with few rows to many keys: they come first
const Kernel* decode_kernel_at(int index);
int backward_kernel_count();
const BackwardKernel* backward_kernel_at(int index);
int linear_kernel_count();
const LinearKernel* linear_kernel_at(int index);
int chain_kernel_count();
const ChainKernel* chain_kernel_at(int index);
int dense_linear_kernel_count();
const DenseLinearKernel* dense_linear_kernel_at(int index);
constexpr char kLinearVariable[] = "FLASH_ATTN_LINEAR_KERNEL";  // the environment forces a kernel of single products

// The device that runs the call; for CUDA the one owning `data`, the argument of that name (the current one when it is null).
fa_status find_device(fa_device device, const void* data, DeviceInfo* info, const char* name = "q");

// Makes a device, and a context of it, current for the enclosing scope, when they are not already: a thread that has not used CUDA yet has
// a device but no context, without which tensor maps cannot be made. Every launch on a GPU is inside such a scope.
class CurrentDevice {
public:
    explicit CurrentDevice(int index);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    fa_status status() const { return status_; }

private:
    int previous_ = -1;
    fa_status status_ = FA_OK;
};

fa_status launch_append(const AppendParams&, const DeviceInfo&, void* stream);  // of a call with something to append or to turn
fa_status launch_merge(const MergeParams&, fa_device device, void* stream);
fa_status launch_quantize(const QuantizeParams&, fa_device device, void* stream);
int cuda_device_count();

}  // namespace fa
