// wgmma_sm90/masked_tiles.cuh: the launch of the kernels of masked_tiles.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/backward/wgmma_sm90/masked_tiles.h"
#include "attention/common/interval_bounds.cuh"

namespace fa {

// Writes the walks of a call with a mask by blocks or of pairs to `workspace`, which has masked_tiles_bytes, and sets *to. in_order: with
// SeenTile::before, else 0.
cudaError_t launch_masked_tiles(const AttentionParams& p, const BackwardPlan& plan, bool in_order, void* workspace, MaskedTiles* to,
                                cudaStream_t stream);
// The same with a mask by intervals, whose bounds have been launched: interval_tiles_bytes.
cudaError_t launch_interval_tiles(const AttentionParams& p, const BackwardPlan& plan, const IntervalBounds& bounds, void* workspace,
                                  MaskedTiles* to, cudaStream_t stream);

}  // namespace fa
