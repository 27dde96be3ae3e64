// kernels.h: the entry of every GPU kernel for 4-bit weights. Each launches on `stream` and returns what the CUDA runtime said of it.
// `programmatic` of the parameters is true only where the device has programmatic dependent launch (sm_90).
#pragma once

#include <cuda_runtime_api.h>

#include "linear/linear.h"
#include "ops/kernels.h"

namespace fa {

cudaError_t w4_quantize(const W4QuantizeParams& params, cudaStream_t stream);
cudaError_t w4_dequantize(const W4DequantizeParams& params, cudaStream_t stream);
cudaError_t w4_pack(const W4PackParams& params, cudaStream_t stream);

// The products, each with the bytes of workspace it needs, uninitialised and aligned to 128.
cudaError_t small_w4(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);  // one row, sm_80; needs none
const char* small_w4_refuses(const W4LinearParams& params);                                   // what it cannot do; nullptr = nothing
bool small_w4_fits(const W4LinearParams& params, const GpuSize& gpu);                         // all blocks run at once
cudaError_t gemv_w4(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);   // up to 16 rows, sm_80
int64_t gemv_w4_workspace(const W4LinearParams& params, const GpuSize& gpu);
cudaError_t gemv_w4_sm90(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);  // up to 8 rows that fit, Hopper
bool gemv_w4_sm90_fits(const W4LinearParams& params, const GpuSize& gpu);
cudaError_t few_w4_sm90(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);       // up to 32 rows, Hopper
cudaError_t few_w4_sm90_half(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);  // the same in blocks of half an SM
bool few_w4_sm90_fits(const W4LinearParams& params, const GpuSize& gpu);
int64_t few_w4_sm90_workspace(const W4LinearParams& params, const GpuSize& gpu);
cudaError_t mma_w4(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);  // any rows, sm_80
int64_t mma_w4_workspace(const W4LinearParams& params, const GpuSize& gpu);
cudaError_t wgmma_w4_sm90(const W4LinearParams& params, const GpuSize& gpu, cudaStream_t stream);  // any rows, Hopper
cudaError_t wgmma_w4_few_sm90(const W4LinearParams& params, const GpuSize& gpu,
                              cudaStream_t stream);  // the same in tiles of 32 and 64 rows
bool wgmma_w4_few_sm90_wins(const W4LinearParams& params, const GpuSize& gpu);
int64_t wgmma_w4_sm90_workspace(const W4LinearParams& params, const GpuSize& gpu);  // of either

// Products one behind the other in one launch, Hopper; needs no workspace.
cudaError_t chain_w4_sm90(const W4ChainParams& params, const GpuSize& gpu, cudaStream_t stream);
const char* chain_w4_sm90_refuses(const W4ChainParams& params, const GpuSize& gpu, char* text, size_t size);  // nullptr = nothing

}  // namespace fa
