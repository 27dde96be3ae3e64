// variants.cpp: the C ABI of experiments.h: the table, the checks of a call, and the steps that are kernels of the library itself.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "api/attention/limits.h"
#include "api/attention/validate.h"
#include "api/common/device.h"
#include "api/common/serve.h"
#include "api/common/status.h"
#include "device/launch.h"
#include "ladder/variants/variant.h"

namespace fa {
namespace {

// A step of a climb that is a kernel of the library.
Variant library_step(const char* name, const char* kernel, int order, bool backward, int compute, const char* about) {
    Variant v;
    v.name = name, v.experiment = "optimisation", v.kernel = kernel, v.about = about, v.order = order, v.backward = backward;
    v.compute = compute, v.stages = 0;
    return v;
}

const Variants& table() {
    static const Variants variants = [] {
        Variants all;
        all.push_back(library_step("forward_01_naive", "naive", 1, false, 0, "three steps, S in memory: the library's naive"));
        add_cuda_core_variants(&all);
#if FA_WITH_MMA_SM80
        add_mma_tile_variants_d64(&all), add_mma_tile_variants_d128(&all), add_mma_climb_variants(&all);
        all.push_back(library_step("forward_09_mma_sm80", "mma_sm80", 9, false, 80,
                                   "exponentials between the products, last rows first, heads in sections of L2: the library's mma_sm80"));
#endif
#if FA_WITH_WGMMA_SM90
        add_wgmma_tile_variants_d64(&all), add_wgmma_tile_variants_d128(&all), add_wgmma_climb_variants(&all), add_trace_variants(&all);
        all.push_back(library_step("forward_21_wgmma_sm90", "wgmma_sm90", 21, false, 90,
                                   "the plan that suits the call's length: the library's wgmma_sm90"));
#endif
        all.push_back(library_step("backward_01_simple", "simple", 1, true, 0, "CUDA cores, two passes: the library's simple"));
#if FA_WITH_MMA_SM80
        add_backward_mma_variants(&all);
#endif
#if FA_WITH_WGMMA_SM90
        add_backward_wgmma_variants(&all);
#endif
        return all;
    }();
    return variants;
}

const Variant* find(const char* name) {
    for (const Variant& v : table())
        if (name && v.name == name) return &v;
    fail(FA_BAD_ARGUMENT, "name=%s: no variant of that name", name ? name : "NULL");
    return nullptr;
}

// The reason why a variant does not serve a call on any GPU, or nullptr.
template <typename Params>
const char* refuses(const Variant& v, const Params& params, const AttentionParams& p, char* text, size_t size) {
    if (p.headdim != v.headdim || p.headdim_v != v.headdim)
        return say(text, size, "headdim=%d, headdim_v=%d: it is compiled for %d", p.headdim, p.headdim_v, v.headdim);
    const Limits limits = {.dtypes = one(DType::kBFloat16),
                           .takes = kHints | (v.backward ? kMaxScore | kKeySums : 0),
                           .memory = v.copies ? Memory::kTensorMaps : Memory::kWideRows};
    if (const char* reason = limits.refuses(features_of(p), params, DeviceInfo{}, text, size).reason) return reason;
    if (const char* reason = limits.misplaces(params, text, size)) return reason;
    if (v.aligned_workspace && reinterpret_cast<uintptr_t>(p.workspace) % 16)
        return say(text, size, "workspace=%p is not aligned to 16 bytes", p.workspace);
    const int64_t blocks = ceil_div(p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k, 16) * p.nheads * p.batch;
    return blocks <= kMostBlocks ? nullptr : Limits::too_large(p, text, size);
}

// The status of a call of the library; the library's error text becomes this library's.
fa_status from_library(fa_status status) { return status == FA_OK ? FA_OK : fail(status, "%s", fa_last_error()); }

fa_attention_args forced(const fa_attention_args& args, const Variant& v) {
    fa_attention_args copy = args;
    copy.kernel = v.kernel.c_str();
    return copy;
}

// The checked arguments of a launch.
template <typename Params>
struct Call {
    fa_attention_args forward;
    Params params;
    DeviceInfo device;

    template <typename Args>
    fa_status prepare(const Variant& v, const Args* args, Pointers pointers) {
        if (const fa_status status = validate(args, pointers, &forward, &params); status != FA_OK) return status;
        if (forward.device != FA_CUDA)
            return fail(FA_UNSUPPORTED, "%s: device=%d: it takes arrays of a GPU", v.name.c_str(), forward.device);
        char text[256];
        if (const char* reason = refuses(v, params, attention(params), text, sizeof text))
            return fail(FA_UNSUPPORTED, "%s: %s", v.name.c_str(), reason);
        if (const fa_status status = find_device(FA_CUDA, forward.q.data, &device); status != FA_OK) return status;
        const Gpus gpus = v.compute == 90 ? kHopper : Gpus{v.compute, kAnyGpu.most};
        const char* const reason = outside(gpus, device, text, sizeof text).reason;
        return reason ? fail(FA_UNSUPPORTED, "%s: %s", v.name.c_str(), reason) : FA_OK;
    }
    size_t workspace(const Variant& v) const { return v.workspace(attention(params), device.multiprocessors); }
    fa_status has_workspace(const Variant& v) const {
        const size_t bytes = workspace(v);
        if (bytes <= forward.workspace_bytes && (!bytes || forward.workspace)) return FA_OK;
        return fail(FA_WORKSPACE_TOO_SMALL, "workspace_bytes=%zu (workspace=%p), but %s needs %zu", forward.workspace_bytes,
                    forward.workspace, v.name.c_str(), bytes);
    }

    static const AttentionParams& attention(const AttentionParams& p) { return p; }
    static const AttentionParams& attention(const BackwardParams& b) { return b.forward; }
};

// Gradients that a variant cannot give.
fa_status refuse_gradients(const Variant& v, const BackwardParams& b) {
    const char* reason = nullptr;
    if (b.deterministic) reason = "deterministic=1: its sums of dq depend on timing";
    if (b.dbias.data || b.dsinks) reason = "gives no dbias and no dsinks";
    return reason ? fail(FA_UNSUPPORTED, "%s: %s", v.name.c_str(), reason) : FA_OK;
}

fa_status wrong_pass(const Variant& v) {
    return fail(FA_UNSUPPORTED, "%s is a variant of the %s pass", v.name.c_str(), v.backward ? "backward" : "forward");
}

}  // namespace
}  // namespace fa

extern "C" {

int32_t fa_variant_count(void) { return int32_t(fa::table().size()); }

fa_status fa_variant_get(int32_t index, int32_t device, fa_variant* variant) {
    using fa::fail;
    if (index < 0 || index >= fa_variant_count()) return fail(FA_BAD_ARGUMENT, "index=%d of %d variants", index, fa_variant_count());
    if (!variant) return fail(FA_BAD_ARGUMENT, "variant is NULL");
    if (variant->struct_size != sizeof *variant)
        return fail(FA_BAD_ARGUMENT, "variant.struct_size=%zu, but fa_variant has %zu bytes", variant->struct_size, sizeof *variant);
    const fa::Variant& v = fa::table()[size_t(index)];
    *variant = {};
    variant->struct_size = sizeof *variant;
    variant->name = v.name.c_str(), variant->experiment = v.experiment.c_str(), variant->kernel = v.kernel.c_str();
    variant->about = v.about.c_str(), variant->order = v.order, variant->backward = v.backward, variant->headdim = v.headdim;
    variant->tile_m = v.tile_m, variant->tile_n = v.tile_n, variant->stages = v.stages, variant->threads = v.threads;
    variant->shared_bytes = int32_t(v.shared_bytes), variant->compute = v.compute;
    if (device < 0 || !v.function) return FA_OK;
    const fa::CurrentDevice scope(device);
    if (scope.status() != FA_OK) return scope.status();
    cudaFuncAttributes found{};
    int blocks = 0;
    cudaError_t error = cudaFuncGetAttributes(&found, v.function);
    if (error == cudaSuccess && v.shared_bytes > 48 * 1024) error = fa::grant_shared(v.function);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, v.function, v.threads, v.shared_bytes);
    if (error != cudaSuccess) {  // a kernel of another GPU: what is known without one stands
        cudaGetLastError();
        return fail(FA_UNSUPPORTED, "%s on device %d: %s", v.name.c_str(), device, cudaGetErrorString(error));
    }
    variant->registers = found.numRegs, variant->spill_bytes = int32_t(found.localSizeBytes), variant->blocks_per_sm = blocks;
    return FA_OK;
}

fa_status fa_variant_forward(const char* name, const fa_attention_args* args, void* stream) {
    const fa::Variant* v = fa::find(name);
    if (!v) return FA_BAD_ARGUMENT;
    if (v->backward) return fa::wrong_pass(*v);
    if (!v->function) {
        if (!args || args->struct_size != sizeof *args) return fa::from_library(fa_attention_forward(args, stream));
        const fa_attention_args copy = fa::forced(*args, *v);
        return fa::from_library(fa_attention_forward(&copy, stream));
    }
    fa::Call<fa::AttentionParams> call;
    if (const fa_status status = call.prepare(*v, args, fa::Pointers::kRequired); status != FA_OK) return status;
    if (call.params.batch == 0 || call.params.seqlen_q == 0) return FA_OK;
    if (const fa_status status = call.has_workspace(*v); status != FA_OK) return status;
    const fa::CurrentDevice scope(call.device.index);
    if (scope.status() != FA_OK) return scope.status();
    return fa::launched(v->name.c_str(), v->launch(call.params, call.device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

fa_status fa_variant_backward(const char* name, const fa_attention_backward_args* args, void* stream) {
    const fa::Variant* v = fa::find(name);
    if (!v) return FA_BAD_ARGUMENT;
    if (!v->backward) return fa::wrong_pass(*v);
    if (!v->function) {
        if (!args || args->struct_size != sizeof *args || !args->forward) return fa::from_library(fa_attention_backward(args, stream));
        const fa_attention_args forward = fa::forced(*args->forward, *v);
        fa_attention_backward_args copy = *args;
        copy.forward = &forward;
        return fa::from_library(fa_attention_backward(&copy, stream));
    }
    fa::Call<fa::BackwardParams> call;
    if (const fa_status status = call.prepare(*v, args, fa::Pointers::kRequired); status != FA_OK) return status;
    if (const fa_status status = fa::refuse_gradients(*v, call.params); status != FA_OK) return status;
    if (call.params.forward.batch == 0 || call.params.forward.seqlen_q == 0)
        return fa::fail(FA_UNSUPPORTED, "%s: batch=%d, seqlen_q=%d: there are no queries to load", name, call.params.forward.batch,
                        call.params.forward.seqlen_q);
    if (const fa_status status = call.has_workspace(*v); status != FA_OK) return status;
    const fa::CurrentDevice scope(call.device.index);
    if (scope.status() != FA_OK) return scope.status();
    return fa::launched(v->name.c_str(), v->launch_backward(call.params, call.device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

fa_status fa_variant_workspace(const char* name, const fa_attention_args* args, size_t* bytes) {
    const fa::Variant* v = fa::find(name);
    if (!v) return FA_BAD_ARGUMENT;
    if (!bytes) return fa::fail(FA_BAD_ARGUMENT, "bytes is NULL");
    *bytes = 0;
    if (!v->function) {
        fa_attention_plan plan{};
        plan.struct_size = sizeof plan;
        fa_status status;
        if (!args || args->struct_size != sizeof *args) {
            status = fa_attention_query(args, &plan);
        } else {
            const fa_attention_args forward = fa::forced(*args, *v);
            if (v->backward) {
                fa_attention_backward_args backward{};
                backward.struct_size = sizeof backward;
                backward.forward = &forward;
                backward.dout = forward.out, backward.dq = forward.q, backward.dk = forward.k, backward.dv = forward.v;
                for (fa_tensor* view : {&backward.dout, &backward.dq, &backward.dk, &backward.dv}) view->data = nullptr;  // sizes alone
                status = fa_attention_backward_query(&backward, &plan);
            } else {
                status = fa_attention_query(&forward, &plan);
            }
        }
        *bytes = plan.workspace_bytes;
        return fa::from_library(status);
    }
    fa::Call<fa::AttentionParams> call;
    if (const fa_status status = call.prepare(*v, args, fa::Pointers::kOptional); status != FA_OK) return status;
    *bytes = call.workspace(*v);
    return FA_OK;
}

const char* fa_variant_last_error(void) { return fa::last_error(); }

}  // extern "C"
