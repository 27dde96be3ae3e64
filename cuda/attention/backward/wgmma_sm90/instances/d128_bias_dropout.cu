#include "attention/backward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD128BiasDropout>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD128BiasFloat32Dropout>(const BackwardParams&, int, cudaStream_t);

}  // namespace fa
