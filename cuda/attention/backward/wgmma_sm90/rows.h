// wgmma_sm90/rows.h: the kernels before and after the main kernel of the Hopper backward.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/params.h"

namespace fa {

// after_lists: kernels that make lists of tiles (masked_tiles.cu) were launched just before, and this one may run beside them.
cudaError_t backward_rows_before(const BackwardParams& b, const QueryTiles& tiles, bool after_lists, cudaStream_t stream);
cudaError_t backward_rows_after(const BackwardParams& b, const QueryTiles& tiles, cudaStream_t stream);

}  // namespace fa
