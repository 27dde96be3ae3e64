// kernels.h: the entry of every GPU kernel beside attention. Each launches on `stream` and returns what the CUDA runtime said of it.
// `programmatic` of the parameters is true only where the device has programmatic dependent launch (sm_90).
#pragma once

#include <cuda_runtime_api.h>

#include "ops/ops.h"
#include "ops/sampling.h"

namespace fa {

struct GpuSize {
    int multiprocessors;
    size_t shared_memory;  // bytes one block can opt in to
};

int64_t rms_norm_blocks(const RmsNormParams& params);
int64_t rope_blocks(const RopeParams& params);
int64_t swiglu_blocks(const SwigluParams& params);
int64_t linear_gemv_blocks(const LinearParams& params, const GpuSize& gpu);

cudaError_t rms_norm(const RmsNormParams& params, cudaStream_t stream);
cudaError_t rope(const RopeParams& params, cudaStream_t stream);
cudaError_t swiglu(const SwigluParams& params, cudaStream_t stream);
cudaError_t sample(const SampleParams& params, cudaStream_t stream);  // one block a row

// sm_80 and newer; a row of x has to fit into shared memory.
cudaError_t linear_gemv(const LinearParams& params, const GpuSize& gpu, cudaStream_t stream);
bool linear_gemv_fits(const LinearParams& params, const GpuSize& gpu);

}  // namespace fa
