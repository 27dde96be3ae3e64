// cluster_sm90/entry.cu: the decode kernel of cluster_sm90/kernel.cuh and its instantiations.
#include "attention/decode/cluster_sm90/kernel.cuh"

namespace fa {

cudaError_t decode_cluster_sm90(const DecodeParams& d, cudaStream_t stream) {
    const AttentionParams& p = d.attention;
    const auto launch = [&](auto columns) {
        constexpr int kD = decltype(columns)::value;
        if (has_8bit_cache(p))
            return p.cache.dtype == DType::kInt8 ? launch_cluster<Int8, kD>(d, stream) : launch_cluster<Float8, kD>(d, stream);
        return p.dtype == DType::kFloat16 ? launch_cluster<__half, kD>(d, stream) : launch_cluster<__nv_bfloat16, kD>(d, stream);
    };
    using std::integral_constant;
    return decode_bucket(p) == 64 ? launch(integral_constant<int, 64>{}) : launch(integral_constant<int, 128>{});
}

}  // namespace fa
