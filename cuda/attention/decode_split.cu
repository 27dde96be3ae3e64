// decode_split.cu: the decode kernel of decode_split.cuh on fp16 and bf16 caches.
#include "attention/decode_split.cuh"

namespace fa {

cudaError_t decode_split_sm80(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream) {
    if (decode_bytes(d.attention)) return decode_split_8bit(d, device, stream);
    return d.attention.dtype == DType::kFloat16 ? launch_decode<__half>(d, device, stream)
                                                : launch_decode<__nv_bfloat16>(d, device, stream);
}

}  // namespace fa
