// kernels.h: the CPU backend's entries. Same contract as the GPU kernels, on host pointers; scratch comes from the caller's workspace.
#pragma once

#include <cstddef>

#include "attention/params.h"
#include "attention/quantize_fp8.h"
#include "linear/linear.h"
#include "ops/ops.h"
#include "ops/sampling.h"

namespace fa::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kNeon };

bool isa_available(Isa isa);  // compiled in, and this processor has it

void forward(const AttentionParams& params, Isa isa);  // tiled online softmax, O(1) memory per thread in seqlen
size_t forward_workspace(const AttentionParams& params, Isa isa);

void forward_naive(const AttentionParams& params);  // three steps with S in workspace: what "standard attention" means
size_t forward_naive_workspace(const AttentionParams& params);
constexpr size_t kMostWorkspace = size_t(1) << 56;  // stands for all that no machine could address

void backward(const BackwardParams& params, Isa isa);  // every gradient; memory: dQ in float32, and O(1) per thread in seqlen
size_t backward_workspace(const BackwardParams& params, Isa isa);

void backward_naive(const BackwardParams& params);   // dq, dk, dv
void backward_scores(const BackwardParams& params);  // dbias and dsinks where wanted, in the same workspace
size_t backward_naive_workspace(const BackwardParams& params);

void kvcache_append(const AppendParams& params);

void merge(const MergeParams& params);
void quantize_fp8(const QuantizeParams& params);

void rms_norm(const RmsNormParams& params);
void rope(const RopeParams& params);
void swiglu(const SwigluParams& params);
void sample(const SampleParams& params);
void linear(const LinearParams& params);

void w4_quantize(const W4QuantizeParams& params);
void w4_dequantize(const W4DequantizeParams& params);
void w4_pack(const W4PackParams& params);
void w4_linear(const W4LinearParams& params);
int64_t w4_linear_workspace(const W4LinearParams& params);  // bytes, aligned to 16

}  // namespace fa::cpu
