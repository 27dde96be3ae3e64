// calls.cpp: fa_run_calls makes a list of calls of the C ABI, each through its own exported function.
#include "api/calls.h"

#include <cstdio>

#include "api/common/status.h"
#include "cpu/common/parallel.h"

namespace fa {
namespace {

// Gives `function` the common type of the table.
template <typename Args, fa_status (*function)(const Args*, void*)>
fa_status run(const void* args, void* stream) {
    return function(static_cast<const Args*>(args), stream);
}

template <typename Args, fa_status (*function)(const Args*, fa_attention_plan*)>
fa_status query(const void* args, fa_attention_plan* plan) {
    return function(static_cast<const Args*>(args), plan);
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
};
constexpr int32_t kCount = sizeof kOperations / sizeof kOperations[0];

constexpr bool numbers_are_places() {
    for (int32_t i = 0; i < kCount; ++i)
        if (kOperations[i].number != i + 1) return false;
    return true;
}
static_assert(numbers_are_places(), "operation n is row n - 1 of the table");

}  // namespace

const Operation* find_operation(int64_t number) { return number >= 1 && number <= kCount ? &kOperations[number - 1] : nullptr; }

namespace {

fa_status run_call(const fa_call& call, int32_t index, void* stream) {
    const Operation* const operation = find_operation(call.operation);
    if (!operation) return fail(FA_BAD_ARGUMENT, "calls[%d].operation=%d is not an fa_operation (1 .. %d)", index, call.operation, kCount);
    if (call.reserved) return fail(FA_BAD_ARGUMENT, "calls[%d].reserved=%d must be 0", index, call.reserved);
    const fa_status status = operation->run(call.args, stream);
    if (status == FA_OK) return FA_OK;
    char reason[960];
    std::snprintf(reason, sizeof reason, "%s", last_error());
    return fail(status, "calls[%d] (%s): %s", index, operation->name, reason);
}

}  // namespace
}  // namespace fa

extern "C" fa_status fa_run_calls(const fa_call* calls, int32_t count, int32_t* failed_index, void* stream) {
    if (failed_index) *failed_index = -1;
    if (count < 0) return fa::fail(FA_BAD_ARGUMENT, "count=%d is negative", count);
    if (count > 0 && !calls) return fa::fail(FA_BAD_ARGUMENT, "calls is NULL with count=%d", count);
    const fa::cpu::Team team;
    for (int32_t i = 0; i < count; ++i)
        if (const fa_status status = fa::run_call(calls[i], i, stream); status != FA_OK) {
            if (failed_index) *failed_index = i;
            return status;
        }
    return FA_OK;
}
