// validate.h: turns the C structs into the kernels' parameters. Every argument is checked here, before any launch, and nowhere else.
#pragma once

#include "api/common/checks.h"
#include "flash_attn_transformer.h"
#include "transformer/ops/ops.h"
#include "transformer/ops/sampling.h"
#include "transformer/w4/common/params.h"

namespace fa {

fa_status validate(const fa_rms_norm_args* args, RmsNormParams* params);
fa_status validate(const fa_rope_args* args, RopeParams* params);
fa_status validate(const fa_swiglu_args* args, SwigluParams* params);
fa_status validate(const fa_sample_args* args, SampleParams* params);
fa_status validate(const fa_linear_args* args, Pointers pointers, fa_linear_args* full, LinearParams* params);
fa_status validate(const fa_w4_quantize_args* args, W4QuantizeParams* params);
fa_status validate(const fa_w4_dequantize_args* args, W4DequantizeParams* params);
fa_status validate(const fa_w4_pack_args* args, W4PackParams* params);
fa_status validate(const fa_w4_linear_args* args, Pointers pointers, fa_w4_linear_args* full, W4LinearParams* params);
fa_status validate(const fa_w4_linear_chain_args* args, Pointers pointers, fa_w4_linear_chain_args* full, W4ChainParams* params);
// Refuses a workspace that overlaps an array of the call. `bytes`: the part of the workspace that the kernel uses.
fa_status check_workspace_apart(const void* workspace, const W4LinearParams& params, size_t bytes);
fa_status check_workspace_apart(const void* workspace, const W4ChainParams& params, size_t bytes);
fa_status packed_bytes(int32_t format, int32_t out_features, int32_t in_features, int32_t pair, int64_t* bytes);

}  // namespace fa
