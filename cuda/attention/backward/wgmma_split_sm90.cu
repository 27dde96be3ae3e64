// wgmma_split_sm90.cu: the entry of wgmma_split_sm90.cuh, which is the kernel.
#include "attention/backward/wgmma_split_sm90.cuh"

namespace fa {

constexpr BackwardPlanId kSplit = BackwardPlanId::kD192V128Split;

cudaError_t backward_wgmma_split_sm90(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    return launch_backward_split<kSplit>(b, multiprocessors, stream);
}

size_t backward_wgmma_split_sm90_workspace(const BackwardParams& b) {
    return query_tiles_bytes(query_tiles(b, backward_plan(kSplit))) + 128;  // and room to align it
}

}  // namespace fa
