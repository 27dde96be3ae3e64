// xla_ffi.cpp: the operations of fa_call as custom calls of XLA. JAX calls the library through them (python/flash_attn_minimal/jax), so no
// Python runs during a step.
//
// A call is described by its attributes, which are arrays of int64. A byte means an offset in the image:
//   "call"     the fa_operation, and the byte of the workspace field (a pointer, then a size), -1 = no workspace. Then triples (argument,
//              result, bytes): the call writes this argument, which has `bytes` bytes, and this result is its new value
//   "image"    the structs of the call byte for byte, the operation's own struct first, and the strings that they point to
//   "links"    pairs (byte, target): at this byte store the address of buffer `target` or, for target < 0, the address of byte -1 - target
//              of the image. Buffers count arguments first, then results
//   "devices"  the bytes of the fields that hold a device
// Usually a written argument and its result are one buffer. XLA may separate them: it forgets that they alias when it merges a call with
// the slices around it in a loop. So the struct points to the result, and the argument's bytes are copied there if it is another buffer.
// On a GPU the workspace is a result: memory of XLA that belongs to this call as long as a captured graph is replayed. On the CPU it is
// allocated here.
#include "api/xla_ffi.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "api/calls.h"
#include "api/common/status.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fa {
namespace {

fa_status copy_on_gpu([[maybe_unused]] void* to, [[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes,
                      [[maybe_unused]] void* stream) {
#if FA_WITH_CUDA
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return FA_OK;
    cudaGetLastError();
    return fail(FA_CUDA_ERROR, "a written array of %zu bytes is not copied to its result: %s (%s)", bytes, cudaGetErrorString(error),
                cudaGetErrorName(error));
#else
    return fail(FA_UNSUPPORTED, "this build has no GPU kernels");
#endif
}

using xla::CallFrame;

struct Words {
    const int64_t* data;
    int64_t size;
};

fa_status find_words(const CallFrame& frame, const char* name, Words* words) {
    const xla::Attributes& attributes = frame.attributes;
    for (int64_t i = 0; i < attributes.size; ++i) {
        const xla::ByteSpan& found = *attributes.names[i];
        if (found.length != std::strlen(name) || std::memcmp(found.text, name, found.length)) continue;
        const auto* array = static_cast<const xla::Array*>(attributes.values[i]);
        if (attributes.types[i] != xla::kArrayAttribute || array->dtype != xla::kInt64) break;
        *words = {static_cast<const int64_t*>(array->data), int64_t(array->size)};
        return FA_OK;
    }
    return fail(FA_BAD_ARGUMENT, "attribute %s is not an array of int64: the program was made for another release of the library", name);
}

// The structs of a call, with the addresses of its buffers filled in.
class CallImage {
public:
    fa_status read(const CallFrame& frame, fa_device device) {
        Words call, image, links, devices;
        fa_status status = find_words(frame, "call", &call);
        if (status == FA_OK) status = find_words(frame, "image", &image);
        if (status == FA_OK) status = find_words(frame, "links", &links);
        if (status == FA_OK) status = find_words(frame, "devices", &devices);
        if (status != FA_OK) return status;
        operation_ = call.size >= 2 ? find_operation(call.data[0]) : nullptr;
        if (!operation_) return fail(FA_BAD_ARGUMENT, "attribute call names no operation of this release of the library");
        bytes_ = image.size * int64_t(sizeof(int64_t));
        image_.reset(new (std::nothrow) int64_t[size_t(image.size)]);
        if (!image_) return fail(FA_OUT_OF_MEMORY, "no host memory left for the %lld bytes of a call", static_cast<long long>(bytes_));
        std::memcpy(image_.get(), image.data, size_t(bytes_));
        written_ = {call.data + 2, call.size - 2};
        if (written_.size % 3) return fail(FA_BAD_ARGUMENT, "attribute call has %lld numbers", static_cast<long long>(call.size));
        for (int64_t i = 0; i < written_.size; i += 3)
            if (written_.data[i] < 0 || written_.data[i] >= frame.arguments.size || written_.data[i + 1] < 0 ||
                written_.data[i + 1] >= frame.results.size)
                return fail(FA_BAD_ARGUMENT, "argument %lld becomes result %lld in a call of %lld and %lld",
                            static_cast<long long>(written_.data[i]), static_cast<long long>(written_.data[i + 1]),
                            static_cast<long long>(frame.arguments.size), static_cast<long long>(frame.results.size));
        for (int64_t i = 0; i + 1 < links.size; i += 2) {
            void* address = nullptr;
            if (status = find(frame, links.data[i + 1], &address); status != FA_OK) return status;
            if (status = put(links.data[i], address); status != FA_OK) return status;
        }
        for (int64_t i = 0; i < devices.size; ++i)
            if (status = put(devices.data[i], int32_t(device)); status != FA_OK) return status;
        workspace_ = call.data[1];
        return device == FA_CPU && workspace_ >= 0 && operation_->query ? allocate() : FA_OK;
    }
    // Copies written arguments to their results where these are other buffers.
    fa_status copy_written(const CallFrame& frame, fa_device device, void* stream) const {
        for (int64_t i = 0; i < written_.size; i += 3) {
            const void* const from = frame.arguments.items[written_.data[i]]->data;
            void* const to = frame.results.items[written_.data[i + 1]]->data;
            const size_t bytes = size_t(written_.data[i + 2]);
            if (from == to || !bytes) continue;
            if (device == FA_CPU) std::memcpy(to, from, bytes);
            else if (const fa_status status = copy_on_gpu(to, from, bytes, stream); status != FA_OK) return status;
        }
        return FA_OK;
    }
    fa_status launch(void* stream) const { return operation_->run(image_.get(), stream); }

private:
    fa_status find(const CallFrame& frame, int64_t target, void** address) const {
        const int64_t arguments = frame.arguments.size, buffers = arguments + frame.results.size;
        if (target >= buffers || (target < 0 && -1 - target >= bytes_))
            return fail(FA_BAD_ARGUMENT, "a link to %lld in a call of %lld buffers and %lld bytes", static_cast<long long>(target),
                        static_cast<long long>(buffers), static_cast<long long>(bytes_));
        if (target < 0) *address = base() + (-1 - target);
        else *address = (target < arguments ? frame.arguments.items[target] : frame.results.items[target - arguments])->data;
        for (int64_t i = 0; i < written_.size; i += 3)
            if (written_.data[i] == target) *address = frame.results.items[written_.data[i + 1]]->data;
        return FA_OK;
    }

    template <typename T>
    fa_status put(int64_t byte, T value) {
        if (byte < 0 || byte + int64_t(sizeof value) > bytes_)
            return fail(FA_BAD_ARGUMENT, "byte %lld is outside a call of %lld bytes", static_cast<long long>(byte),
                        static_cast<long long>(bytes_));
        std::memcpy(base() + byte, &value, sizeof value);
        return FA_OK;
    }

    fa_status allocate() {
        fa_attention_plan plan;
        plan.struct_size = sizeof plan;
        if (const fa_status status = operation_->query(image_.get(), &plan); status != FA_OK) return status;
        scratch_.reset(std::malloc(plan.workspace_bytes));
        if (!scratch_ && plan.workspace_bytes)
            return fail(FA_OUT_OF_MEMORY, "no host memory left for a workspace of %zu bytes", plan.workspace_bytes);
        const fa_status status = put(workspace_, scratch_.get());
        return status == FA_OK ? put(workspace_ + int64_t(sizeof(void*)), plan.workspace_bytes) : status;
    }

    char* base() const { return reinterpret_cast<char*>(image_.get()); }

    const Operation* operation_ = nullptr;
    Words written_{nullptr, 0};  // the triples of "call"
    std::unique_ptr<int64_t[]> image_;
    int64_t bytes_ = 0, workspace_ = -1;
    std::unique_ptr<void, decltype(&std::free)> scratch_{nullptr, std::free};
};

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

// All versions 0.x only add to what is used here, so the handler reports XLA's own version number.
void describe(fa_device device, const xla::Api* api, xla::Metadata* metadata) {
    metadata->version.major = 0;
    metadata->version.minor = api && api->version.major == 0 ? api->version.minor : 1;
    metadata->traits = device == FA_CUDA ? xla::kCommandBufferCompatible : 0;
}

template <fa_device device>
xla::Error* handle(CallFrame* frame) {
    for (const xla::Extension* extension = frame->extension; extension; extension = extension->next)
        if (extension->type == xla::kMetadataExtension) {
            describe(device, frame->api, reinterpret_cast<const xla::MetadataExtension*>(extension)->metadata);
            return nullptr;
        }
    if (frame->stage != xla::kExecuteStage) return nullptr;
    CallImage call;
    if (const fa_status status = call.read(*frame, device); status != FA_OK) return answer(*frame, status);
    if (device == FA_CPU) {
        const fa_status status = call.copy_written(*frame, device, nullptr);
        return answer(*frame, status == FA_OK ? call.launch(nullptr) : status);
    }
    xla::StreamGetArgs ask{sizeof ask, nullptr, frame->context, nullptr};
    if (xla::Error* const error = frame->api->stream_get(&ask)) return error;
    const fa_status status = call.copy_written(*frame, device, ask.stream);
    return answer(*frame, status == FA_OK ? call.launch(ask.stream) : status);
}

}  // namespace
}  // namespace fa

extern "C" {

void* fa_xla_call_cpu(void* frame) { return fa::handle<FA_CPU>(static_cast<fa::CallFrame*>(frame)); }
void* fa_xla_call_cuda(void* frame) { return fa::handle<FA_CUDA>(static_cast<fa::CallFrame*>(frame)); }

}  // extern "C"
