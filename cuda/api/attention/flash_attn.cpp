// flash_attn.cpp: the exported functions. Each validates its arguments, chooses a kernel, checks the workspace and launches.
#include "flash_attn.h"

#include "api/attention/registry.h"
#include "api/attention/validate.h"
#include "api/common/dispatch.h"
#include "api/common/status.h"
#include "attention/decode/append.h"
#include "cpu/common/parallel.h"

#define FA_STRINGIFY_(x) #x
#define FA_STRINGIFY(x) FA_STRINGIFY_(x)

namespace fa {
namespace {

fa_status choose_for(const fa_attention_args& args, const AttentionParams& params, const DeviceInfo& device, const Kernel** kernel,
                     Lines* why_not) {
    return choose(args.kernel, args.device, params, device, forward_kernels(), "FLASH_ATTN_KERNEL", kernel, why_not);
}
fa_status choose_for(const fa_attention_args& args, const BackwardParams& params, const DeviceInfo& device, const BackwardKernel** kernel,
                     Lines* why_not) {
    return choose(args.kernel, args.device, params, device, backward_kernels(), "FLASH_ATTN_BACKWARD_KERNEL", kernel, why_not);
}

// The pointer whose device runs the call; NULL if q has no elements, because an empty array may lie anywhere.
const void* place_of(const fa_attention_args& a) {
    const bool rows = a.cu_seqlens_q ? a.total_q > 0 : a.batch > 0 && a.seqlen_q > 0;
    return rows ? a.q.data : nullptr;
}

// Everything that a launch needs, derived from the arguments of a call. `forward` holds the fields that both passes have.
template <typename Row, typename Params>
struct Call {
    fa_attention_args forward;
    Params params;
    DeviceInfo device;
    const Row* kernel = nullptr;

    template <typename Args>
    fa_status prepare(const Args* args, Pointers pointers, Lines* why_not) {
        if (const fa_status status = validate(args, pointers, &forward, &params); status != FA_OK) return status;
        if (const fa_status status = find_device(fa_device(forward.device), place_of(forward), &device); status != FA_OK) return status;
        return choose_for(forward, params, device, &kernel, why_not);
    }

    size_t workspace() const { return workspace_of(*kernel, params, device); }

    fa_status check_workspace(size_t bytes) const {
        if (!bytes) return FA_OK;
        if (bytes <= forward.workspace_bytes && forward.workspace) return check_workspace_apart(forward, params, bytes);
        return fail(FA_WORKSPACE_TOO_SMALL, "workspace_bytes=%zu (workspace=%p), but kernel %s needs %zu: ask its query",
                    forward.workspace_bytes, forward.workspace, kernel->name, bytes);
    }

    fa_status launch(void* stream) const {
        if (const fa_status status = check_workspace(workspace()); status != FA_OK) return status;
        const cpu::GivenThreads threads(device.index < 0 && threads_are_given(forward.num_threads));
        const CurrentDevice scope(device.index);
        if (scope.status() != FA_OK) return scope.status();
        return fa::launch(*kernel, params, device, stream);
    }
};

// Attention. A kernel that does not compute key_sums itself is followed by one that does, from the lse of the rows. The workspace holds, in
// this order: lse if the caller does not want it, 3 floats per row for the kernel of key_sums, and the attention kernel's own workspace.
struct ForwardCall : Call<Kernel, AttentionParams> {
    using Base = Call<Kernel, AttentionParams>;

    fa_status prepare(const fa_attention_args* args, Pointers pointers, Lines* why_not) {
        if (const fa_status status = Base::prepare(args, pointers, why_not); status != FA_OK || !params.key_sums) return status;
        char text[256];
        const char* const reason = key_sums_refuses(params, device, text, sizeof text);
        return reason ? fail(FA_UNSUPPORTED, "%s", reason) : FA_OK;
    }

    size_t workspace() const { return lse_bytes() + statistics_bytes() + Base::workspace(); }

    fa_status launch(void* stream) const {
        if (!params.key_sums) return Base::launch(stream);
        if (const fa_status status = check_workspace(workspace()); status != FA_OK) return status;
        const cpu::GivenThreads threads(device.index < 0 && threads_are_given(forward.num_threads));
        const CurrentDevice scope(device.index);
        if (scope.status() != FA_OK) return scope.status();
        AttentionParams p = params;
        if (!p.lse) {
            p.lse = static_cast<float*>(align_up(p.workspace, alignof(float)));
            p.workspace = static_cast<char*>(p.workspace) + lse_bytes();
        }
        if (kernel->limits.sums_keys) return fa::launch(*kernel, p, device, stream);
        void* const statistics = align_up(p.workspace, 2 * alignof(float));
        p.workspace = static_cast<char*>(p.workspace) + statistics_bytes();
        const fa_status status = fa::launch(*kernel, p, device, stream);
        p.workspace = statistics;
        return status == FA_OK ? launch_key_sums(p, device, stream) : status;
    }

private:
    size_t lse_bytes() const { return params.key_sums && !params.lse ? rows() * sizeof(float) + 128 : 0; }
    size_t statistics_bytes() const { return params.key_sums && !kernel->limits.sums_keys ? 3 * rows() * sizeof(float) + 128 : 0; }
    size_t rows() const {
        return (params.cu_seqlens_q ? size_t(params.total_q) : size_t(params.batch) * size_t(params.seqlen_q)) * size_t(params.nheads);
    }
};

// Gradients. A kernel of a GPU is followed by the one that gives dbias and dsinks, whose workspace follows its own.
struct BackwardCall : Call<BackwardKernel, BackwardParams> {
    using Base = Call<BackwardKernel, BackwardParams>;

    fa_status prepare(const fa_attention_backward_args* args, Pointers pointers, Lines* why_not) {
        if (const fa_status status = Base::prepare(args, pointers, why_not); status != FA_OK) return status;
        char text[256];
        const char* const reason = scores_refuse(params, device, text, sizeof text);
        return reason ? fail(FA_UNSUPPORTED, "%s", reason) : FA_OK;
    }

    size_t workspace() const { return Base::workspace() + scores_workspace(params, device); }

    fa_status launch(void* stream) const {
        if (const fa_status status = check_workspace(workspace()); status != FA_OK) return status;
        const cpu::GivenThreads threads(device.index < 0 && threads_are_given(forward.num_threads));
        const CurrentDevice scope(device.index);
        if (scope.status() != FA_OK) return scope.status();
        if (const fa_status status = fa::launch(*kernel, params, device, stream); status != FA_OK) return status;
        BackwardParams b = params;
        b.forward.workspace = static_cast<char*>(b.forward.workspace) + Base::workspace();
        return launch_scores(b, device, stream);
    }
};

// Attention over a cache: appends the new keys and rotates q, then runs a forward kernel. A kernel that can append does both in one launch.
// Otherwise the workspace holds first the rotated q, then the kernel's own workspace.
struct CachedCall {
    fa_attention_args forward;
    AppendParams append;
    AttentionParams params;  // arguments of the forward kernel; q may be the rotated copy
    DeviceInfo device;
    const Kernel* kernel = nullptr;
    bool whole = false;  // append and attend in one launch

    fa_status prepare(const fa_kvcache_args* args, Pointers pointers, Lines* why_not) {
        if (const fa_status status = validate(args, pointers, &forward, &append); status != FA_OK) return status;
        if (const fa_status status = find_device(fa_device(forward.device), place_of(forward), &device); status != FA_OK) return status;
        append.attention.cache.programmatic = append.attention.cache.programmatic && device.compute >= 90;
        params = append.attention;
        if (append.rotary_cos) {
            const int64_t row = int64_t(params.nheads) * params.headdim;
            params.q = append.q_rotated = {align_up(forward.workspace, kAlign), row * params.seqlen_q, row, params.headdim};
            if (params.q.data) params.workspace = static_cast<char*>(params.q.data) + rotated_bytes() - kAlign;
        }
        if (const fa_status status = choose_for(forward, params, device, &kernel, why_not); status != FA_OK) return status;
        whole = append.seqlen_new > 0 && appends(*kernel, append);
        if (whole) params = append.attention;
        return FA_OK;
    }

    size_t workspace() const { return (whole ? 0 : rotated_bytes()) + workspace_of(*kernel, params, device); }

    fa_status launch(void* stream) const {
        if (const size_t bytes = workspace(); bytes > forward.workspace_bytes || (bytes && !forward.workspace))
            return fail(FA_WORKSPACE_TOO_SMALL, "workspace_bytes=%zu (workspace=%p), but kernel %s needs %zu: ask its query",
                        forward.workspace_bytes, forward.workspace, kernel->name, bytes);
        else if (bytes)
            if (const fa_status status = check_workspace_apart(forward, append, bytes); status != FA_OK) return status;
        const cpu::GivenThreads threads(device.index < 0 && threads_are_given(forward.num_threads));
        const CurrentDevice scope(device.index);
        if (scope.status() != FA_OK) return scope.status();
        if (whole && params.seqlen_q > 0) return launch_whole(append, device, stream);
        if (append_rows(append) > 0)
            if (const fa_status status = launch_append(append, device, stream); status != FA_OK) return status;
        return params.seqlen_q > 0 ? fa::launch(*kernel, params, device, stream) : FA_OK;
    }

private:
    static constexpr size_t kAlign = 128;
    size_t rotated_bytes() const {
        if (!append.rotary_cos) return 0;
        const size_t elements = size_t(params.batch) * size_t(params.seqlen_q) * size_t(params.nheads) * size_t(params.headdim);
        return (elements * (params.dtype == DType::kFloat32 ? 4 : 2) + kAlign - 1) / kAlign * kAlign + kAlign;
    }
};

}  // namespace
}  // namespace fa

extern "C" {

fa_status fa_attention_forward(const fa_attention_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::ForwardCall call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    const fa::AttentionParams& p = call.params;
    if (p.batch == 0) return FA_OK;
    if (p.seqlen_q == 0 || (p.cu_seqlens_q && p.total_q == 0)) return fa::clear_statistics(p, call.device, stream);
    return call.launch(stream);
}

fa_status fa_attention_query(const fa_attention_args* args, fa_attention_plan* plan) { return fa::query<fa::ForwardCall>(args, plan); }

fa_status fa_attention_backward(const fa_attention_backward_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::BackwardCall call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    return call.launch(stream);  // a call without queries, or without keys, still has gradients to set to zero
}

fa_status fa_attention_backward_query(const fa_attention_backward_args* args, fa_attention_plan* plan) {
    return fa::query<fa::BackwardCall>(args, plan);
}

fa_status fa_kvcache_attention(const fa_kvcache_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::CachedCall call;
    if (const fa_status status = call.prepare(args, fa::Pointers::kRequired, nullptr); status != FA_OK) return status;
    return call.params.batch == 0 ? FA_OK : call.launch(stream);
}

fa_status fa_kvcache_query(const fa_kvcache_args* args, fa_attention_plan* plan) { return fa::query<fa::CachedCall>(args, plan); }

fa_status fa_attention_merge(const fa_merge_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::MergeParams params;
    if (const fa_status status = fa::validate(args, &params); status != FA_OK) return status;
    const fa::cpu::GivenThreads threads(fa::threads_are_given(0));
    return fa::launch_merge(params, fa_device(args->device), stream);
}

fa_status fa_quantize_fp8(const fa_quantize_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::QuantizeParams params;
    if (const fa_status status = fa::validate(args, &params); status != FA_OK) return status;
    const fa::cpu::GivenThreads threads(fa::threads_are_given(0));
    return fa::launch_quantize(params, fa_device(args->device), stream);
}

fa_status fa_use_openmp(const char* library) {
    const char* const reason = fa::cpu::use_openmp(library);
    return reason ? fa::fail(FA_UNSUPPORTED, "library=%s: %s", library, reason) : FA_OK;
}

FA_KERNEL_TABLE(fa_kernel, fa::forward_kernels())
FA_KERNEL_TABLE(fa_backward_kernel, fa::backward_kernels())

const char* fa_status_name(fa_status status) {
    switch (status) {
        case FA_OK: return "FA_OK";
        case FA_BAD_ARGUMENT: return "FA_BAD_ARGUMENT";
        case FA_UNSUPPORTED: return "FA_UNSUPPORTED";
        case FA_WORKSPACE_TOO_SMALL: return "FA_WORKSPACE_TOO_SMALL";
        case FA_CUDA_ERROR: return "FA_CUDA_ERROR";
        case FA_OUT_OF_MEMORY: return "FA_OUT_OF_MEMORY";
        case FA_RANK_LOST: return "FA_RANK_LOST";
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
