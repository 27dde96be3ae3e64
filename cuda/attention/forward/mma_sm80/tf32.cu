// mma_sm80/tf32.cu: the tensor-core kernel of mma_sm80/kernel.cuh for fp32 inputs and allow_tf32: mma.m16n8k8.
//
// Q, K, V and P are rounded to nearest tf32 (8 bits of exponent, as in fp32; 10 bits of mantissa, as in fp16). Products are summed in fp32.
// New against 16 bits:
//   - Q, K and V are rounded once, in shared memory, by the thread that copied them, before the barrier that hands them to other threads.
//   - ldmatrix moves 8 x 16 bytes regardless of type, so Q and K are read as before. It cannot transpose fp32, so V is read 16 bytes at a
//     time: lane 4 g + q reads columns 4 g .. 4 g + 3 of keys 2 q and 2 q + 1.
//   - Column 4 g + t is taken as column g of tile t, so every lane has eight neighbouring columns of O to store.
//   - Key 2 q is taken as k = q and key 2 q + 1 as k = q + 4, so an accumulator tile of S is an A fragment without any shuffle. The
//     sum over keys may run in any order.
#include "attention/forward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {

cudaError_t forward_mma_tf32_sm80(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return launch<float>(p, device.multiprocessors, tile_memory(device), stream);
}

}  // namespace fa
