// flash_attn.cpp: the exported functions. Validate, choose a kernel, check the workspace, launch.
#include "flash_attn.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "registry.h"
#include "status.h"
#include "validate.h"

#define FA_STRINGIFY_(x) #x
#define FA_STRINGIFY(x) FA_STRINGIFY_(x)

namespace fa {
namespace {

// A fixed text buffer that takes as many whole lines as fit.
class Lines {
public:
    Lines(char* text, size_t size) : text_(text), left_(size) {
        if (left_) *text_ = '\0';
    }
    void add(const char* name, const char* reason) {
        const int n = std::snprintf(text_, left_, "%s%s: %s", first_ ? "" : "\n", name, reason);
        if (n < 0 || size_t(n) >= left_) {
            if (left_) *text_ = '\0';
            left_ = 0;
            return;
        }
        text_ += n, left_ -= size_t(n), first_ = false;
    }

private:
    char* text_;
    size_t left_;
    bool first_ = true;
};

// The kernel that serves the call, and why not the ones preferred to it.
fa_status choose(const fa_attention_args& args, const AttentionParams& params, const DeviceInfo& device, const Kernel** chosen,
                 Lines* why_not) {
    const char* forced = args.kernel;
    const char* source = "kernel";
    if (!forced) {
        forced = std::getenv("FLASH_ATTN_KERNEL");
        source = "FLASH_ATTN_KERNEL";
        if (forced && !*forced) forced = nullptr;
    }
    char text[256];
    const char *last = "", *last_reason = "there is none for this device";
    bool known = false;
    for (int i = 0; i < kernel_count(); ++i) {
        const Kernel& kernel = *kernel_at(i);
        if (forced && std::strcmp(forced, kernel.name) != 0) {
            if (kernel.device == args.device && why_not) why_not->add(kernel.name, "another kernel is forced");
            continue;
        }
        known = true;
        if (kernel.device != args.device) {
            if (!forced) continue;
            return fail(FA_UNSUPPORTED, "%s=%s runs on %s, but device is %s", source, forced, kernel.device == FA_CPU ? "the CPU" : "a GPU",
                        args.device == FA_CPU ? "FA_CPU" : "FA_CUDA");
        }
        const char* reason = kernel.refuses(params, device, text, sizeof text);
        if (!reason) {
            *chosen = &kernel;
            return FA_OK;
        }
        if (forced) return fail(FA_UNSUPPORTED, "%s=%s cannot serve this call: %s", source, forced, reason);
        if (why_not) why_not->add(kernel.name, reason);
        last = kernel.name, last_reason = reason;
    }
    if (forced && !known) return fail(FA_BAD_ARGUMENT, "%s=%s is not a kernel of this build", source, forced);
    // The most general kernel comes last: what keeps it from serving the call is what keeps the call from being served.
    return fail(FA_UNSUPPORTED, "no kernel of this build serves the call on %s; %s: %s", args.device == FA_CPU ? "FA_CPU" : "FA_CUDA", last,
                last_reason);
}

fa_status prepare(const fa_attention_args* args, Pointers pointers, fa_attention_args* full, AttentionParams* params, DeviceInfo* device,
                  const Kernel** kernel, Lines* why_not) {
    if (const fa_status status = validate(args, pointers, full, params); status != FA_OK) return status;
    if (const fa_status status = find_device(fa_device(full->device), full->q.data, device); status != FA_OK) return status;
    return choose(*full, *params, *device, kernel, why_not);
}

}  // namespace
}  // namespace fa

extern "C" {

fa_status fa_attention_forward(const fa_attention_args* args, void* stream) {
    fa_attention_args full;
    fa::AttentionParams params;
    fa::DeviceInfo device;
    const fa::Kernel* kernel = nullptr;
    if (const fa_status status = fa::prepare(args, fa::Pointers::kRequired, &full, &params, &device, &kernel, nullptr); status != FA_OK)
        return status;
    if (params.batch == 0 || params.seqlen_q == 0 || (params.cu_seqlens_q && params.total_q == 0)) return FA_OK;
    const size_t bytes = kernel->workspace(params, device);
    if (bytes > full.workspace_bytes || (bytes && !full.workspace))
        return fa::fail(FA_WORKSPACE_TOO_SMALL, "workspace_bytes=%zu (workspace=%p), but kernel %s needs %zu: ask fa_attention_query",
                        full.workspace_bytes, full.workspace, kernel->name, bytes);
    const fa::CurrentDevice scope(device.index);
    return kernel->launch(params, device, stream);
}

fa_status fa_attention_query(const fa_attention_args* args, fa_attention_plan* plan) {
    if (!plan || plan->struct_size < sizeof(fa_attention_plan))
        return fa::fail(FA_BAD_ARGUMENT, "plan is NULL or plan.struct_size is not sizeof(fa_attention_plan) = %zu",
                        sizeof(fa_attention_plan));
    plan->reserved = 0;
    plan->workspace_bytes = 0;
    plan->kernel[0] = '\0';
    fa::Lines why_not(plan->why_not, sizeof plan->why_not);
    fa_attention_args full;
    fa::AttentionParams params;
    fa::DeviceInfo device;
    const fa::Kernel* kernel = nullptr;
    const fa_status status = fa::prepare(args, fa::Pointers::kOptional, &full, &params, &device, &kernel, &why_not);
    plan->status = status;
    if (status != FA_OK) return status;
    std::snprintf(plan->kernel, sizeof plan->kernel, "%s", kernel->name);
    plan->workspace_bytes = kernel->workspace(params, device);
    return FA_OK;
}

fa_status fa_attention_merge(const fa_merge_args* args, void* stream) {
    fa::MergeParams params;
    if (const fa_status status = fa::validate(args, &params); status != FA_OK) return status;
    return fa::launch_merge(params, fa_device(args->device), stream);
}

fa_status fa_quantize_fp8(const fa_quantize_args* args, void* stream) {
    fa::QuantizeParams params;
    if (const fa_status status = fa::validate(args, &params); status != FA_OK) return status;
    return fa::launch_quantize(params, fa_device(args->device), stream);
}

int32_t fa_kernel_count(void) { return fa::kernel_count(); }
const char* fa_kernel_name(int32_t index) { return fa::kernel_at(index) ? fa::kernel_at(index)->name : nullptr; }
const char* fa_kernel_summary(int32_t index) { return fa::kernel_at(index) ? fa::kernel_at(index)->summary : nullptr; }
int32_t fa_kernel_device(int32_t index) { return fa::kernel_at(index) ? fa::kernel_at(index)->device : 0; }

const char* fa_status_name(fa_status status) {
    switch (status) {
        case FA_OK: return "FA_OK";
        case FA_BAD_ARGUMENT: return "FA_BAD_ARGUMENT";
        case FA_UNSUPPORTED: return "FA_UNSUPPORTED";
        case FA_WORKSPACE_TOO_SMALL: return "FA_WORKSPACE_TOO_SMALL";
        case FA_CUDA_ERROR: return "FA_CUDA_ERROR";
        case FA_OUT_OF_MEMORY: return "FA_OUT_OF_MEMORY";
    }
    return "unknown status";
}

const char* fa_last_error(void) { return fa::last_error(); }

const char* fa_version(void) {
    return FA_STRINGIFY(FA_VERSION_MAJOR) "." FA_STRINGIFY(FA_VERSION_MINOR) "." FA_STRINGIFY(FA_VERSION_PATCH);
}

const char* fa_build_info(void) { return FA_BUILD_INFO; }

int32_t fa_cuda_device_count(void) { return fa::cuda_device_count(); }

}  // extern "C"
