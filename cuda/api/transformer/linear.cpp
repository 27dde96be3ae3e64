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

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
const char* small_refuses(const LinearParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (linear_small_serves(p, device)) return nullptr;
    return say(text, size, "rows=%lld of %d x %d: it takes one row, rows of whole 16 bytes, and a matrix that the GPU's registers hold",
               static_cast<long long>(p.rows), p.out_features, p.in_features);
}
const char* mma_refuses(const LinearParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (linear_mma_serves(p, device)) return nullptr;
    return say(text, size,
               "rows=%lld of %d x %d: it takes two to eight rows of whole 16 bytes, a weight of 16 bits, and a matrix that the GPU's "
               "registers hold",
               static_cast<long long>(p.rows), p.out_features, p.in_features);
}
const char* gemv_refuses(const LinearParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (linear_gemv_fits(p, device)) return nullptr;
    return say(text, size, "in_features=%d: a row of x does not fit into the %zu bytes of shared memory", p.in_features,
               device.shared_memory);
}
bool small_fits(const LinearParams& p, const DeviceInfo& device) { return linear_small_blocks(p, device) <= kMostBlocks; }
bool mma_fits(const LinearParams& p, const DeviceInfo& device) { return linear_mma_blocks(p, device) <= kMostBlocks; }
bool gemv_fits(const LinearParams& p, const DeviceInfo& device) { return linear_gemv_blocks(p, device) <= kMostBlocks; }
#endif

constexpr DenseLinearKernel kKernels[] = {
    {.name = "linear_small_sm80",
     .summary = "one row; weights in registers before x is there",
     .device = FA_CUDA,
     .limits = {kFromSm80},
     .refuses = FA_SM80(small_refuses),
     .fits = FA_SM80(small_fits),
     .launch = FA_SM80(linear_small)},
    {.name = "linear_mma_sm80",
     .summary = "two to eight rows on mma.sync; weights in registers before x is there",
     .device = FA_CUDA,
     .limits = {kFromSm80},
     .refuses = FA_SM80(mma_refuses),
     .fits = FA_SM80(mma_fits),
     .launch = FA_SM80(linear_mma)},
    {.name = "linear_gemv_sm80",
     .summary = "any rows and types; the weight streams once for a few rows at a time",
     .device = FA_CUDA,
     .limits = {kFromSm80},
     .refuses = FA_SM80(gemv_refuses),
     .fits = FA_SM80(gemv_fits),
     .launch = FA_SM80(linear_gemv)},
    {.name = "cpu", .summary = "threads and vectors, any number of rows", .device = FA_CPU, .limits = {kAnyGpu}, .run = cpu::linear},
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
        return choose(args.kernel, args.device, planned, device, dense_linear_kernels(), "FLASH_ATTN_DENSE_LINEAR_KERNEL", &kernel,
                      why_not);
    }
    size_t workspace() const { return 0; }
};

}  // namespace

Table<DenseLinearKernel> dense_linear_kernels() { return table_of(kKernels); }

}  // namespace fa

extern "C" {

fa_status fa_linear(const fa_linear_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::Call call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    if (call.params.rows == 0) return FA_OK;
    const fa::cpu::GivenThreads threads(call.device.index < 0 && fa::threads_are_given(call.args.num_threads));
    const fa::CurrentDevice scope(call.device.index);
    return scope.status() != FA_OK ? scope.status() : fa::launch(*call.kernel, call.params, call.device, stream);
}

fa_status fa_linear_query(const fa_linear_args* args, fa_attention_plan* plan) { return fa::query<fa::Call>(args, plan); }

FA_KERNEL_TABLE(fa_dense_linear_kernel, fa::dense_linear_kernels())

}  // extern "C"
