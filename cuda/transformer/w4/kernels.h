// kernels.h: the launch functions of the GPU kernels for 4-bit weights. Each launches on `stream` and returns the status of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "transformer/ops/kernels.h"
#include "transformer/w4/common/params.h"

namespace fa {

cudaError_t w4_quantize(const W4QuantizeParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t w4_dequantize(const W4DequantizeParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t w4_pack(const W4PackParams& params, const DeviceInfo& device, cudaStream_t stream);

// The products. The functions beside each say what it can serve and how many bytes of workspace it needs: uninitialised, aligned to 128.

// One row of x, at most 4096 columns, sm_80.
cudaError_t small_w4(const W4LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);
const char* small_w4_refuses(const W4LinearParams& params, const DeviceInfo& gpu, char* text,
                             size_t size);  // the reason, or nullptr if it serves the call
int64_t small_w4_blocks(const W4LinearParams& params, const DeviceInfo& gpu);

// Up to 32 rows of x, Hopper.
cudaError_t few_w4_sm90(const W4LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);
bool few_w4_sm90_fits(const W4LinearParams& params, const DeviceInfo& gpu);
int few_w4_sm90_blocks_per_sm(const W4LinearParams& params, const DeviceInfo& gpu);
size_t few_w4_sm90_workspace(const W4LinearParams& params, const DeviceInfo& gpu);

// Any number of rows, sm_80.
cudaError_t mma_w4(const W4LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);
size_t mma_w4_workspace(const W4LinearParams& params, const DeviceInfo& gpu);

// Any number of rows, Hopper: in tiles of 32 and 64 rows of x (few), or of 128 and 256.
cudaError_t wgmma_w4_few_sm90(const W4LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);
cudaError_t wgmma_w4_sm90(const W4LinearParams& params, const DeviceInfo& gpu, cudaStream_t stream);
bool wgmma_w4_few_sm90_wins(const W4LinearParams& params, const DeviceInfo& gpu);     // whether the small tiles are estimated to be faster
size_t wgmma_w4_sm90_workspace(const W4LinearParams& params, const DeviceInfo& gpu);  // for both

// A chain of products in one launch, Hopper; needs no workspace.
cudaError_t chain_w4_sm90(const W4ChainParams& params, const DeviceInfo& gpu, cudaStream_t stream);
const char* chain_w4_sm90_refuses(const W4ChainParams& params, const DeviceInfo& gpu, char* text, size_t size);

}  // namespace fa
