// linear.cpp: fa_linear: the table of its kernels, best first on each device, what each refuses, and the exported functions.
#include <cstdio>

#include "api/common/dispatch.h"
#include "api/common/serve.h"
#include "api/transformer/registry.h"
#include "api/transformer/validate.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"
#include "flash_attn_transformer.h"

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
#include "transformer/ops/kernels.h"
#endif

namespace fa {
namespace {

size_t no_workspace(const LinearParams&, const DeviceInfo&) { return 0; }
const char* cpu_refuses(const LinearParams&, const DeviceInfo&, char*, size_t) { return nullptr; }
fa_status cpu_launch(const LinearParams& p, const DeviceInfo&, void*) {
    return on_host([&] { cpu::linear(p); });
}

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
const char* small_refuses(const LinearParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = needs_sm80(device, text, size)) return reason;
    if (linear_small_serves(p, device)) return nullptr;
    return say(text, size, "rows=%lld of %d x %d: it takes one row, rows of whole 16 bytes, and a matrix that the GPU's registers hold",
               static_cast<long long>(p.rows), p.out_features, p.in_features);
}
const char* mma_refuses(const LinearParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = needs_sm80(device, text, size)) return reason;
    if (linear_mma_serves(p, device)) return nullptr;
    return say(text, size,
               "rows=%lld of %d x %d: it takes two to eight rows of whole 16 bytes, a weight of 16 bits, and a matrix that the GPU's "
               "registers hold",
               static_cast<long long>(p.rows), p.out_features, p.in_features);
}
const char* gemv_refuses(const LinearParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = needs_sm80(device, text, size)) return reason;
    if (linear_gemv_fits(p, device)) return nullptr;
    return say(text, size, "in_features=%d: a row of x does not fit into the %zu bytes of shared memory", p.in_features,
               device.shared_memory);
}
fa_status small_launch(const LinearParams& p, const DeviceInfo& device, void* stream) {
    return start("linear_small_sm80", linear_small_blocks(p, device),
                 [&] { return linear_small(p, device, static_cast<cudaStream_t>(stream)); });
}
fa_status mma_launch(const LinearParams& p, const DeviceInfo& device, void* stream) {
    return start("linear_mma_sm80", linear_mma_blocks(p, device), [&] { return linear_mma(p, device, static_cast<cudaStream_t>(stream)); });
}
fa_status gemv_launch(const LinearParams& p, const DeviceInfo& device, void* stream) {
    return start("linear_gemv_sm80", linear_gemv_blocks(p, device),
                 [&] { return linear_gemv(p, device, static_cast<cudaStream_t>(stream)); });
}
#endif

constexpr DenseLinearKernel kKernels[] = {
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    {"linear_small_sm80", "one row; weights in registers before x is there", FA_CUDA, small_refuses, no_workspace, small_launch},
    {"linear_mma_sm80", "two to eight rows on mma.sync; weights in registers before x is there", FA_CUDA, mma_refuses, no_workspace,
     mma_launch},
    {"linear_gemv_sm80", "any rows and types; the weight streams once for a few rows at a time", FA_CUDA, gemv_refuses, no_workspace,
     gemv_launch},
#endif
    {"cpu", "threads and vectors, any number of rows", FA_CPU, cpu_refuses, no_workspace, cpu_launch},
};

struct Call {
    fa_linear_args args;
    LinearParams params;
    DeviceInfo device;
    const DenseLinearKernel* kernel = nullptr;

    fa_status prepare(const fa_linear_args* given, Pointers pointers, Lines* why_not) {
        if (const fa_status status = validate(given, pointers, &args, &params); status != FA_OK) return status;
        if (const fa_status status = find_device(fa_device(args.device), args.x.data, &device, "x"); status != FA_OK) return status;
        params.programmatic = params.programmatic && device.compute >= 90;
        LinearParams planned = params;  // plans divide by the number of rows, so it must not be 0
        if (planned.rows == 0) planned.rows = 1;
        return choose(args.kernel, args.device, planned, device, dense_linear_kernel_at, "FLASH_ATTN_DENSE_LINEAR_KERNEL", &kernel,
                      why_not);
    }
    size_t workspace() const { return 0; }
};

}  // namespace

int dense_linear_kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const DenseLinearKernel* dense_linear_kernel_at(int index) {
    return index >= 0 && index < dense_linear_kernel_count() ? &kKernels[index] : nullptr;
}

}  // namespace fa

extern "C" {

fa_status fa_linear(const fa_linear_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::Call call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    if (call.params.rows == 0) return FA_OK;
    const fa::cpu::GivenThreads threads(call.device.index < 0 && fa::threads_are_given(call.args.num_threads));
    const fa::CurrentDevice scope(call.device.index);
    return scope.status() != FA_OK ? scope.status() : call.kernel->launch(call.params, call.device, stream);
}

fa_status fa_linear_query(const fa_linear_args* args, fa_attention_plan* plan) { return fa::query<fa::Call>(args, plan); }

int32_t fa_dense_linear_kernel_count(void) { return fa::dense_linear_kernel_count(); }
const char* fa_dense_linear_kernel_name(int32_t i) { return fa::dense_linear_kernel_at(i) ? fa::dense_linear_kernel_at(i)->name : nullptr; }
const char* fa_dense_linear_kernel_summary(int32_t i) {
    return fa::dense_linear_kernel_at(i) ? fa::dense_linear_kernel_at(i)->summary : nullptr;
}
int32_t fa_dense_linear_kernel_device(int32_t i) { return fa::dense_linear_kernel_at(i) ? fa::dense_linear_kernel_at(i)->device : 0; }

}  // extern "C"
