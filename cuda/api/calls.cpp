// calls.cpp: calls as data. Each is made through the exported function of its operation.
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "api/common/checks.h"
#include "api/common/status.h"
#include "cpu/common/parallel.h"
#include "flash_attn_distributed.h"
#include "flash_attn_transformer.h"

namespace fa {
namespace {

struct Operation {
    fa_operation number;
    const char* name;
    fa_status (*run)(const void* args, void* stream);
    fa_status (*query)(const void* args, void* plan);  // NULL: the operation needs no workspace
};

// These give `function` the common types of the table.
template <typename Args, fa_status (*function)(const Args*, void*)>
fa_status run(const void* args, void* stream) {
    return function(static_cast<const Args*>(args), stream);
}

template <typename Args, fa_status (*function)(const Args*, fa_attention_plan*)>
fa_status query(const void* args, void* plan) {
    return function(static_cast<const Args*>(args), static_cast<fa_attention_plan*>(plan));
}

fa_status read_group_call(const void* args, fa_group_call* call) {
    FA_RETURN_IF_ERROR(copy_args(static_cast<const fa_group_call*>(args), "fa_group_call", sizeof(fa_group_call), call));
    return call->reserved ? fail(FA_BAD_ARGUMENT, "fa_group_call.reserved=%d must be 0", call->reserved) : FA_OK;
}

template <typename Args, fa_status (*function)(fa_group*, const Args*, void*)>
fa_status run_in_group(const void* args, void* stream) {
    fa_group_call call;
    FA_RETURN_IF_ERROR(read_group_call(args, &call));
    return function(call.group, static_cast<const Args*>(call.args), stream);
}

template <typename Args, fa_status (*function)(const Args*, int32_t, int32_t, int32_t, fa_distributed_plan*)>
fa_status query_of_group(const void* args, void* plan) {
    fa_group_call call;
    FA_RETURN_IF_ERROR(read_group_call(args, &call));
    return function(static_cast<const Args*>(call.args), call.kind, call.rank, call.size, static_cast<fa_distributed_plan*>(plan));
}

constexpr Operation kOperations[] = {
    {FA_OP_ATTENTION_FORWARD, "fa_attention_forward", run<fa_attention_args, fa_attention_forward>,
     query<fa_attention_args, fa_attention_query>},
    {FA_OP_ATTENTION_BACKWARD, "fa_attention_backward", run<fa_attention_backward_args, fa_attention_backward>,
     query<fa_attention_backward_args, fa_attention_backward_query>},
    {FA_OP_KVCACHE_ATTENTION, "fa_kvcache_attention", run<fa_kvcache_args, fa_kvcache_attention>, query<fa_kvcache_args, fa_kvcache_query>},
    {FA_OP_ATTENTION_MERGE, "fa_attention_merge", run<fa_merge_args, fa_attention_merge>, nullptr},
    {FA_OP_QUANTIZE_FP8, "fa_quantize_fp8", run<fa_quantize_args, fa_quantize_fp8>, nullptr},
    {FA_OP_RMS_NORM, "fa_rms_norm", run<fa_rms_norm_args, fa_rms_norm>, nullptr},
    {FA_OP_ROPE, "fa_rope", run<fa_rope_args, fa_rope>, nullptr},
    {FA_OP_SWIGLU, "fa_swiglu", run<fa_swiglu_args, fa_swiglu>, nullptr},
    {FA_OP_SAMPLE, "fa_sample", run<fa_sample_args, fa_sample>, nullptr},
    {FA_OP_LINEAR, "fa_linear", run<fa_linear_args, fa_linear>, nullptr},
    {FA_OP_W4_QUANTIZE, "fa_w4_quantize", run<fa_w4_quantize_args, fa_w4_quantize>, nullptr},
    {FA_OP_W4_DEQUANTIZE, "fa_w4_dequantize", run<fa_w4_dequantize_args, fa_w4_dequantize>, nullptr},
    {FA_OP_W4_PACK, "fa_w4_pack", run<fa_w4_pack_args, fa_w4_pack>, nullptr},
    {FA_OP_W4_LINEAR, "fa_w4_linear", run<fa_w4_linear_args, fa_w4_linear>, query<fa_w4_linear_args, fa_w4_linear_query>},
    {FA_OP_W4_LINEAR_CHAIN, "fa_w4_linear_chain", run<fa_w4_linear_chain_args, fa_w4_linear_chain>,
     query<fa_w4_linear_chain_args, fa_w4_linear_chain_query>},
    {FA_OP_DISTRIBUTED_FORWARD, "fa_distributed_forward", run_in_group<fa_distributed_args, fa_distributed_forward>,
     query_of_group<fa_distributed_args, fa_distributed_query>},
    {FA_OP_DISTRIBUTED_BACKWARD, "fa_distributed_backward", run_in_group<fa_distributed_backward_args, fa_distributed_backward>,
     query_of_group<fa_distributed_backward_args, fa_distributed_backward_query>},
    {FA_OP_DISTRIBUTED_DECODE, "fa_distributed_decode", run_in_group<fa_distributed_decode_args, fa_distributed_decode>,
     query_of_group<fa_distributed_decode_args, fa_distributed_decode_query>},
    {FA_OP_DISTRIBUTED_MERGE, "fa_distributed_merge", run_in_group<fa_distributed_merge_args, fa_distributed_merge>,
     query_of_group<fa_distributed_merge_args, fa_distributed_merge_query>},
};
constexpr int32_t kCount = sizeof kOperations / sizeof kOperations[0];

constexpr bool numbers_are_places() {
    for (int32_t i = 0; i < kCount; ++i)
        if (kOperations[i].number != i + 1) return false;
    return true;
}
static_assert(numbers_are_places(), "operation n is row n - 1 of the table");

// The structs of a call with its holes filled.
class Filled {
public:
    Filled() = default;
    Filled(const Filled&) = delete;
    Filled& operator=(const Filled&) = delete;

    fa_status fill(const fa_call& call, const uint64_t* values) {
        if (call.operation < 1 || call.operation > kCount)
            return fail(FA_BAD_ARGUMENT, "operation=%d is not an fa_operation (1 .. %d)", call.operation, kCount);
        operation = &kOperations[call.operation - 1];
        if (call.reserved) return fail(FA_BAD_ARGUMENT, "fa_call.reserved=%d must be 0", call.reserved);
        if (call.hole_count < 0) return fail(FA_BAD_ARGUMENT, "hole_count=%d is negative", call.hole_count);
        args = call.image;
        if (!call.hole_count) return FA_OK;
        if (!call.image || !call.holes)
            return fail(FA_BAD_ARGUMENT, "%s is NULL with hole_count=%d", call.image ? "holes" : "image", call.hole_count);
        char* bytes = near_;
        if (call.image_bytes > sizeof near_) {
            far_.reset(new (std::nothrow) char[call.image_bytes]);
            if (!far_) return fail(FA_OUT_OF_MEMORY, "no host memory left for the %zu bytes of a call", call.image_bytes);
            bytes = far_.get();
        }
        std::memcpy(bytes, call.image, call.image_bytes);
        for (int32_t i = 0; i < call.hole_count; ++i)
            if (const fa_status status = put(call, i, values, bytes); status != FA_OK) return status;
        size_t struct_size = sizeof struct_size;
        if (call.image_bytes >= sizeof struct_size) std::memcpy(&struct_size, bytes, sizeof struct_size);
        if (struct_size > call.image_bytes)
            return fail(FA_BAD_ARGUMENT, "image_bytes=%zu with a struct of %zu bytes", call.image_bytes, struct_size);
        args = bytes;
        return FA_OK;
    }

    const Operation* operation = nullptr;
    const void* args = nullptr;

private:
    static fa_status put(const fa_call& call, int32_t index, const uint64_t* values, char* bytes) {
        const fa_hole& hole = call.holes[index];
        const auto size = int64_t(call.image_bytes);
        if ((hole.bytes != 4 && hole.bytes != 8) || hole.byte < 0 || hole.byte > size - hole.bytes)
            return fail(FA_BAD_ARGUMENT, "holes[%d] is %d bytes at byte %d: expected 4 or 8 of the image's %" PRId64, index, hole.bytes,
                        hole.byte, size);
        if (hole.value >= 0 ? hole.value >= call.value_count || !values : -1 - int64_t(hole.value) >= size)
            return fail(FA_BAD_ARGUMENT, "holes[%d].value=%d in a call of %d values and %" PRId64 " bytes", index, hole.value,
                        values ? call.value_count : 0, size);
        const uint64_t value = hole.value >= 0 ? values[hole.value] : reinterpret_cast<uintptr_t>(bytes + (-1 - hole.value));
        if (hole.bytes == 8) std::memcpy(bytes + hole.byte, &value, 8);
        else {
            const auto low = uint32_t(value);
            std::memcpy(bytes + hole.byte, &low, 4);
        }
        return FA_OK;
    }

    alignas(16) char near_[2048];
    std::unique_ptr<char[]> far_;
};

fa_status run_call(const fa_call& call, const uint64_t* values, int32_t index, void* stream) {
    Filled filled;
    fa_status status = filled.fill(call, values);
    if (status == FA_OK) status = filled.operation->run(filled.args, stream);
    if (status == FA_OK) return FA_OK;
    char reason[960];
    std::snprintf(reason, sizeof reason, "%s", last_error());
    if (!filled.operation) return fail(status, "calls[%d]: %s", index, reason);
    return fail(status, "calls[%d] (%s): %s", index, filled.operation->name, reason);
}

}  // namespace
}  // namespace fa

extern "C" {

fa_status fa_run_call(const fa_call* call, const uint64_t* values, void* stream) {
    if (!call) return fa::fail(FA_BAD_ARGUMENT, "call is NULL");
    fa::Filled filled;
    const fa_status status = filled.fill(*call, values);
    return status == FA_OK ? filled.operation->run(filled.args, stream) : status;
}

fa_status fa_query_call(const fa_call* call, const uint64_t* values, void* plan) {
    if (!call) return fa::fail(FA_BAD_ARGUMENT, "call is NULL");
    fa::Filled filled;
    const fa_status status = filled.fill(*call, values);
    if (status != FA_OK) return status;
    if (!filled.operation->query) return fa::fail(FA_UNSUPPORTED, "%s has no query: it needs no workspace", filled.operation->name);
    return filled.operation->query(filled.args, plan);
}

fa_status fa_run_calls(const fa_call* calls, int32_t count, const uint64_t* values, int32_t* failed_index, void* stream) {
    if (failed_index) *failed_index = -1;
    if (count < 0) return fa::fail(FA_BAD_ARGUMENT, "count=%d is negative", count);
    if (count > 0 && !calls) return fa::fail(FA_BAD_ARGUMENT, "calls is NULL with count=%d", count);
    const fa::cpu::Team team;
    for (int32_t i = 0; i < count; ++i)
        if (const fa_status status = fa::run_call(calls[i], values, i, stream); status != FA_OK) {
            if (failed_index) *failed_index = i;
            return status;
        }
    return FA_OK;
}

}  // extern "C"
