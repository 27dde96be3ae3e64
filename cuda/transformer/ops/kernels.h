// kernels.h: the launch functions of the GPU kernels for the operations around attention. Each launches on `stream` and returns the status
// of the launch. `programmatic` in the parameters is true only if the device has programmatic dependent launch (sm_90).
#pragma once

#include <cuda_runtime_api.h>

#include "device/device_info.h"
#include "transformer/ops/ops.h"
#include "transformer/ops/sampling.h"

namespace fa {

int64_t rms_norm_blocks(const RmsNormParams& params);
int64_t rope_blocks(const RopeParams& params);
int64_t swiglu_blocks(const SwigluParams& params);
int64_t sample_blocks(const SampleParams& params, const DeviceInfo& gpu);
int64_t linear_gemv_blocks(const LinearParams& params, const DeviceInfo& gpu);
int64_t linear_small_blocks(const LinearParams& params, const DeviceInfo& gpu);
int64_t linear_mma_blocks(const LinearParams& params, const DeviceInfo& gpu);

cudaError_t rms_norm(const RmsNormParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t rope(const RopeParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t swiglu(const SwigluParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t sample(const SampleParams& params, const DeviceInfo& gpu, cudaStream_t stream);

// The kernels of linear, sm_80 and newer. linear_gemv serves every call whose rows of x fit into shared memory; the other kernels are
// faster for the calls that they serve.
cudaError_t linear_gemv(const LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);
bool linear_gemv_fits(const LinearParams& params, const DeviceInfo& gpu);
cudaError_t linear_small(const LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);  // one row, small matrices
bool linear_small_serves(const LinearParams& params, const DeviceInfo& gpu);
cudaError_t linear_mma(const LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);  // a few rows, small matrices of 16 bits
bool linear_mma_serves(const LinearParams& params, const DeviceInfo& gpu);

}  // namespace fa
