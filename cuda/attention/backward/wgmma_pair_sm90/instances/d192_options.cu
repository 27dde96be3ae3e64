#include "attention/backward/wgmma_pair_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192V128Options>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192Options>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192Softcap>(const BackwardParams&, int, cudaStream_t);

}  // namespace fa
