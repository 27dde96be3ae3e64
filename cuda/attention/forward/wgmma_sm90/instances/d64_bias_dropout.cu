#include "attention/forward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_wgmma<WgmmaPlanId::kD64BiasDropout>(const AttentionParams&, int, cudaStream_t);
template cudaError_t launch_wgmma<WgmmaPlanId::kD64BiasFloat32Dropout>(const AttentionParams&, int, cudaStream_t);

}  // namespace fa
