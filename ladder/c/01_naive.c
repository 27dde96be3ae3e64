// 01_naive.c: attention as the formula states it, in three steps with S in memory.
//
// Bound by the latency of an addition. A score is a sum of headdim products, and each addition waits for the one before: about four cycles
// for two operations, on a core that could do sixty-four in one. The compiler may not split the sum, because that would change its
// rounding.
#include "attention.h"

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    const size_t rows = query_stride(a), keys = key_stride(a);
    float* S = malloc(sizeof(float) * a->seqlen_q * a->seqlen_k);
    if (!S) return 1;
    for (int b = 0; b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h) {
            const float *Q = q + query_start(a, b, h), *K = k + key_start(a, b, h), *V = v + key_start(a, b, h);
            float* O = out + query_start(a, b, h);
            float* L = lse + ((size_t)b * a->heads + h) * a->seqlen_q;

            for (int i = 0; i < a->seqlen_q; ++i)  // S = Q K^T / sqrt(headdim)
                for (int j = 0; j < visible_keys(a, i); ++j) {
                    float sum = 0;
                    for (int d = 0; d < a->headdim; ++d) sum += Q[i * rows + d] * K[j * keys + d];
                    S[(size_t)i * a->seqlen_k + j] = sum * scale_of(a);
                }

            for (int i = 0; i < a->seqlen_q; ++i) {  // P = softmax(S), in place
                float *s = S + (size_t)i * a->seqlen_k, row_max = -INFINITY, row_sum = 0;
                const int seen = visible_keys(a, i);
                for (int j = 0; j < seen; ++j) row_max = fmaxf(row_max, s[j]);
                for (int j = 0; j < seen; ++j) row_sum += s[j] = expf(s[j] - row_max);
                for (int j = 0; j < seen; ++j) s[j] /= row_sum;
                L[i] = seen ? row_max + logf(row_sum) : -INFINITY;
            }

            for (int i = 0; i < a->seqlen_q; ++i)  // O = P V
                for (int d = 0; d < a->headdim; ++d) {
                    float sum = 0;
                    for (int j = 0; j < visible_keys(a, i); ++j) sum += S[(size_t)i * a->seqlen_k + j] * V[j * keys + d];
                    O[i * rows + d] = sum;
                }
        }
    free(S);
    return 0;
}

#ifdef MAIN
#include "backward_01_naive.c"
#include "check.h"
#endif
