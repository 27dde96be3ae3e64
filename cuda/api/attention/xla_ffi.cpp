// xla_ffi.cpp: attention as custom calls of XLA. JAX calls the library through them (jax.py), so that no Python runs in a step.
//
// The attributes of a call:
//   "attention", "backward"  the structs of flash_attn.h, byte for byte, as arrays of int64; "backward" only in the backward pass
//   "kernel"                 a string, empty when no kernel is forced
// In a struct, the placeholder kAddressUnit * (1 + i) stands where the address of buffer i belongs; arguments are counted before results.
// On a GPU the last result is the workspace, memory of XLA that belongs to this call as long as a captured graph is replayed. On the CPU
// the workspace is allocated here.
#include "api/attention/xla_ffi.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "api/common/status.h"
#include "flash_attn.h"

namespace fa {
namespace {

using xla::CallFrame;

// Placeholders are aligned, and farther apart than any buffer is long, so they pass the checks of alignment and overlap.
constexpr uintptr_t kAddressUnit = uintptr_t(1) << 48;

const void* find_attribute(const CallFrame& frame, const char* name, xla::AttributeType type) {
    const xla::Attributes& attributes = frame.attributes;
    for (int64_t i = 0; i < attributes.size; ++i) {
        const xla::ByteSpan& found = *attributes.names[i];
        if (found.length == std::strlen(name) && !std::memcmp(found.text, name, found.length))
            return attributes.types[i] == type ? attributes.values[i] : nullptr;
    }
    return nullptr;
}

template <typename Args>
fa_status unpack(const CallFrame& frame, const char* name, Args* args) {
    const auto* array = static_cast<const xla::Array*>(find_attribute(frame, name, xla::kArrayAttribute));
    if (!array || array->dtype != xla::kInt64 || array->size * sizeof(int64_t) != sizeof *args)
        return fail(FA_BAD_ARGUMENT, "attribute %s is not an array of %zu int64: the program was made for another release of the library",
                    name, sizeof *args / sizeof(int64_t));
    std::memcpy(args, array->data, sizeof *args);
    return FA_OK;
}

// Replaces placeholders by addresses; NULL stays NULL.
class Places {
public:
    explicit Places(const CallFrame& frame) : frame_(frame) {}

    template <typename... T>
    fa_status fill(T*&... pointers) const {
        fa_status status = FA_OK;
        ((status = status == FA_OK ? fill_one(pointers) : status), ...);
        return status;
    }

private:
    template <typename T>
    fa_status fill_one(T*& pointer) const {
        if (!pointer) return FA_OK;
        const int64_t index = int64_t(reinterpret_cast<uintptr_t>(pointer) / kAddressUnit) - 1, arguments = frame_.arguments.size;
        if (index < 0 || index >= arguments + frame_.results.size)
            return fail(FA_BAD_ARGUMENT, "buffer %lld is none of the call's %lld", static_cast<long long>(index),
                        static_cast<long long>(arguments + frame_.results.size));
        pointer = static_cast<T*>((index < arguments ? frame_.arguments.items[index] : frame_.results.items[index - arguments])->data);
        return FA_OK;
    }

    const CallFrame& frame_;
};

struct ForwardCall {
    fa_attention_args attention;
    char kernel[64];  // longer than any kernel's name

    fa_status read(const CallFrame& frame) {
        if (const fa_status status = unpack(frame, "attention", &attention); status != FA_OK) return status;
        attention.kernel = nullptr;
        if (const auto* name = static_cast<const xla::ByteSpan*>(find_attribute(frame, "kernel", xla::kStringAttribute));
            name && name->length) {
            std::snprintf(kernel, sizeof kernel, "%.*s", int(name->length), name->text);
            attention.kernel = kernel;
        }
        fa_attention_args& a = attention;
        return Places(frame).fill(a.q.data, a.k.data, a.v.data, a.out.data, a.lse, a.cu_seqlens_q, a.cu_seqlens_k, a.alibi_slopes,
                                  a.bias.data, a.mask.data, a.sinks, a.parts, a.max_score, a.key_sums, a.workspace);
    }
    fa_status launch(void* stream) const { return fa_attention_forward(&attention, stream); }
    fa_status query(fa_attention_plan* plan) const { return fa_attention_query(&attention, plan); }
};

struct BackwardCall : ForwardCall {
    fa_attention_backward_args backward;

    fa_status read(const CallFrame& frame) {
        if (const fa_status status = ForwardCall::read(frame); status != FA_OK) return status;
        if (const fa_status status = unpack(frame, "backward", &backward); status != FA_OK) return status;
        backward.forward = &attention;
        fa_attention_backward_args& b = backward;
        return Places(frame).fill(b.dout.data, b.dq.data, b.dk.data, b.dv.data, b.dbias.data, b.dsinks, b.dlse);
    }
    fa_status launch(void* stream) const { return fa_attention_backward(&backward, stream); }
    fa_status query(fa_attention_plan* plan) const { return fa_attention_backward_query(&backward, plan); }
};

template <typename Call>
fa_status launch_on_host(Call& call) {
    fa_attention_plan plan;
    plan.struct_size = sizeof plan;
    if (const fa_status status = call.query(&plan); status != FA_OK) return status;
    const std::unique_ptr<void, decltype(&std::free)> workspace(std::malloc(plan.workspace_bytes), std::free);
    if (!workspace && plan.workspace_bytes)
        return fail(FA_OUT_OF_MEMORY, "no host memory left for a workspace of %zu bytes", plan.workspace_bytes);
    call.attention.workspace = workspace.get();
    call.attention.workspace_bytes = plan.workspace_bytes;
    return call.launch(nullptr);
}

// NULL for FA_OK, otherwise an error made by XLA with the text of fa_last_error.
xla::Error* answer(const CallFrame& frame, fa_status status) {
    if (status == FA_OK) return nullptr;
    xla::ErrorCode code = xla::kInternal;
    if (status == FA_BAD_ARGUMENT) code = xla::kInvalidArgument;
    if (status == FA_UNSUPPORTED) code = xla::kUnimplemented;
    if (status == FA_OUT_OF_MEMORY) code = xla::kResourceExhausted;
    xla::ErrorCreateArgs args{sizeof args, nullptr, last_error(), code};
    return frame.api->error_create(&args);
}

// Versions 0.x only add to what is used here, so any of them is answered with its own number.
void describe(fa_device device, const xla::Api* api, xla::Metadata* metadata) {
    metadata->version.major = 0;
    metadata->version.minor = api && api->version.major == 0 ? api->version.minor : 1;
    metadata->traits = device == FA_CUDA ? xla::kCommandBufferCompatible : 0;
}

template <fa_device device, typename Call>
xla::Error* handle(CallFrame* frame) {
    for (const xla::Extension* extension = frame->extension; extension; extension = extension->next)
        if (extension->type == xla::kMetadataExtension) {
            describe(device, frame->api, reinterpret_cast<const xla::MetadataExtension*>(extension)->metadata);
            return nullptr;
        }
    if (frame->stage != xla::kExecuteStage) return nullptr;
    Call call;
    if (const fa_status status = call.read(*frame); status != FA_OK) return answer(*frame, status);
    call.attention.device = device;
    if (device == FA_CPU) return answer(*frame, launch_on_host(call));
    xla::StreamGetArgs ask{sizeof ask, nullptr, frame->context, nullptr};
    if (xla::Error* const error = frame->api->stream_get(&ask)) return error;
    return answer(*frame, call.launch(ask.stream));
}

}  // namespace
}  // namespace fa

extern "C" {

void* fa_xla_forward_cpu(void* frame) { return fa::handle<FA_CPU, fa::ForwardCall>(static_cast<fa::CallFrame*>(frame)); }
void* fa_xla_forward_cuda(void* frame) { return fa::handle<FA_CUDA, fa::ForwardCall>(static_cast<fa::CallFrame*>(frame)); }
void* fa_xla_backward_cpu(void* frame) { return fa::handle<FA_CPU, fa::BackwardCall>(static_cast<fa::CallFrame*>(frame)); }
void* fa_xla_backward_cuda(void* frame) { return fa::handle<FA_CUDA, fa::BackwardCall>(static_cast<fa::CallFrame*>(frame)); }

}  // extern "C"
