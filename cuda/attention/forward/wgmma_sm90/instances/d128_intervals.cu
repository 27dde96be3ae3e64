#include "attention/forward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_wgmma<WgmmaPlanId::kD128Intervals>(const AttentionParams&, int, cudaStream_t);
template cudaError_t launch_wgmma<WgmmaPlanId::kD128MiddleIntervals>(const AttentionParams&, int, cudaStream_t);

}  // namespace fa
