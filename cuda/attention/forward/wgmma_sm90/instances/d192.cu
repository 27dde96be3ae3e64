#include "attention/forward/wgmma_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_wgmma<WgmmaPlanId::kD192V128>(const AttentionParams&, int, cudaStream_t);
template cudaError_t launch_wgmma<WgmmaPlanId::kD192>(const AttentionParams&, int, cudaStream_t);
template cudaError_t launch_wgmma<WgmmaPlanId::kD192General>(const AttentionParams&, int, cudaStream_t);

}  // namespace fa
