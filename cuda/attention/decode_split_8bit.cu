// decode_split_8bit.cu: the decode kernel of decode_split.cuh on e4m3 and int8 caches.
#include "attention/decode_split.cuh"

namespace fa {

cudaError_t decode_split_8bit(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream) {
    if (d.attention.cache.dtype == DType::kInt8) return launch_decode<Int8>(d, device, stream);
    return launch_decode<Float8>(d, device, stream);
}

}  // namespace fa
