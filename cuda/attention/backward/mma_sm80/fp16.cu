// mma_sm80/fp16.cu: the kernels of mma_sm80/kernel.cuh for fp16.
#include "attention/backward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {

cudaError_t backward_mma_sm80_fp16(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    return launch<__half>(b, tile_memory(device), stream);
}

}  // namespace fa
