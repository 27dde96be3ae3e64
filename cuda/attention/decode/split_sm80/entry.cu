// split_sm80/entry.cu: the decode kernel of split_sm80/kernel.cuh for fp16 and bf16 caches.
#include "attention/decode/split_sm80/kernel.cuh"

namespace fa {

cudaError_t decode_split_sm80(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    if (has_8bit_cache(d.attention)) return decode_split_8bit(d, device, stream);
    if (decode_reads_scores(d.attention)) return decode_split_options(d, device, stream);
    return d.attention.dtype == DType::kFloat16 ? launch_split_of<__half>(d, device, stream)
                                                : launch_split_of<__nv_bfloat16>(d, device, stream);
}

}  // namespace fa
