// ring_sm90/entry.cu: the decode kernel of ring_sm90/kernel.cuh and its instantiations.
#include "attention/decode/ring_sm90/kernel.cuh"

namespace fa {

cudaError_t decode_ring_sm90(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    const AttentionParams& p = d.attention;
    if (has_8bit_cache(p))
        return p.cache.dtype == DType::kInt8 ? launch_ring<Int8, 128>(d, device, stream) : launch_ring<Float8, 128>(d, device, stream);
    const bool half = p.dtype == DType::kFloat16;
    if (decode_bucket(p) == 64)
        return half ? launch_ring<__half, 64>(d, device, stream) : launch_ring<__nv_bfloat16, 64>(d, device, stream);
    return half ? launch_ring<__half, 128>(d, device, stream) : launch_ring<__nv_bfloat16, 128>(d, device, stream);
}

}  // namespace fa
