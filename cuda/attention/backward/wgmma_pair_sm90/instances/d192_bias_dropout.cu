#include "attention/backward/wgmma_pair_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_backward_wgmma<BackwardPlanId::kD192BiasDropout>(const BackwardParams&, int, cudaStream_t);

}  // namespace fa
