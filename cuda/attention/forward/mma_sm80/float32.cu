// mma_sm80/float32.cu: the tensor-core kernel of mma_sm80/kernel.cuh for float32 with float32's accuracy: mma.m16n8k8 on the two tf32 parts
// of each value, three for each product. New against tf32.cu:
//   - A warp splits Q, K, V and P into parts in registers (device/split_tf32.cuh). Shared memory holds float32 as it was copied.
//   - Each 8 summed elements have an accumulator of their own, which float32 additions join to S and O.
//   - Infinity and NaN have no parts. Where a sum of a block is not finite, the block computes its rows again with code that gives what
//     float32 gives.
// Bound by mma.sync: three for each that tf32 takes.
#include "attention/forward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {

cudaError_t forward_mma_float32_sm80_if(const int* wanted, const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    if (p.headdim > 256 || p.headdim_v > 256) return forward_mma_float32_sm80_wide(p, device, stream);
    if (p.cache.block_table) return forward_mma_float32_sm80_paged(p, device, stream);
    AttentionParams params = p;
    params.workspace = const_cast<int*>(wanted);  // nullptr: the kernel always runs. It has no other use for a workspace
    return launch<SplitFloat>(params, device.multiprocessors, tile_memory(device), stream);
}
cudaError_t forward_mma_float32_sm80(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return forward_mma_float32_sm80_if(nullptr, p, device, stream);
}

}  // namespace fa
