// ops.cpp: the exported functions of the small operations. Validate, find the device, launch: each has one kernel on each device.
#include "cpu/kernels.h"
#include "flash_attn.h"
#include "registry.h"
#include "serve.h"
#include "validate.h"

#if FA_WITH_CUDA
#include "ops/kernels.h"
#endif

namespace fa {
namespace {

#if FA_WITH_CUDA
int64_t blocks_of(const RmsNormParams& p, const DeviceInfo&) { return rms_norm_blocks(p); }
int64_t blocks_of(const RopeParams& p, const DeviceInfo&) { return rope_blocks(p); }
int64_t blocks_of(const SwigluParams& p, const DeviceInfo&) { return swiglu_blocks(p); }
int64_t blocks_of(const SampleParams& p, const DeviceInfo&) { return p.batch; }
int64_t blocks_of(const LinearParams& p, const DeviceInfo& device) { return linear_gemv_blocks(p, device.multiprocessors); }

cudaError_t start(const RmsNormParams& p, const DeviceInfo&, cudaStream_t stream) { return rms_norm(p, stream); }
cudaError_t start(const RopeParams& p, const DeviceInfo&, cudaStream_t stream) { return rope(p, stream); }
cudaError_t start(const SwigluParams& p, const DeviceInfo&, cudaStream_t stream) { return swiglu(p, stream); }
cudaError_t start(const SampleParams& p, const DeviceInfo&, cudaStream_t stream) { return sample(p, stream); }
cudaError_t start(const LinearParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return linear_gemv(p, device.multiprocessors, stream);
}
#endif

void on_cpu(const RmsNormParams& p) { cpu::rms_norm(p); }
void on_cpu(const RopeParams& p) { cpu::rope(p); }
void on_cpu(const SwigluParams& p) { cpu::swiglu(p); }
void on_cpu(const SampleParams& p) { cpu::sample(p); }
void on_cpu(const LinearParams& p) { cpu::linear(p); }

// `input` decides which GPU; a call without rows has nothing to do.
template <typename Params>
fa_status run(Params& params, const char* name, int32_t device, const char* input_name, const void* input, bool any,
              [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(fa_device(device), input, &info, input_name); status != FA_OK) return status;
    if (!any) return FA_OK;
    if (device == FA_CPU) return on_host([&] { on_cpu(params); });
#if FA_WITH_CUDA
    if (const int64_t blocks = blocks_of(params, info); blocks > kMaxGrid)
        return fail(FA_UNSUPPORTED, "%s: %lld blocks are more than a grid has", name, static_cast<long long>(blocks));
    params.programmatic = params.programmatic && info.compute >= 90;
    const CurrentDevice scope(info.index);
    return launched(name, start(params, info, static_cast<cudaStream_t>(stream)));
#else
    (void)name;
    return FA_UNSUPPORTED;
#endif
}

}  // namespace
}  // namespace fa

extern "C" {

fa_status fa_rms_norm(const fa_rms_norm_args* args, void* stream) {
    fa::RmsNormParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, "rms_norm", args->device, "x", p.x.data, p.rows > 0, stream);
}

fa_status fa_rope(const fa_rope_args* args, void* stream) {
    fa::RopeParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, "rope", args->device, "x", p.x.data, p.batch > 0 && p.seqlen > 0, stream);
}

fa_status fa_swiglu(const fa_swiglu_args* args, void* stream) {
    fa::SwigluParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, "swiglu", args->device, "gate_up", p.gate_up.data, p.rows > 0, stream);
}

fa_status fa_sample(const fa_sample_args* args, void* stream) {
    fa::SampleParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, "sample", args->device, "logits", p.logits.data, p.batch > 0, stream);
}

fa_status fa_linear(const fa_linear_args* args, void* stream) {
    fa::LinearParams p;
    if (const fa_status status = fa::validate(args, &p); status != FA_OK) return status;
    return fa::run(p, "linear_gemv", args->device, "x", p.x.data, p.rows > 0, stream);
}

}  // extern "C"
