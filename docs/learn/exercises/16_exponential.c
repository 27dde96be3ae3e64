// 16_exponential.c: attention row by row. The slow line calls expf, which keeps the loop around it from becoming vectors.
// The exercise and its judge are in 16_exponential.py. Write between `#else` and `#endif`.
#include <stdint.h>

#include "row_tools.h"

static int written = 1;

// e^x for x <= 0, -INFINITY among them, without a call and without a branch that the compiler cannot make a selection.
static inline float exponential(float x) {
#ifdef SLOW
    return expf(x);
#else
    written = 0;  // yours: take this line away
    return x;
#endif
}

void exponentials(const float* restrict x, float* restrict y, int count) {
    for (int j = 0; j < count; ++j) y[j] = exponential(x[j]);
}

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    const int n = a->headdim;
    float *s = malloc(sizeof(float) * 2 * (a->seqlen_k + 1)), *p = s + a->seqlen_k;
    for (int b = 0; s && b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h)
            for (int i = 0; i < a->seqlen_q; ++i) {
                const size_t at = query_start(a, b, h) + i * query_stride(a), keys = key_start(a, b, h);
                const int seen = visible_keys(a, i);
                float max = -INFINITY, sum[kLanes] = {0};
                scores(q + at, k + keys, key_stride(a), seen, n, scale_of(a), s);
                for (int j = 0; j < seen; ++j) max = s[j] > max ? s[j] : max;
                for (int j = 0; j < seen; ++j) s[j] -= max;
                exponentials(s, p, seen);
                for (int j = 0; j < seen; ++j) sum[j % kLanes] += p[j];
                for (int l = 1; l < kLanes; ++l) sum[0] += sum[l];
                for (int d = 0; d < n; ++d) out[at + d] = 0;
                add_values(out + at, p, v + keys, key_stride(a), seen, n);
                for (int d = 0; d < n && seen > 0; ++d) out[at + d] /= sum[0];
                lse[((size_t)b * a->heads + h) * a->seqlen_q + i] = seen > 0 ? max + logf(sum[0]) : -INFINITY;
            }
    free(s);
    return written ? !s : kNotWritten;
}
