// kernels.h: the entry points of the CPU backend. They follow the same contract as the GPU kernels, on host pointers. Scratch comes from
// the caller's workspace.
#pragma once

#include <cstddef>

#include "attention/common/params.h"
#include "attention/common/quantize_fp8.h"
#include "cpu/common/isa.h"

namespace fa::cpu {

void clear_max_score(const AttentionParams& params);  // -inf
void clear_key_sums(const AttentionParams& params);   // 0 for the keys of all sequences

void forward(const AttentionParams& params, Isa isa);  // tiled online softmax; memory: O(1) in seqlen per thread
size_t forward_workspace(const AttentionParams& params, Isa isa);

void forward_naive(const AttentionParams& params);  // standard attention: three steps, with S in the workspace
size_t forward_naive_workspace(const AttentionParams& params);
constexpr size_t kMostWorkspace = size_t(1) << 56;  // stands for any size that no machine could address

void backward(const BackwardParams& params, Isa isa);  // every gradient; memory: dQ in float32, and O(1) in seqlen per thread
size_t backward_workspace(const BackwardParams& params, Isa isa);

void backward_naive(const BackwardParams& params);   // dq, dk, dv
void backward_scores(const BackwardParams& params);  // dbias and dsinks, where wanted; uses the same workspace
size_t backward_naive_workspace(const BackwardParams& params);

void kvcache_append(const AppendParams& params);

void merge(const MergeParams& params);
void quantize_fp8(const QuantizeParams& params);

}  // namespace fa::cpu
