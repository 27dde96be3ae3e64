#include "attention/forward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_wgmma<WgmmaPlanId::kD96>(const AttentionParams&, int, cudaStream_t);
template cudaError_t launch_wgmma<WgmmaPlanId::kD96General>(const AttentionParams&, int, cudaStream_t);

}  // namespace fa
