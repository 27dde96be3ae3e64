// mma_sm80/entry.cu: the tensor-core kernel of mma_sm80/kernel.cuh for fp16 and bf16: mma.m16n8k16.
#include "attention/forward/mma_sm80/kernel.cuh"

namespace fa {

cudaError_t forward_mma_sm80(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    if (p.headdim > 256 || p.headdim_v > 256) return forward_mma_sm80_wide(p, device, stream);
    if (p.cache.block_table) return forward_mma_sm80_paged(p, device, stream);
    if (p.dtype == DType::kFloat16) return launch<__half>(p, device.multiprocessors, tile_memory(device), stream);
    return launch<__nv_bfloat16>(p, device.multiprocessors, tile_memory(device), stream);
}

}  // namespace fa
