// validate.h: turns the C structs into the parameters of the kernels. Every argument is checked here, before any launch, and nowhere else.
#pragma once

#include "api/common/checks.h"
#include "attention/common/params.h"
#include "attention/common/quantize_fp8.h"
#include "flash_attn.h"

namespace fa {

// How the checks of k and v differ when they are a cache.
struct Keys {
    int32_t max_headdim;
    size_t element;  // bytes of an element of k and v
    bool none;       // a cache without entries: k and v may have no address
};

fa_status validate(const fa_attention_args* args, Pointers pointers, fa_attention_args* full, AttentionParams* params,
                   const Keys* keys = nullptr, bool writes_out = true);  // writes_out: false for the backward pass, which only reads out
fa_status validate(const fa_attention_backward_args* args, Pointers pointers, fa_attention_args* forward, BackwardParams* params);
// `forward` receives the attention call inside the cache call, with its kernel, num_threads and workspace.
fa_status validate(const fa_kvcache_args* args, Pointers pointers, fa_attention_args* forward, AppendParams* params);
fa_status validate(const fa_merge_args* args, MergeParams* params);

// options.cpp: what validate does with the options of attention, after check_options. Puts them into the parameters of the kernels.
void put_options(const fa_attention_args& a, AttentionParams* params);
// Adds the arrays among them to those that a call reads. batch, rows_k: of k in memory.
constexpr int kMostRead = 22;
void add_arrays_of_options(const fa_attention_args& a, int64_t batch, int64_t rows_k, Regions<kMostRead>* read);

// Refuses a workspace that overlaps an array of the call. `bytes`: the part of the workspace that the kernel uses. `a` holds the fields of
// both passes; `params` were filled by validate.
fa_status check_workspace_apart(const fa_attention_args& a, const AttentionParams& params, size_t bytes);
fa_status check_workspace_apart(const fa_attention_args& a, const BackwardParams& params, size_t bytes);
fa_status check_workspace_apart(const fa_attention_args& a, const AppendParams& params, size_t bytes);
fa_status validate(const fa_quantize_args* args, QuantizeParams* params);

}  // namespace fa
