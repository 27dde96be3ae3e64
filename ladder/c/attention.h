// attention.h: the function that every step of the C ladder computes.
//
//     out = softmax(q k^T / sqrt(headdim)) v     lse = log(sum(exp(scores)))
//
// q, out (batch, seqlen_q, heads, headdim), k, v (batch, seqlen_k, heads_k, headdim), lse (batch, heads, seqlen_q): float32, contiguous.
// Query head h uses key head h / (heads / heads_k). With `causal` the last query sees the last key, the one before it one key less, ...
// A query that sees no key has out = 0, lse = -inf. The functions return 0, or 1 if there is not enough memory.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct attention {
    int batch, seqlen_q, seqlen_k, heads, heads_k, headdim, causal;
};

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a);
// The gradients dq, dk, dv of sum(out * dout). out and lse are results of the forward pass.
int attention_backward(const float* dout, const float* q, const float* k, const float* v, const float* out, const float* lse, float* dq,
                       float* dk, float* dv, const struct attention* a);

// How many keys query i sees: keys 0 .. count - 1.
static inline int visible_keys(const struct attention* a, int i) {
    const int count = a->causal ? i + 1 + a->seqlen_k - a->seqlen_q : a->seqlen_k;
    return count < 0 ? 0 : count;
}
static inline int key_head(const struct attention* a, int h) { return h / (a->heads / a->heads_k); }
// Offset of row 0 of one head; row i is i * stride further.
static inline size_t query_start(const struct attention* a, int b, int h) { return ((size_t)b * a->seqlen_q * a->heads + h) * a->headdim; }
static inline size_t key_start(const struct attention* a, int b, int h) {
    return ((size_t)b * a->seqlen_k * a->heads_k + key_head(a, h)) * a->headdim;
}
static inline size_t query_stride(const struct attention* a) { return (size_t)a->heads * a->headdim; }
static inline size_t key_stride(const struct attention* a) { return (size_t)a->heads_k * a->headdim; }
static inline float scale_of(const struct attention* a) { return 1 / sqrtf((float)a->headdim); }
