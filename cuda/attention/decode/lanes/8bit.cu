// lanes/8bit.cu: the kernel of lanes/kernel.cuh for 8-bit caches, with one row of fp16 or bf16, in clusters.
#include "attention/decode/lanes/kernel.cuh"

namespace fa {

cudaError_t decode_lanes_8bit(const DecodeParams& d, cudaStream_t stream) {
    const bool half = d.attention.dtype == DType::kFloat16;
    if (d.attention.cache.dtype == DType::kInt8)
        return half ? launch_lanes_8bit<__half, Int8>(d, stream) : launch_lanes_8bit<__nv_bfloat16, Int8>(d, stream);
    return half ? launch_lanes_8bit<__half, Float8>(d, stream) : launch_lanes_8bit<__nv_bfloat16, Float8>(d, stream);
}

}  // namespace fa
