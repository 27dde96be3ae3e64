// lanes.cu: the kernel of lanes.cuh on float32, with and without a cluster.
#include "attention/decode/lanes.cuh"

namespace fa {

cudaError_t decode_lanes(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream) {
    if (has_8bit_cache(d.attention)) return decode_lanes_8bit(d, stream);
    return d.attention.dtype == DType::kFloat32 ? launch_lanes_of<float>(d, append, device, stream)
                                                : decode_lanes_16bit(d, append, device, stream);
}

}  // namespace fa
