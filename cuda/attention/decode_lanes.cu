// decode_lanes.cu: the kernel of decode_lanes.cuh on float32, with and without a cluster.
#include "attention/decode_lanes.cuh"

namespace fa {

cudaError_t decode_lanes(const DecodeStep& step, const DecodeDevice& device, cudaStream_t stream) {
    return step.decode.attention.dtype == DType::kFloat32 ? launch_lanes<float>(step, device, stream)
                                                          : decode_lanes_16bit(step, device, stream);
}

}  // namespace fa
