// seen_blocks.cuh: the launch of the kernel that fills seen_blocks.h's part of a workspace.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/common/seen_blocks.h"

namespace fa {

// Writes what rows of blocks see to `workspace`, which has seen_blocks_bytes, and sets *blocks. The call has block_mask, a mask or both,
// and is dense if it has a mask. sm_80 and newer.
cudaError_t launch_seen_blocks(const AttentionParams& p, PairWords order, void* workspace, SeenBlocks* blocks, cudaStream_t stream);

}  // namespace fa
