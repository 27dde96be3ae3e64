// xla_ffi.cpp: fa_call as a custom call of XLA. JAX calls the library through it (python/flash_attn_minimal/jax), so no Python runs during
// a step.
//
// The attributes of a custom call are those of an fa_call:
//   "call"     int64: the fa_operation; whether it has a workspace (0 or 1). Then triples (argument, result, bytes): the call writes this
//              argument, which has `bytes` bytes, and this result is its new value
//   "image"    int64: the image, byte for byte
//   "holes"    int32: three for each fa_hole
// The values are the device, the address of the workspace, its size, and the addresses of the arguments and of the results.
//
// Usually a written argument and its result are one buffer. XLA may separate them: it forgets that they alias when it merges a call with
// the slices around it in a loop. So the struct points to the result, and the argument's bytes are copied there if it is another buffer.
// On a GPU the workspace is the last result: memory of XLA that belongs to this call as long as a captured graph is replayed. On the CPU
// it is allocated here, in the size of this call's plan.
#include "api/xla_ffi.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "api/common/status.h"
#include "flash_attn_transformer.h"

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

template <typename Number>
struct Numbers {
    const Number* data;
    int64_t size;
};

template <typename Number>
fa_status find_numbers(const CallFrame& frame, const char* name, Numbers<Number>* numbers) {
    constexpr int32_t kType = sizeof(Number) == 8 ? xla::kInt64 : xla::kInt32;
    const xla::Attributes& attributes = frame.attributes;
    for (int64_t i = 0; i < attributes.size; ++i) {
        const xla::ByteSpan& found = *attributes.names[i];
        if (found.length != std::strlen(name) || std::memcmp(found.text, name, found.length)) continue;
        const auto* array = static_cast<const xla::Array*>(attributes.values[i]);
        if (attributes.types[i] != xla::kArrayAttribute || array->dtype != kType) break;
        *numbers = {static_cast<const Number*>(array->data), int64_t(array->size)};
        return FA_OK;
    }
    return fail(FA_BAD_ARGUMENT, "attribute %s is not an array of int%d: the program was made for another release of the library", name,
                int(8 * sizeof(Number)));
}

// The call of a frame, and its values.
class FrameCall {
public:
    fa_status read(const CallFrame& frame, fa_device device) {
        Numbers<int64_t> words{}, image{};
        Numbers<int32_t> holes{};
        fa_status status = find_numbers(frame, "call", &words);
        if (status == FA_OK) status = find_numbers(frame, "image", &image);
        if (status == FA_OK) status = find_numbers(frame, "holes", &holes);
        if (status != FA_OK) return status;
        if (words.size < 2 || words.size % 3 != 2 || holes.size % 3)
            return fail(FA_BAD_ARGUMENT, "attributes call and holes have %lld and %lld numbers", static_cast<long long>(words.size),
                        static_cast<long long>(holes.size));
        const int64_t arguments = frame.arguments.size, results = frame.results.size, buffers = arguments + results;
        values_.reset(new (std::nothrow) uint64_t[size_t(kOfTheCall + buffers)]{uint64_t(device)});
        if (!values_) return fail(FA_OUT_OF_MEMORY, "no host memory left for a call of %lld buffers", static_cast<long long>(buffers));
        uint64_t* const addresses = values_.get() + kOfTheCall;
        for (int64_t i = 0; i < buffers; ++i)
            addresses[i] = address(i < arguments ? frame.arguments.items[i] : frame.results.items[i - arguments]);
        written_ = {words.data + 2, words.size - 2};
        for (int64_t i = 0; i < written_.size; i += 3) {
            const int64_t from = written_.data[i], to = written_.data[i + 1];
            if (from < 0 || from >= arguments || to < 0 || to >= results)
                return fail(FA_BAD_ARGUMENT, "argument %lld becomes result %lld in a call of %lld and %lld", static_cast<long long>(from),
                            static_cast<long long>(to), static_cast<long long>(arguments), static_cast<long long>(results));
            addresses[from] = addresses[arguments + to];
        }
        static_assert(sizeof(fa_hole) == 3 * sizeof(int32_t), "the attribute is an array of fa_hole");
        call_ = {int32_t(words.data[0]),
                 0,
                 image.data,
                 size_t(image.size) * sizeof(int64_t),
                 reinterpret_cast<const fa_hole*>(holes.data),
                 int32_t(holes.size / 3),
                 kOfTheCall + int32_t(buffers)};
        if (!words.data[1]) return FA_OK;
        if (device == FA_CPU) return allocate();
        const xla::Buffer* const last = results ? frame.results.items[results - 1] : nullptr;
        if (!last || last->rank != 1) return fail(FA_BAD_ARGUMENT, "the last result is not a workspace");
        put_workspace(address(last), uint64_t(last->dims[0]));
        return FA_OK;
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
    fa_status launch(void* stream) const { return fa_run_call(&call_, values_.get(), stream); }

private:
    static uint64_t address(const xla::Buffer* buffer) { return reinterpret_cast<uintptr_t>(buffer->data); }

    void put_workspace(uint64_t at, uint64_t bytes) { values_[1] = at, values_[2] = bytes; }

    fa_status allocate() {
        fa_attention_plan plan;
        plan.struct_size = sizeof plan;
        if (const fa_status status = fa_query_call(&call_, values_.get(), &plan); status != FA_OK) return status;
        scratch_.reset(std::malloc(plan.workspace_bytes));
        if (!scratch_ && plan.workspace_bytes)
            return fail(FA_OUT_OF_MEMORY, "no host memory left for a workspace of %zu bytes", plan.workspace_bytes);
        put_workspace(reinterpret_cast<uintptr_t>(scratch_.get()), plan.workspace_bytes);
        return FA_OK;
    }

    static constexpr int32_t kOfTheCall = 3;  // values before the addresses

    fa_call call_{};
    std::unique_ptr<uint64_t[]> values_;
    Numbers<int64_t> written_{nullptr, 0};  // the triples of "call"
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
    FrameCall call;
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
