// ops.cpp: the exported functions of the small operations except linear: validate, find the device, launch. Each operation has one
// kernel per device.
#include "api/common/serve.h"
#include "api/transformer/registry.h"
#include "api/transformer/validate.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"
#include "flash_attn_transformer.h"

#if FA_WITH_CUDA
#include "transformer/ops/kernels.h"
#endif

namespace fa {
namespace {

#if FA_WITH_CUDA
fa_status on_gpu(const RmsNormParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return start("rms_norm", rms_norm_blocks(p), [&] { return rms_norm(p, device, stream); });
}
fa_status on_gpu(const RopeParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return start("rope", rope_blocks(p), [&] { return rope(p, device, stream); });
}
fa_status on_gpu(const SwigluParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return start("swiglu", swiglu_blocks(p), [&] { return swiglu(p, device, stream); });
}
fa_status on_gpu(const SampleParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return start("sample", sample_blocks(p, device), [&] { return sample(p, device, stream); });
}
#endif

void on_cpu(const RmsNormParams& p) { cpu::rms_norm(p); }
void on_cpu(const RopeParams& p) { cpu::rope(p); }
void on_cpu(const SwigluParams& p) { cpu::swiglu(p); }
void on_cpu(const SampleParams& p) { cpu::sample(p); }

// The array `input` decides which GPU runs the call. `any` is false for a call without rows, which launches nothing.
template <typename Params>
fa_status run(Params& params, int32_t device, int32_t num_threads, const char* input_name, const void* input, bool any,
              [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(fa_device(device), input, &info, input_name); status != FA_OK) return status;
    if (!any) return FA_OK;
    if (device == FA_CPU) {
        const cpu::GivenThreads threads(threads_are_given(num_threads));
        return on_host([&] { on_cpu(params); });
    }
#if FA_WITH_CUDA
    params.programmatic = params.programmatic && info.compute >= 90;
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return on_gpu(params, info, static_cast<cudaStream_t>(stream));
#else
    return FA_UNSUPPORTED;
#endif
}

}  // namespace
}  // namespace fa

extern "C" {

fa_status fa_rms_norm(const fa_rms_norm_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::RmsNormParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "x", p.x.data, p.rows > 0, stream);
}

fa_status fa_rope(const fa_rope_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::RopeParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "x", p.x.data, p.batch > 0 && p.seqlen > 0, stream);
}

fa_status fa_swiglu(const fa_swiglu_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::SwigluParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "gate_up", p.gate_up.data, p.rows > 0, stream);
}

fa_status fa_sample(const fa_sample_args* args, void* stream) {
    const fa::cpu::FloatMode mode;
    fa::SampleParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, args->device, args->num_threads, "logits", p.logits.data, p.batch > 0, stream);
}

}  // extern "C"
