// wide_sm80/entry.cu: the decode kernel of wide_sm80/kernel.cuh.
#include "attention/decode/wide_sm80/kernel.cuh"

namespace fa {

cudaError_t decode_wide_sm80(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    return decode_reads_scores(d.attention) ? launch_wide<true>(d, device, stream) : launch_wide<false>(d, device, stream);
}

}  // namespace fa
