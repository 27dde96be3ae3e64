#include "attention/split/wgmma_split_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_split<SplitTile::kD128Rows192>(const DecodeParams&, const SplitShape&, unsigned, cudaStream_t);

}  // namespace fa
