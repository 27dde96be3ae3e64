#include "attention/forward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_wgmma<WgmmaPlanId::kD128BiasOptions>(const AttentionParams&, int, cudaStream_t);

}  // namespace fa
