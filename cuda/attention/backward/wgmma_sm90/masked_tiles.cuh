// wgmma_sm90/masked_tiles.cuh: the launch of the kernels of masked_tiles.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/backward/wgmma_sm90/masked_tiles.h"

namespace fa {

// Fills the arrays of `to` for a call with a mask by blocks or of pairs.
cudaError_t launch_masked_tiles(const AttentionParams& p, const MaskedTiles& to, cudaStream_t stream);

}  // namespace fa
