// kernels.h: the entry of every GPU kernel file. Each launches on `stream` and returns what the CUDA runtime said of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "attention/common/params.h"
#include "device/device_info.h"

namespace fa {

// max_score = -inf, from where the kernels of the forward pass raise it; *counter = 0 where there is one. Each of these kernels calls it by
// itself.
cudaError_t clear_max_score(const AttentionParams& params, int* counter, cudaStream_t stream);

cudaError_t forward_naive(const AttentionParams& params, cudaStream_t stream);  // gives key_sums, too
size_t forward_naive_workspace(const AttentionParams& params);                  // bytes: the whole S, and what the softmax leaves of it

cudaError_t forward_minimal(const AttentionParams& params, cudaStream_t stream);

// key_sums, behind a kernel of the forward pass, from its lse. Any head dim, dtype and option; with _sm80 fp16 and bf16, head dims up to
// 256, sm_80 and newer.
// The workspace has room for three floats a row, laid out like lse.
cudaError_t key_sums(const AttentionParams& params, cudaStream_t stream);
cudaError_t key_sums_sm80(const AttentionParams& params, cudaStream_t stream);
int64_t key_sums_blocks(const AttentionParams& params);  // of the larger of their grids, which have at most 2^31 - 1

// fp16 and bf16, head dims up to 512, sm_80 and newer. The device decides between tiles.
cudaError_t forward_mma_sm80(const AttentionParams& params, int multiprocessors, size_t shared_memory, cudaStream_t stream);
// Its part for the pages of a cache, and its part for head dims above 256, pages too.
cudaError_t forward_mma_sm80_paged(const AttentionParams& params, int multiprocessors, size_t shared_memory, cudaStream_t stream);
cudaError_t forward_mma_sm80_wide(const AttentionParams& params, size_t shared_memory, cudaStream_t stream);
// fp32 whose products are rounded to tf32, head dims up to 256, no pages; the rest as above.
cudaError_t forward_mma_tf32_sm80(const AttentionParams& params, int multiprocessors, size_t shared_memory, cudaStream_t stream);

// fp32 without rounding to tf32, head dims up to 256 in steps of 4, rows of whole 16 bytes; every window and length, sinks, and no other
// option.
cudaError_t forward_float32_sm80(const AttentionParams& params, int multiprocessors, size_t shared_memory, cudaStream_t stream);
size_t forward_float32_sm80_shared(const AttentionParams& params);  // bytes that a block needs at least

// fp16 and bf16, head dims up to 256 in steps of 8, Hopper only; q, k, v as tensor maps can describe them.
cudaError_t forward_wgmma_sm90(const AttentionParams& params, int multiprocessors, cudaStream_t stream);
size_t forward_wgmma_sm90_workspace(const AttentionParams& params,
                                    int multiprocessors);  // bytes: the counter of dynamic scheduling, or none

// fp16 and bf16, head dims up to 512 in steps of 8, Hopper only; q, k, v as tensor maps can describe them, pages of a multiple of 8 keys.
cudaError_t forward_wgmma_wide_sm90(const AttentionParams& params, int multiprocessors, cudaStream_t stream);
size_t forward_wgmma_wide_sm90_workspace(const AttentionParams& params, int multiprocessors);  // bytes, as above

// The same for rows that do not fill the GPU, their keys in pieces: dense calls and caches, plain or causal scores, pages of a multiple
// of 8.
cudaError_t forward_wgmma_split_sm90(const AttentionParams& params, const DeviceInfo& device, cudaStream_t stream);
size_t forward_wgmma_split_sm90_workspace(const AttentionParams& params, const DeviceInfo& device);  // bytes: partial results
bool forward_wgmma_split_sm90_fits(const AttentionParams& params, const DeviceInfo& device);         // its 32-bit places and rows
bool forward_wgmma_split_sm90_wins(const AttentionParams& params, const DeviceInfo& device);         // over all that serve such a call

// fp16 and bf16, head dims 64 and 128, dense plain or causal calls, Hopper only; q, k, v and out as tensor maps can describe them. Built
// with FLASH_ATTN_CUTE.
cudaError_t forward_cute_sm90(const AttentionParams& params, cudaStream_t stream);

// fp16 and bf16, headdim 576, headdim_v 512, over a cache whose values are the first columns of its keys, Hopper only.
cudaError_t decode_mla_sm90(const AttentionParams& params, int multiprocessors, cudaStream_t stream);
size_t decode_mla_sm90_workspace(const AttentionParams& params, int multiprocessors);  // bytes: the results of the shares of the keys
int64_t decode_mla_sm90_blocks(const AttentionParams& params, int multiprocessors);    // of its grid, which has at most 2^31 - 1

// e4m3 q, k, v and fp16 or bf16 out, head dims up to 256 in steps of 16, plain or causal scores, Hopper only.
cudaError_t forward_fp8_sm90(const AttentionParams& params, int multiprocessors, cudaStream_t stream);
size_t forward_fp8_sm90_workspace(const AttentionParams& params, int multiprocessors);

// A few rows against long keys: a cache, paged or 8-bit too, or plain K and V. Head dims up to 256, rows of whole 16 bytes, sm_80 and
// newer. With cache.added > 0 it follows kvcache_append and starts while that runs, or, with `append`, kLanesCluster does what that would
// have done.
enum class DecodeKernel : int32_t { kLanesCluster, kCluster, kRing, kSplit, kLanes };
cudaError_t decode(DecodeKernel kernel, const AttentionParams& params, const AppendParams* append, const DeviceInfo& device,
                   cudaStream_t stream);
size_t decode_workspace(DecodeKernel kernel, const AttentionParams& params, const DeviceInfo& device);  // bytes: partial results
bool decode_fits(DecodeKernel kernel, const AttentionParams& params, const DeviceInfo& device);         // its 32-bit places and rows

// rowsum(dout * out) - dlse in float32, and the RowBase of every row (large_rows.cuh) where `bases` is not nullptr; laid out like lse. The
// count of each is that of all rows.
cudaError_t backward_delta(const BackwardParams& params, float* delta, float2* bases, cudaStream_t stream);
int64_t backward_delta_count(const AttentionParams& params);
int64_t backward_delta_blocks(const AttentionParams& params);  // of its grid, which has at most 2^31 - 1; the same below

// dq, dk and dv: any head dim, dtype and option; deterministic.
cudaError_t backward_simple(const BackwardParams& params, size_t shared_memory, cudaStream_t stream);
size_t backward_simple_workspace(const BackwardParams& params);  // bytes: delta and RowBase
int64_t backward_simple_blocks(const BackwardParams& params);

// dq, dk and dv in fp16 and bf16, head dims up to 256 in steps of 8, Hopper only; q, k, v, dout as tensor maps can describe them.
cudaError_t backward_wgmma_sm90(const BackwardParams& params, int multiprocessors, cudaStream_t stream);
size_t backward_wgmma_sm90_workspace(const BackwardParams& params);  // bytes: float dq, delta, lse and RowBase, padded to whole tiles

// dbias and dsinks, where wanted, beside any kernel that gives dq, dk and dv; deterministic. `workspace` is its own.
cudaError_t backward_scores(const BackwardParams& params, void* workspace, cudaStream_t stream);
size_t backward_scores_workspace(const BackwardParams& params);  // bytes: the same, or none when neither is wanted
int64_t backward_scores_blocks(const BackwardParams& params);

// Gradients of fp16 and bf16, head dims up to 256, sm_80 and newer. The device decides between tiles.
cudaError_t backward_mma_sm80(const BackwardParams& params, size_t shared_memory, cudaStream_t stream);
cudaError_t backward_mma_sm80_fp16(const BackwardParams& params, size_t shared_memory, cudaStream_t stream);  // its half for fp16
size_t backward_mma_sm80_workspace(const BackwardParams& params);  // bytes: float32 sums of dq, lse, delta and RowBase

// dq, dk and dv in fp16 and bf16, any head dim, sm_80 and newer; deterministic.
cudaError_t backward_mma_wide_sm80(const BackwardParams& params, cudaStream_t stream);
size_t backward_mma_wide_sm80_workspace(const BackwardParams& params);  // bytes: P and dS of a round, delta, and sums between rounds

// New keys and values into the cache, q turned into the workspace: before attention over a cache.
cudaError_t kvcache_append(const AppendParams& params, cudaStream_t stream);
int64_t kvcache_append_blocks(const AppendParams& params);  // of its grid, which has at most 2^31 - 1

struct QuantizeParams;
cudaError_t quantize_fp8(const QuantizeParams& params, cudaStream_t stream);
int64_t quantize_fp8_blocks(const QuantizeParams& params);  // of its grid, which has at most 2^31 - 1

cudaError_t merge(const MergeParams& params, cudaStream_t stream);

}  // namespace fa
