// lanes/16bit.cu: the kernel of lanes/kernel.cuh for fp16 and bf16, in clusters.
#include "attention/decode/lanes/kernel.cuh"

namespace fa {

cudaError_t decode_lanes_16bit(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream) {
    return d.attention.dtype == DType::kFloat16 ? launch_lanes_of<__half>(d, append, device, stream)
                                                : launch_lanes_of<__nv_bfloat16>(d, append, device, stream);
}

}  // namespace fa
