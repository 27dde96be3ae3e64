// kernels.h: the entry of every GPU kernel file. Each launches on `stream` and returns what the CUDA runtime said of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "params.h"

namespace fa {

cudaError_t forward_naive(const AttentionParams& params, cudaStream_t stream);
size_t forward_naive_workspace(const AttentionParams& params);  // bytes: the whole S, and what the softmax leaves of it

cudaError_t forward_minimal(const AttentionParams& params, cudaStream_t stream);

cudaError_t merge(const MergeParams& params, cudaStream_t stream);

}  // namespace fa
