// kernels.h: the entry points of all GPU kernel files. A kernel takes its parameters, workspace included, the device that runs it, and the
// stream on which it is launched, and returns the CUDA runtime's status of the launch. The registries
// (api/attention) say what each can serve.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "attention/common/params.h"
#include "device/device_info.h"

namespace fa {

// Sets max_score to -inf; the forward kernels then raise it. Also sets *counter = 0 unless counter is nullptr. The forward kernels call
// this themselves.
cudaError_t clear_max_score(const AttentionParams& params, int* counter, cudaStream_t stream);

cudaError_t forward_naive(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);  // gives key_sums, too
size_t forward_naive_workspace(const AttentionParams&, const DeviceInfo&);  // bytes: the whole S, and the statistics of its softmax

cudaError_t forward_minimal(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);

// key_sums from the lse that a forward kernel has left: key_sums takes every call, key_sums_sm80 fp16 and bf16 of head dims up to 256, on
// sm_80 and newer. The workspace holds three floats per row, laid out like lse.
cudaError_t key_sums(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t key_sums_sm80(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
int64_t key_sums_blocks(const AttentionParams& params);  // blocks of the larger of the two grids; at most 2^31 - 1

cudaError_t forward_mma_sm80(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
// Called by forward_mma_sm80: _paged for pages of a cache, _wide for head dims above 256 (with or without pages).
cudaError_t forward_mma_sm80_paged(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t forward_mma_sm80_wide(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t forward_mma_tf32_sm80(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);

// float32 in split products. With _if, each block ends at once unless *wanted, a word in device memory, says otherwise.
cudaError_t forward_mma_float32_sm80(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t forward_mma_float32_sm80_if(const int* wanted, const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
// Called by forward_mma_float32_sm80: _paged for pages of a cache, _wide for head dims above 256 (with or without pages).
cudaError_t forward_mma_float32_sm80_paged(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t forward_mma_float32_sm80_wide(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t forward_wgmma_float32_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_wgmma_float32_sm90_workspace(const AttentionParams&, const DeviceInfo&);  // bytes: the parts of q, k and v

cudaError_t forward_float32_sm80(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_float32_sm80_shared(const AttentionParams& params);  // the least bytes that a block needs

cudaError_t forward_wgmma_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_wgmma_sm90_workspace(const AttentionParams&, const DeviceInfo&);  // bytes: the counter of dynamic scheduling, or 0

cudaError_t forward_wgmma_wide_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_wgmma_wide_sm90_workspace(const AttentionParams&, const DeviceInfo&);  // bytes, as above

// For calls with too few rows to fill the GPU: the keys are split into pieces.
cudaError_t forward_wgmma_split_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_wgmma_split_sm90_workspace(const AttentionParams&, const DeviceInfo&);  // bytes: partial results
bool forward_wgmma_split_sm90_fits(const AttentionParams&, const DeviceInfo&);         // its 32-bit indices suffice
bool forward_wgmma_split_sm90_wins(const AttentionParams&, const DeviceInfo&);         // the fastest for this call

// ladder/cute_/cute_sm90.cu, built with FLASH_ATTN_CUTE.
cudaError_t forward_cute_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);

// The values are the first 512 columns of the keys, or lie in memory of their own.
cudaError_t decode_mla_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t decode_mla_sm90_workspace(const AttentionParams&, const DeviceInfo&);  // bytes: partial results of the shares of the keys
int64_t decode_mla_sm90_blocks(const AttentionParams&, const DeviceInfo&);    // blocks of the grid, at most 2^31 - 1

cudaError_t forward_fp8_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_fp8_sm90_workspace(const AttentionParams&, const DeviceInfo&);

// A few query rows against long keys. With cache.added > 0, either kvcache_append runs before and this kernel may start while it runs, or
// `append` is given and kLanesCluster appends by itself.
enum class DecodeKernel : int32_t { kLanesCluster, kCluster, kRing, kSplit, kWide, kLanes };
cudaError_t decode(DecodeKernel kernel, const AttentionParams& params, const AppendParams* append, const DeviceInfo& device,
                   cudaStream_t stream);
size_t decode_workspace(DecodeKernel kernel, const AttentionParams&, const DeviceInfo&);  // bytes: partial results
bool decode_fits(DecodeKernel kernel, const AttentionParams&, const DeviceInfo&);         // its 32-bit indices suffice

// The same for sequences that may begin with the same pages.
cudaError_t decode_prefix_sm80(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t decode_prefix_sm80_workspace(const AttentionParams&, const DeviceInfo&);  // bytes: the plan, and partial results
bool decode_prefix_sm80_fits(const AttentionParams&, const DeviceInfo&);         // its 32-bit indices and the planning block suffice
bool decode_prefix_sm80_wins(const AttentionParams&, const DeviceInfo&);         // so many keys can be shared that it may pay
cudaError_t decode_prefix_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t decode_prefix_sm90_workspace(const AttentionParams&, const DeviceInfo&);
bool decode_prefix_sm90_fits(const AttentionParams&, const DeviceInfo&);
bool decode_prefix_sm90_wins(const AttentionParams&, const DeviceInfo&);

// delta = rowsum(dout * out) - dlse in float32 and, unless `bases` is nullptr, the RowBase of every row (large_rows.cuh). Both are laid out
// like lse and have backward_delta_count entries.
// Sets *some_large, unless it is nullptr, where a row is large, or its delta NaN or beyond 2^99.
cudaError_t backward_delta(const BackwardParams& params, float* delta, float2* bases, cudaStream_t stream, int* some_large = nullptr);
int64_t backward_delta_count(const AttentionParams& params);
int64_t backward_delta_blocks(const AttentionParams& params);  // blocks of the grid, at most 2^31 - 1; the same below

// dq, dk and dv, from here to backward_scores.
cudaError_t backward_simple(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
// With _if, each block ends at once if *wanted, a word in device memory, is 0; delta and RowBase are in the workspace already.
cudaError_t backward_simple_if(const int* wanted, const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t backward_simple_workspace(const BackwardParams&, const DeviceInfo&);  // bytes: delta and RowBase
int64_t backward_simple_blocks(const BackwardParams& params);

cudaError_t backward_wgmma_sm90(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
// Bytes: float dq, delta, lse and RowBase, padded to whole tiles.
size_t backward_wgmma_sm90_workspace(const BackwardParams&, const DeviceInfo&);

cudaError_t backward_mma_sm80(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t backward_mma_sm80_workspace(const BackwardParams&, const DeviceInfo&);  // bytes: float32 sums of dq, lse, delta and RowBase
cudaError_t backward_mma_short_sm80(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);

// float32 in split products. With _if, as above; a block also ends if *unwanted is not 0. Calls with large rows are left to
// backward_simple: its products are those of RowBase, to the bit.
cudaError_t backward_mma_float32_sm80(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t backward_mma_float32_sm80_if(const int* wanted, const int* unwanted, const BackwardParams& params, const DeviceInfo& device,
                                         cudaStream_t stream);
size_t backward_mma_float32_sm80_workspace(const BackwardParams&, const DeviceInfo&);  // bytes: delta, RowBase and a word
cudaError_t backward_wgmma_float32_sm90(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
cudaError_t backward_wgmma_float32_wide_sm90(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
// Bytes: delta, RowBase, and the parts of q, k, v and dout.
size_t backward_wgmma_float32_sm90_workspace(const BackwardParams&, const DeviceInfo&);
size_t backward_wgmma_float32_wide_sm90_workspace(const BackwardParams&, const DeviceInfo&);

cudaError_t backward_mma_wide_sm80(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
// Bytes: P and dS of a round, delta, and sums kept between rounds.
size_t backward_mma_wide_sm80_workspace(const BackwardParams&, const DeviceInfo&);

// dbias and dsinks, where wanted, next to any kernel that gives dq, dk and dv; deterministic. Its workspace is not shared with that kernel.
cudaError_t backward_scores(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t backward_scores_workspace(const BackwardParams&, const DeviceInfo&);  // bytes: delta and RowBase, or 0 when neither is wanted
int64_t backward_scores_blocks(const BackwardParams& params);

// Before attention over a cache: appends new keys and values to the cache and writes the rotated q to the workspace.
cudaError_t kvcache_append(const AppendParams& params, const DeviceInfo& device, cudaStream_t stream);
int64_t kvcache_append_blocks(const AppendParams& params);  // blocks of the grid, at most 2^31 - 1

struct QuantizeParams;
cudaError_t quantize_fp8(const QuantizeParams& params, const DeviceInfo& device, cudaStream_t stream);
int64_t quantize_fp8_blocks(const QuantizeParams& params);  // blocks of the grid, at most 2^31 - 1

cudaError_t merge(const MergeParams& params, const DeviceInfo& device, cudaStream_t stream);

}  // namespace fa
