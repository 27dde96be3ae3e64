#include "attention/backward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD64>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD64Options>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD64Softcap>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD64General>(const BackwardParams&, int, cudaStream_t);

}  // namespace fa
