// kernels.h: the CPU backend of the operations around attention. They follow the same contract as the GPU kernels, on host pointers.
#pragma once

#include "transformer/ops/ops.h"
#include "transformer/ops/sampling.h"
#include "transformer/w4/common/params.h"

namespace fa::cpu {

void rms_norm(const RmsNormParams& params);
void rope(const RopeParams& params);
void swiglu(const SwigluParams& params);
void sample(const SampleParams& params);
void linear(const LinearParams& params);

void w4_quantize(const W4QuantizeParams& params);
void w4_dequantize(const W4DequantizeParams& params);
void w4_pack(const W4PackParams& params);
void w4_linear(const W4LinearParams& params);
int64_t w4_linear_workspace(const W4LinearParams& params);  // bytes of a workspace that is aligned to 16

}  // namespace fa::cpu
