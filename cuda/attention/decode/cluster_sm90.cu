// cluster_sm90.cu: the decode kernel of cluster_sm90.cuh and its instantiations.
#include "attention/decode/cluster_sm90.cuh"

namespace fa {

cudaError_t decode_cluster_sm90(const DecodeParams& d, cudaStream_t stream) {
    const AttentionParams& p = d.attention;
    if (has_8bit_cache(p))
        return p.cache.dtype == DType::kInt8 ? launch_cluster<Int8, 128>(d, stream) : launch_cluster<Float8, 128>(d, stream);
    const bool half = p.dtype == DType::kFloat16;
    if (decode_bucket(p) == 64) return half ? launch_cluster<__half, 64>(d, stream) : launch_cluster<__nv_bfloat16, 64>(d, stream);
    return half ? launch_cluster<__half, 128>(d, stream) : launch_cluster<__nv_bfloat16, 128>(d, stream);
}

}  // namespace fa
