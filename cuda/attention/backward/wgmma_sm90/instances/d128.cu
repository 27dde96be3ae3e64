#include "attention/backward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD128>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD128Options>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD128Softcap>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD128General>(const BackwardParams&, int, cudaStream_t);

}  // namespace fa
