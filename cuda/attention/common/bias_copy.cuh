// bias_copy.cuh: the launch of bias_copy.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/common/bias_copy.h"

namespace fa {

// Copies to `workspace`, which has bias_copy_bytes(copy), and gives the call as kernels see it after that.
cudaError_t launch_bias_copy(const AttentionParams& p, const BiasCopy& copy, void* workspace, AttentionParams* with_copy,
                             cudaStream_t stream);

}  // namespace fa
