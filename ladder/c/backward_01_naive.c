// backward_01_naive.c: the gradients as the chain rule states them, with P and dS in memory.
//
//     P = exp(S - lse)     dV = P^T dO     dP = dO V^T     dS = P * (dP - delta), delta = rowsum(dO * O)     dQ = dS K     dK = dS^T Q
//
// S and P are not kept from the forward pass: P is recomputed from lse. Bound, like 01_naive.c, by the latency of an addition.
#include "attention.h"

int attention_backward(const float* dout, const float* q, const float* k, const float* v, const float* out, const float* lse, float* dq,
                       float* dk, float* dv, const struct attention* a) {
    const size_t rows = query_stride(a), keys = key_stride(a), n = a->seqlen_k;
    float* P = malloc(2 * sizeof(float) * a->seqlen_q * n);
    if (!P) return 1;
    float* dS = P + a->seqlen_q * n;
    memset(dk, 0, sizeof(float) * a->batch * n * keys);  // several query heads may add to one key head
    memset(dv, 0, sizeof(float) * a->batch * n * keys);
    for (int b = 0; b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h) {
            const size_t at = query_start(a, b, h), at_k = key_start(a, b, h);
            const float *Q = q + at, *K = k + at_k, *V = v + at_k, *O = out + at, *dO = dout + at;
            const float* L = lse + ((size_t)b * a->heads + h) * a->seqlen_q;

            for (int i = 0; i < a->seqlen_q; ++i) {
                float delta = 0;
                for (int d = 0; d < a->headdim; ++d) delta += dO[i * rows + d] * O[i * rows + d];
                for (int j = 0; j < visible_keys(a, i); ++j) {
                    float s = 0, dp = 0;
                    for (int d = 0; d < a->headdim; ++d) s += Q[i * rows + d] * K[j * keys + d];
                    for (int d = 0; d < a->headdim; ++d) dp += dO[i * rows + d] * V[j * keys + d];
                    P[i * n + j] = expf(s * scale_of(a) - L[i]);
                    dS[i * n + j] = P[i * n + j] * (dp - delta) * scale_of(a);
                }
                for (int d = 0; d < a->headdim; ++d) {
                    float sum = 0;
                    for (int j = 0; j < visible_keys(a, i); ++j) sum += dS[i * n + j] * K[j * keys + d];
                    dq[at + i * rows + d] = sum;
                }
            }

            const int shift = a->causal ? a->seqlen_k - a->seqlen_q : a->seqlen_k;
            for (int j = 0; j < a->seqlen_k; ++j) {
                const int first = j > shift ? j - shift : 0;  // the first query that sees key j
                for (int d = 0; d < a->headdim; ++d) {
                    float sum_k = 0, sum_v = 0;
                    for (int i = first; i < a->seqlen_q; ++i) sum_k += dS[i * n + j] * Q[i * rows + d];
                    for (int i = first; i < a->seqlen_q; ++i) sum_v += P[i * n + j] * dO[i * rows + d];
                    dk[at_k + j * keys + d] += sum_k;
                    dv[at_k + j * keys + d] += sum_v;
                }
            }
        }
    free(P);
    return 0;
}
