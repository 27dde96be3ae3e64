// decode_split.cu: the decode kernel of decode_split.cuh on fp16 and bf16 caches, and the launches of a call.
#include "attention/decode_split.cuh"

namespace fa {

size_t decode_split_workspace(const AttentionParams& p, const DecodeDevice& device) {
    const DecodeParams d = decode_plan(p, device);
    return d.combines ? size_t(decode_slots(d)) * d.rows * (p.headdim_v + 1) * sizeof(float) + 128 : 0;
}

bool decode_split_fits(const AttentionParams& p, const DecodeDevice& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    if (int64_t(p.seqlen_q) + p.seqlen_k >= kMost || rows >= kMost || rows * p.nheads_k >= kMost || rows * p.nheads_k * p.batch >= kMost)
        return false;
    const DecodeParams d = decode_plan(p, device);
    return decode_units(d) * decode_tiles(p, d.tile_shift) < kMost && decode_units(d) * (d.uniform ? d.pieces : 1) < kMost &&
           decode_units(d) * d.cluster < kMost;
}

bool decode_split_appends(const AppendParams& append, const DecodeDevice& device) {
    return append.seqlen_new == 1 && decode_cluster(append.attention, device) > 0;
}

cudaError_t decode_split(const AttentionParams& p, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream) {
    DecodeParams d = decode_plan(p, device);
    d.partial = static_cast<float*>(align_up(p.workspace, 128));
    d.partial_lse = d.partial + decode_slots(d) * d.rows * p.headdim_v;
    d.after_append = device.compute >= 90 && (p.cache.programmatic || (p.cache.added > 0 && !append));
    cudaError_t error;
    if (d.row_warps) {
        error = decode_lanes(d, append, device, stream);
#if FA_WITH_WGMMA_SM90
    } else if (d.tensor_cores) {
        error = decode_cluster_sm90(d, stream);
    } else if (d.ring) {
        error = decode_ring(d, device, stream);
#endif
    } else {
        error = decode_bytes(p)              ? decode_split_8bit(d, device, stream)
                : p.dtype == DType::kFloat16 ? launch_decode<__half>(d, device, stream)
                                             : launch_decode<__nv_bfloat16>(d, device, stream);
    }
    return error == cudaSuccess && d.combines ? decode_combine(d, device, stream) : error;
}

}  // namespace fa
