// validate.h: from the C structs to the kernels' parameters. Every argument is checked here, before any launch, and nowhere below.
#pragma once

#include "attention/params.h"
#include "attention/quantize_fp8.h"
#include "flash_attn.h"
#include "linear/linear.h"
#include "ops/ops.h"
#include "ops/sampling.h"

namespace fa {

enum class Pointers { kRequired, kOptional };  // a query may leave data pointers NULL

// What differs where k and v are a cache.
struct Keys {
    int32_t max_headdim;
    size_t element;  // bytes
};

fa_status validate(const fa_attention_args* args, Pointers pointers, fa_attention_args* full, AttentionParams* params,
                   const Keys* keys = nullptr, bool writes_out = true);  // the backward pass reads out
fa_status validate(const fa_attention_backward_args* args, Pointers pointers, fa_attention_args* forward, BackwardParams* params);
// `forward` is the attention call inside, its kernel, num_threads and workspace included.
fa_status validate(const fa_kvcache_args* args, Pointers pointers, fa_attention_args* forward, AppendParams* params);
fa_status validate(const fa_merge_args* args, MergeParams* params);
fa_status validate(const fa_quantize_args* args, QuantizeParams* params);
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
fa_status packed_bytes(int32_t format, int32_t out_features, int32_t in_features, int32_t pair, int64_t* bytes);

}  // namespace fa
