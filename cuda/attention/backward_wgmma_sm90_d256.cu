#include "backward_wgmma_sm90_pair.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD256>(const BackwardParams&, int, int, cudaStream_t);
template cudaError_t launch_backward_wgmma<BackwardPlanId::kD256General>(const BackwardParams&, int, int, cudaStream_t);

}  // namespace fa
