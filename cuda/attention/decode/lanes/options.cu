// lanes/options.cu: decode_lanes_sm80 of lanes/kernel.cuh for the calls of decode_scores_are_natural, in float32.
#include "attention/decode/lanes/kernel.cuh"

namespace fa {

cudaError_t decode_lanes_options(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    return launch_lanes_of<float, true>(d, nullptr, device, stream);
}

}  // namespace fa
