#include "attention/forward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_wgmma<WgmmaPlanId::kD64Bias>(const AttentionParams&, int, cudaStream_t);
template cudaError_t launch_wgmma<WgmmaPlanId::kD64ShortBias>(const AttentionParams&, int, cudaStream_t);

}  // namespace fa
