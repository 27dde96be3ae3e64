// w4.cpp: the exported functions of 4-bit weights: validate, find the device, choose a kernel (for products), launch.
#include <algorithm>

#include "api/common/dispatch.h"
#include "api/common/serve.h"
#include "api/transformer/registry.h"
#include "api/transformer/validate.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"
#include "flash_attn_transformer.h"

#if FA_WITH_CUDA
#include "transformer/w4/kernels.h"
#endif

namespace fa {
namespace {

void on_cpu(const W4QuantizeParams& p) { cpu::w4_quantize(p); }
void on_cpu(const W4DequantizeParams& p) { cpu::w4_dequantize(p); }
void on_cpu(const W4PackParams& p) { cpu::w4_pack(p); }

#if FA_WITH_CUDA
fa_status on_gpu(const W4QuantizeParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return launched("w4_quantize", w4_quantize(p, device, stream));
}
fa_status on_gpu(const W4DequantizeParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return launched("w4_dequantize", w4_dequantize(p, device, stream));
}
fa_status on_gpu(const W4PackParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return launched("w4_pack", w4_pack(p, device, stream));
}
#endif

// The array `data`, which is the argument called `name`, decides which GPU runs the call.
template <typename Params>
fa_status run(const Params& params, int32_t device, int32_t num_threads, const char* name, const void* data,
              [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(fa_device(device), data, &info, name); status != FA_OK) return status;
    if (device == FA_CPU) {
        const cpu::GivenThreads threads(threads_are_given(num_threads));
        return on_host([&] { on_cpu(params); });
    }
#if FA_WITH_CUDA
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return on_gpu(params, info, static_cast<cudaStream_t>(stream));
#else
    return FA_UNSUPPORTED;
#endif
}

// Plans divide by the number of rows. A call without rows is never launched, but may be queried; it then gets the plan of one row.
W4LinearParams with_rows(W4LinearParams p) {
    if (p.rows == 0) p.rows = 1;
    return p;
}
W4ChainParams with_rows(W4ChainParams chain) {
    for (W4LinearParams& p : chain.products) p = with_rows(p);
    return chain;
}

// A call with a choice of kernels: its checked arguments and everything that a launch needs.
template <typename Args, typename Params>
struct Call {
    Args args;
    Params params;
    DeviceInfo device;
    const KernelOf<Params, OnGpus>* kernel = nullptr;

    size_t workspace() const {
        const size_t bytes = workspace_of(*kernel, with_rows(params), device);
        return bytes ? bytes + kAlign : 0;
    }

    fa_status launch(void* stream) {
        const size_t bytes = workspace();
        if (bytes > args.workspace_bytes || (bytes && !args.workspace))
            return fail(FA_WORKSPACE_TOO_SMALL, "workspace_bytes=%zu (workspace=%p), but kernel %s needs %zu: ask its query",
                        args.workspace_bytes, args.workspace, kernel->name, bytes);
        if (bytes)
            if (const fa_status status = check_workspace_apart(args.workspace, params, bytes); status != FA_OK) return status;
        if (bytes) give(params, align_up(args.workspace, kAlign), int64_t(bytes - kAlign));
        const cpu::GivenThreads threads(device.index < 0 && threads_are_given(num_threads(args)));
        const CurrentDevice scope(device.index);
        if (scope.status() != FA_OK) return scope.status();
        return fa::launch(*kernel, params, device, stream);
    }

private:
    static constexpr size_t kAlign = 128;
    static int32_t num_threads(const fa_w4_linear_args& a) { return a.num_threads; }
    static int32_t num_threads(const fa_w4_linear_chain_args& a) { return a.products->num_threads; }
    static void give(W4LinearParams& p, void* workspace, int64_t bytes) { p.workspace = workspace, p.workspace_bytes = bytes; }
    static void give(W4ChainParams& chain, void* workspace, int64_t bytes) {
        for (W4LinearParams& p : chain.products) give(p, workspace, bytes);
    }
};

struct LinearCall : Call<fa_w4_linear_args, W4LinearParams> {
    fa_status prepare(const fa_w4_linear_args* given, Pointers pointers, Lines* why_not) {
        if (const fa_status status = validate(given, pointers, &args, &params); status != FA_OK) return status;
        if (const fa_status status = find_device(fa_device(args.device), args.x.data, &device, "x"); status != FA_OK) return status;
        params.programmatic = params.programmatic && device.compute >= 90;
        return choose(args.kernel, args.device, with_rows(params), device, linear_kernels(), kLinearVariable, &kernel, why_not);
    }
};

struct ChainCall : Call<fa_w4_linear_chain_args, W4ChainParams> {
    fa_status prepare(const fa_w4_linear_chain_args* given, Pointers pointers, Lines* why_not) {
        if (const fa_status status = validate(given, pointers, &args, &params); status != FA_OK) return status;
        const int32_t place = args.products->device;
        for (int i = params.count - 1; i >= 0; --i) {
            DeviceInfo other;
            if (const fa_status status = find_device(fa_device(place), params.products[i].x.data, &other, "x"); status != FA_OK)
                return status;
            if (i < params.count - 1 && other.index != device.index)
                return fail(FA_BAD_ARGUMENT, "products[%d].x is on device %d, but products[%d].x on %d", i, other.index, i + 1,
                            device.index);
            device = other;
            params.products[i].programmatic = params.products[i].programmatic && device.compute >= 90;
        }
        return choose(args.kernel, place, with_rows(params), device, chain_kernels(), "FLASH_ATTN_CHAIN_KERNEL", &kernel, why_not);
    }

    bool empty() const {
        return std::all_of(params.products, params.products + params.count, [](const W4LinearParams& p) { return p.rows == 0; });
    }
};

}  // namespace
}  // namespace fa

extern "C" {

fa_status fa_w4_quantize(const fa_w4_quantize_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::W4QuantizeParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "w", p.w.data, stream);
}

fa_status fa_w4_dequantize(const fa_w4_dequantize_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::W4DequantizeParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "codes", p.weight.codes, stream);
}

fa_status fa_w4_packed_bytes(int32_t format, int32_t out_features, int32_t in_features, int32_t pair, int64_t* bytes) {
    return fa::packed_bytes(format, out_features, in_features, pair, bytes);
}

fa_status fa_w4_pack(const fa_w4_pack_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::W4PackParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "codes", p.weight.codes, stream);
}

fa_status fa_w4_linear(const fa_w4_linear_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::LinearCall call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    return call.params.rows == 0 ? FA_OK : call.launch(stream);
}

fa_status fa_w4_linear_query(const fa_w4_linear_args* args, fa_attention_plan* plan) { return fa::query<fa::LinearCall>(args, plan); }

fa_status fa_w4_linear_chain(const fa_w4_linear_chain_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::ChainCall call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    return call.empty() ? FA_OK : call.launch(stream);
}

fa_status fa_w4_linear_chain_query(const fa_w4_linear_chain_args* args, fa_attention_plan* plan) {
    return fa::query<fa::ChainCall>(args, plan);
}

FA_KERNEL_TABLE(fa_chain_kernel, fa::chain_kernels())
FA_KERNEL_TABLE(fa_linear_kernel, fa::linear_kernels())

}  // extern "C"
