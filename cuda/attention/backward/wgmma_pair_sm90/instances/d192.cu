#include "attention/backward/wgmma_pair_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192V128>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192V128General>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192>(const BackwardParams&, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192General>(const BackwardParams&, int, cudaStream_t);

}  // namespace fa
