// decode.cu: a decode call: launches the kernel that the registry has chosen, then merges the partial results.
#include "attention/decode/common/decode.h"

namespace fa {

size_t decode_workspace(DecodeKernel kernel, const AttentionParams& p, const DeviceInfo& device) {
    const DecodeShape s = decode_shape(kernel, p, device);
    return s.combines ? size_t(decode_slots(s, p)) * s.rows * decode_row_floats(p) * sizeof(float) + 128 : 0;
}

bool decode_fits(DecodeKernel kernel, const AttentionParams& p, const DeviceInfo& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    const int64_t rows = rows_of_key_head(p);
    if (int64_t(p.seqlen_q) + p.seqlen_k >= kMost || rows >= kMost || rows * p.nheads_k >= kMost || rows * p.nheads_k * p.batch >= kMost)
        return false;
    const DecodeShape s = decode_shape(kernel, p, device);
    const int64_t units = decode_units(s, p);
    return units * decode_tiles(s, p) < kMost && units * (s.uniform ? s.pieces : 1) < kMost && units * s.cluster < kMost;
}

cudaError_t decode(DecodeKernel kernel, const AttentionParams& p, const AppendParams* append, const DeviceInfo& device,
                   cudaStream_t stream) {
    const DecodeShape shape = decode_shape(kernel, p, device);
    DecodeParams d = decode_params(shape, p);
    d.partial = static_cast<float*>(align_up(p.workspace, 128));
    d.partial_lse = d.partial + decode_slots(shape, p) * d.shape.rows * p.headdim_v;
    d.after_append = device.compute >= 90 && (p.cache.programmatic || (p.cache.added > 0 && !append));
    cudaError_t error = cudaErrorInvalidValue;
    switch (kernel) {
        case DecodeKernel::kLanes:
        case DecodeKernel::kLanesCluster: error = decode_lanes(d, append, device, stream); break;
        case DecodeKernel::kSplit: error = decode_split_sm80(d, device, stream); break;
        case DecodeKernel::kWide: error = decode_wide_sm80(d, device, stream); break;
#if FA_WITH_WGMMA_SM90
        case DecodeKernel::kCluster: error = decode_cluster_sm90(d, stream); break;
        case DecodeKernel::kRing: error = decode_ring_sm90(d, device, stream); break;
#else
        default: break;
#endif
    }
    const int64_t beside = 2 * device.multiprocessors;  // blocks of the merge that fit next to those of the kernel, and wait there
    return error == cudaSuccess && d.shape.combines ? decode_combine(d, beside, device, stream) : error;
}

}  // namespace fa
