#include "attention/split/wgmma_split_sm90/kernel.cuh"

namespace fa {

template cudaError_t launch_split<SplitTile::kD256Rows64>(const DecodeParams&, const SplitShape&, unsigned, cudaStream_t);
template cudaError_t launch_split<SplitTile::kD256Rows128>(const DecodeParams&, const SplitShape&, unsigned, cudaStream_t);

}  // namespace fa
