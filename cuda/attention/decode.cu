// decode.cu: a decode call: the kernel that the registry has chosen, and behind it the merge of what the pieces of its keys leave.
#include "attention/decode.h"

namespace fa {

size_t decode_workspace(DecodeKernel kernel, const AttentionParams& p, const DecodeDevice& device) {
    const DecodeParams d = decode_plan(kernel, p, device);
    return d.combines ? size_t(decode_slots(d)) * d.rows * (p.headdim_v + 1) * sizeof(float) + 128 : 0;
}

bool decode_fits(DecodeKernel kernel, const AttentionParams& p, const DecodeDevice& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    if (int64_t(p.seqlen_q) + p.seqlen_k >= kMost || rows >= kMost || rows * p.nheads_k >= kMost || rows * p.nheads_k * p.batch >= kMost)
        return false;
    const DecodeParams d = decode_plan(kernel, p, device);
    return decode_units(d) * decode_tiles(p, d.tile_shift) < kMost && decode_units(d) * (d.uniform ? d.pieces : 1) < kMost &&
           decode_units(d) * d.cluster < kMost;
}

cudaError_t decode(DecodeKernel kernel, const AttentionParams& p, const AppendParams* append, const DecodeDevice& device,
                   cudaStream_t stream) {
    DecodeParams d = decode_plan(kernel, p, device);
    d.partial = static_cast<float*>(align_up(p.workspace, 128));
    d.partial_lse = d.partial + decode_slots(d) * d.rows * p.headdim_v;
    d.after_append = device.compute >= 90 && (p.cache.programmatic || (p.cache.added > 0 && !append));
    cudaError_t error = cudaErrorInvalidValue;
    switch (kernel) {
        case DecodeKernel::kLanes:
        case DecodeKernel::kLanesCluster: error = decode_lanes(d, append, device, stream); break;
        case DecodeKernel::kSplit: error = decode_split_sm80(d, device, stream); break;
#if FA_WITH_WGMMA_SM90
        case DecodeKernel::kCluster: error = decode_cluster_sm90(d, stream); break;
        case DecodeKernel::kRing: error = decode_ring_sm90(d, device, stream); break;
#else
        default: break;
#endif
    }
    return error == cudaSuccess && d.combines ? decode_combine(d, device, stream) : error;
}

}  // namespace fa
