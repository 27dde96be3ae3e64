// 02_vectors.c: the same three steps, in loops that the compiler turns into vectors.
//
// New: no sum along a vector. A row of S is the sum over d of (one number of Q) x (a row of K^T), so neighbouring lanes are neighbouring
// keys and their sums are independent. For that K is transposed once for each head. out is the sum over j of P[j] x (a row of V). The
// maximum and the sum of a row are kept in 16 lanes until the end, and the exponential is a polynomial.
//
// Bound by loads and stores: each multiply-add of a vector loads two vectors and stores one, and a row of K^T comes from the second-level
// cache.
#include "attention.h"
#include "row.h"

static void scores(const float* q, const float* kt, int headdim, int seqlen_k, int seen, float scale, float* s) {
    for (int j = 0; j < seen; ++j) s[j] = 0;
    for (int d = 0; d < headdim; ++d) {
        const float x = q[d] * scale;
        for (int j = 0; j < seen; ++j) s[j] += x * kt[(size_t)d * seqlen_k + j];
    }
}

// Scores become probabilities; s has room for a whole last vector. Returns lse.
static float softmax(float* s, int seen) {
    const int padded = (seen + kLanes - 1) / kLanes * kLanes;
    for (int j = seen; j < padded; ++j) s[j] = -INFINITY;
    const float max = largest_of(s, padded, -INFINITY), sum = exponentials(s, padded, max);
    for (int j = 0; j < seen; ++j) s[j] /= sum;
    return max + logf(sum);
}

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    const size_t rows = query_stride(a), keys = key_stride(a);
    const int n = a->headdim, line = a->seqlen_k + kLanes;
    float* kt = malloc(sizeof(float) * ((size_t)n * a->seqlen_k + (size_t)a->seqlen_q * line));
    if (!kt) return 1;
    float* S = kt + (size_t)n * a->seqlen_k;
    for (int b = 0; b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h) {
            const float *Q = q + query_start(a, b, h), *K = k + key_start(a, b, h), *V = v + key_start(a, b, h);
            float* O = out + query_start(a, b, h);
            float* L = lse + ((size_t)b * a->heads + h) * a->seqlen_q;
            for (int j = 0; j < a->seqlen_k; ++j)
                for (int d = 0; d < n; ++d) kt[(size_t)d * a->seqlen_k + j] = K[j * keys + d];

            for (int i = 0; i < a->seqlen_q; ++i)
                scores(Q + i * rows, kt, n, a->seqlen_k, visible_keys(a, i), scale_of(a), S + (size_t)i * line);

            for (int i = 0; i < a->seqlen_q; ++i) L[i] = visible_keys(a, i) ? softmax(S + (size_t)i * line, visible_keys(a, i)) : -INFINITY;

            for (int i = 0; i < a->seqlen_q; ++i) {
                float* o = O + i * rows;
                for (int d = 0; d < n; ++d) o[d] = 0;
                for (int j = 0; j < visible_keys(a, i); ++j) {
                    const float p = S[(size_t)i * line + j];
                    for (int d = 0; d < n; ++d) o[d] += p * V[j * keys + d];
                }
            }
        }
    free(kt);
    return 0;
}

#ifdef MAIN
#include "backward_02_tiles.c"
#include "check.h"
#endif
