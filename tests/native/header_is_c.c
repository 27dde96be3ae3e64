/* header_is_c.c: the headers are plain C, and a C compiler gives their structs the same layout as a C++ compiler. */
#include "flash_attn_distributed.h"
#include "flash_attn_transformer.h"

#include "header_is_c.h"

_Static_assert(offsetof(fa_attention_args, struct_size) == 0, "every struct starts with its size");
_Static_assert(offsetof(fa_attention_plan, struct_size) == 0, "every struct starts with its size");
_Static_assert(offsetof(fa_merge_args, struct_size) == 0, "every struct starts with its size");

size_t c_layout(int index) {
    static const size_t layout[] = {LAYOUT_OF_THE_ABI};
    return layout[index];
}

/* A complete call as a C program writes it. There is one query and one key, so out = v. Returns the status. */
int c_calls_the_library(float* out) {
    static float q[4] = {1, 2, 3, 4}, k[4] = {4, 3, 2, 1}, v[4] = {5, 6, 7, 8};
    fa_attention_args args = {.struct_size = sizeof args};
    fa_attention_plan plan = {.struct_size = sizeof plan};
    const fa_tensor shape = {0, 4, 4, 4};
    args.device = FA_CPU;
    args.dtype = FA_FLOAT32;
    args.batch = args.nheads = args.nheads_k = 1;
    args.headdim = 4;
    args.seqlen_q = args.seqlen_k = 1;
    args.q = args.k = args.v = args.out = shape;
    args.num_threads = 1;
    args.q.data = q;
    args.k.data = k;
    args.v.data = v;
    args.out.data = out;
    if (fa_attention_query(&args, &plan) != FA_OK) return plan.status;
    static unsigned char scratch[1 << 20];
    if (plan.workspace_bytes > sizeof scratch) return FA_WORKSPACE_TOO_SMALL;
    args.workspace = scratch;
    args.workspace_bytes = sizeof scratch;
    return fa_attention_forward(&args, NULL);
}
