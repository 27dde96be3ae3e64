// prefix_sm80/8bit.cu: the prefix pass of prefix_sm80/kernel.cuh for e4m3 and int8 caches.
#include "attention/decode/prefix_sm80/kernel.cuh"

namespace fa {

cudaError_t attend_to_prefixes_8bit(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    if (d.attention.cache.dtype == DType::kInt8) return launch_prefix_of<Int8>(d, rules, device, stream);
    return launch_prefix_of<Float8>(d, rules, device, stream);
}

}  // namespace fa
