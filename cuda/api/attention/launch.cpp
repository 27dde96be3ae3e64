// launch.cpp: the operations beside attention that have one kernel on each device: appending to a cache, merging, rounding to float8.
#include "api/attention/registry.h"
#include "api/common/serve.h"
#include "cpu/attention/kernels.h"

#if FA_WITH_CUDA
#include "attention/kernels.h"
#endif

namespace fa {

fa_status clear_statistics(const AttentionParams& p, const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (!p.max_score) return FA_OK;
    if (device.index < 0) return cpu::clear_max_score(p), FA_OK;
#if FA_WITH_CUDA
    const CurrentDevice scope(device.index);
    if (scope.status() != FA_OK) return scope.status();
    return launched("max_score", clear_max_score(p, nullptr, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

fa_status launch_append(const AppendParams& params, const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (device.index < 0) return on_host([&] { cpu::kvcache_append(params); });
#if FA_WITH_CUDA
    if (kvcache_append_blocks(params) > kMaxGrid)
        return fail(FA_UNSUPPORTED, "batch=%d x seqlen_new=%d rows of %d heads need more blocks than a grid has", params.attention.batch,
                    params.seqlen_new, params.attention.nheads_k);
    return launched("kvcache_append", kvcache_append(params, static_cast<cudaStream_t>(stream)));
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
    return launched("merge", merge(params, static_cast<cudaStream_t>(stream)));
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
    if (quantize_fp8_blocks(params) > kMaxGrid)
        return fail(FA_UNSUPPORTED, "batch=%d x nheads=%d x seqlen=%d needs more blocks than a grid has", params.batch, params.nheads,
                    params.seqlen);
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return launched("quantize_fp8", quantize_fp8(params, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

}  // namespace fa
