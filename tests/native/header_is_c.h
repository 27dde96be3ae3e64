/* header_is_c.h: the layout on which a C compiler and a C++ compiler must agree. */
#pragma once

#include <stddef.h>

#define LAYOUT_OF_THE_ABI                                                                                                         \
    sizeof(fa_attention_args), sizeof(fa_attention_plan), sizeof(fa_merge_args), sizeof(fa_tensor), sizeof(fa_score_tensor),      \
        sizeof(fa_row_indices), sizeof(fa_block_mask), sizeof(fa_status), offsetof(fa_attention_args, q),                         \
        offsetof(fa_attention_args, cu_seqlens_q), offsetof(fa_attention_args, softmax_scale), offsetof(fa_attention_args, bias), \
        offsetof(fa_attention_args, window_left), offsetof(fa_attention_args, dropout_seed), offsetof(fa_attention_args, kernel), \
        offsetof(fa_attention_args, workspace_bytes), offsetof(fa_attention_plan, kernel), offsetof(fa_attention_plan, why_not),  \
        offsetof(fa_merge_args, out_a), offsetof(fa_merge_args, lse)

#ifdef __cplusplus
extern "C" {
#endif
size_t c_layout(int index);
int c_calls_the_library(float* out);
#ifdef __cplusplus
}
#endif
