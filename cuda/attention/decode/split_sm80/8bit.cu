// split_sm80/8bit.cu: the decode kernel of split_sm80/kernel.cuh for e4m3 and int8 caches.
#include "attention/decode/split_sm80/kernel.cuh"

namespace fa {

cudaError_t decode_split_8bit(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    if (d.attention.cache.dtype == DType::kInt8) return launch_split_of<Int8>(d, device, stream);
    return launch_split_of<Float8>(d, device, stream);
}

}  // namespace fa
