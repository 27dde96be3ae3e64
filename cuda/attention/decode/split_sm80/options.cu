// split_sm80/options.cu: the decode kernel of split_sm80/kernel.cuh for fp16 and bf16 with the options of decode_reads_scores.
#include "attention/decode/split_sm80/kernel.cuh"

namespace fa {

cudaError_t decode_split_options(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    return d.attention.dtype == DType::kFloat16 ? launch_split_of<__half, true>(d, device, stream)
                                                : launch_split_of<__nv_bfloat16, true>(d, device, stream);
}

}  // namespace fa
