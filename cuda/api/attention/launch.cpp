// launch.cpp: the operations beside attention, which have one kernel per device: appending to a cache, merging, rounding to float8.
#include "api/attention/registry.h"
#include "api/common/serve.h"
#include "cpu/attention/kernels.h"

#if FA_WITH_CUDA
#include "attention/kernels.h"
#endif

namespace fa {

const char* key_sums_refuses([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] const DeviceInfo& device,
                             [[maybe_unused]] char* text, [[maybe_unused]] size_t size) {
#if FA_WITH_CUDA
    if (device.index >= 0 && key_sums_blocks(p) > kMostBlocks)
        return say(text, size, "key_sums of batch=%d x nheads=%d x seqlen_k=%d needs more blocks than a grid has", p.batch, p.nheads,
                   p.seqlen_k);
#endif
    return nullptr;
}

fa_status launch_key_sums(const AttentionParams& p, [[maybe_unused]] const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (p.seqlen_k == 0 || (p.cu_seqlens_q && p.total_k == 0)) return FA_OK;
#if FA_WITH_CUDA
#if FA_WITH_MMA_SM80
    if (device.compute >= 80 && p.dtype != DType::kFloat32 && p.headdim <= 256)
        return launched("key_sums_sm80", key_sums_sm80(p, device, static_cast<cudaStream_t>(stream)));
#endif
    return launched("key_sums", key_sums(p, device, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

fa_status clear_statistics(const AttentionParams& p, const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (device.index < 0) {
        if (p.max_score) cpu::clear_max_score(p);
        if (p.key_sums) cpu::clear_key_sums(p);
        return FA_OK;
    }
#if FA_WITH_CUDA
    const CurrentDevice scope(device.index);
    if (scope.status() != FA_OK) return scope.status();
    if (p.max_score)
        if (const fa_status status = launched("max_score", clear_max_score(p, nullptr, static_cast<cudaStream_t>(stream))); status != FA_OK)
            return status;
    return p.key_sums ? launch_key_sums(p, device, stream) : FA_OK;
#else
    return FA_UNSUPPORTED;
#endif
}

const char* scores_refuse([[maybe_unused]] const BackwardParams& b, [[maybe_unused]] const DeviceInfo& device, [[maybe_unused]] char* text,
                          [[maybe_unused]] size_t size) {
#if FA_WITH_CUDA
    if (device.index < 0) return nullptr;
    const AttentionParams& p = b.forward;
    if (backward_scores_blocks(b) > kMostBlocks)
        return say(text, size, "dbias of batch=%d x nheads=%d x %d x %d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q,
                   p.seqlen_k);
    if (backward_delta_blocks(p) > kMostBlocks)
        return say(text, size, "gradients of batch=%d x nheads=%d x seqlen_q=%d need more blocks than a grid has", p.batch, p.nheads,
                   p.seqlen_q);
#endif
    return nullptr;
}

size_t scores_workspace([[maybe_unused]] const BackwardParams& b, [[maybe_unused]] const DeviceInfo& device) {
#if FA_WITH_CUDA
    if (device.index >= 0) return backward_scores_workspace(b, device);
#endif
    return 0;
}

fa_status launch_scores([[maybe_unused]] const BackwardParams& b, [[maybe_unused]] const DeviceInfo& device,
                        [[maybe_unused]] void* stream) {
#if FA_WITH_CUDA
    if (device.index >= 0) return launched("backward_scores", backward_scores(b, device, static_cast<cudaStream_t>(stream)));
#endif
    return FA_OK;
}

fa_status launch_append(const AppendParams& params, const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (device.index < 0) return on_host([&] { cpu::kvcache_append(params); });
#if FA_WITH_CUDA
    if (kvcache_append_blocks(params) > kMostBlocks)
        return fail(FA_UNSUPPORTED, "batch=%d x seqlen_new=%d rows of %d heads need more blocks than a grid has", params.attention.batch,
                    params.seqlen_new, params.attention.nheads_k);
    return launched("kvcache_append", kvcache_append(params, device, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

fa_status launch_merge(const MergeParams& params, fa_device device, [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(device, params.out_a.data, &info); status != FA_OK) return status;
    if (params.batch == 0 || params.seqlen == 0) return FA_OK;
    if (device == FA_CPU) return on_host([&] { cpu::merge(params); });
#if FA_WITH_CUDA
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return launched("merge", merge(params, info, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

fa_status launch_quantize(const QuantizeParams& params, fa_device device, [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(device, params.x.data, &info); status != FA_OK) return status;
    if (params.batch == 0) return FA_OK;
    if (device == FA_CPU) return on_host([&] { cpu::quantize_fp8(params); });
#if FA_WITH_CUDA
    if (quantize_fp8_blocks(params) > kMostBlocks)
        return fail(FA_UNSUPPORTED, "batch=%d x nheads=%d x seqlen=%d needs more blocks than a grid has", params.batch, params.nheads,
                    params.seqlen);
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return launched("quantize_fp8", quantize_fp8(params, info, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

}  // namespace fa
