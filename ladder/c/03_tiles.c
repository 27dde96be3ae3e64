// 03_tiles.c: FlashAttention-2's loops. S is never whole: a tile of it lies in the first-level cache and is used at once.
//
// New: the online softmax. A tile of 32 queries walks over tiles of 64 keys. Each row keeps the largest score so far and the sum of
// exponentials relative to it; when a larger score comes, both that sum and the row of out are multiplied by e^(old max - new max). out is
// divided by the sum once, at the end. Memory is linear in the length. Under a causal mask only the tiles with visible keys are computed.
// K^T is stored tile after tile, because rows a power of two apart would compete for the same cache lines. Four products are added to a
// sum at a time, so that the sum is loaded and stored once for all four (add_rows).
//
// Bound by loads from the first-level cache: five vectors for four multiply-adds.
#include "attention.h"
#include "row.h"

enum { kBlockM = 32, kBlockN = 64, kMaxDim = 256 };

struct tile {
    float q[kBlockM][kMaxDim];    // scaled
    float out[kBlockM][kMaxDim];  // not divided yet
    float s[kBlockM][kBlockN];
    float row_max[kBlockM], row_sum[kBlockM];
};

// S = Q K^T for one tile of keys, given as kt[headdim][kBlockN].
static void scores(struct tile* t, int rows, const float* kt, int headdim) {
    for (int i = 0; i < rows; ++i) {
        float s[kBlockN] = {0};
        add_rows(s, kBlockN, t->q[i], kt, kBlockN, headdim);
        memcpy(t->s[i], s, sizeof s);
    }
}

// One row: S becomes P, and the sum and output of earlier keys are rescaled to the new maximum.
static void softmax(struct tile* t, int i, int seen, int headdim) {
    float* s = t->s[i];
    for (int j = seen < 0 ? 0 : seen; j < kBlockN; ++j) s[j] = -INFINITY;
    const float new_max = largest_of(s, kBlockN, t->row_max[i]);
    const float shift = new_max == -INFINITY ? 0 : new_max;  // no key yet: -inf - -inf would be NaN
    const float correction = exponential(t->row_max[i] - shift);
    t->row_sum[i] = t->row_sum[i] * correction + exponentials(s, kBlockN, shift);
    t->row_max[i] = new_max;
    for (int d = 0; d < headdim; ++d) t->out[i][d] *= correction;
}

static void attend(struct tile* t, const struct attention* a, int first_row, int rows, const float* kt, const float* v) {
    const int headdim = a->headdim, last = visible_keys(a, first_row + rows - 1);  // no row of the tile sees more
    for (int i = 0; i < rows; ++i) t->row_max[i] = -INFINITY, t->row_sum[i] = 0;
    memset(t->out, 0, sizeof t->out);
    for (int j0 = 0; j0 < last; j0 += kBlockN) {
        scores(t, rows, kt + (size_t)j0 * headdim, headdim);
        for (int i = 0; i < rows; ++i) {
            softmax(t, i, visible_keys(a, first_row + i) - j0, headdim);
            add_rows(t->out[i], headdim, t->s[i], v + j0 * key_stride(a), key_stride(a), last - j0 < kBlockN ? last - j0 : kBlockN);
        }
    }
}

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    const size_t stride = query_stride(a), keys = key_stride(a);
    const int n = a->headdim, tiles = (a->seqlen_k + kBlockN - 1) / kBlockN;
    if (n > kMaxDim) return 1;
    struct tile* t = malloc(sizeof *t);
    float* kt = calloc((size_t)tiles * n * kBlockN, sizeof(float));
    for (int b = 0; t && kt && b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h) {
            for (int j = 0; j < a->seqlen_k; ++j)
                for (int d = 0; d < n; ++d)
                    kt[((size_t)(j / kBlockN) * n + d) * kBlockN + j % kBlockN] = k[key_start(a, b, h) + j * keys + d];
            for (int i0 = 0; i0 < a->seqlen_q; i0 += kBlockM) {
                const int rows = a->seqlen_q - i0 < kBlockM ? a->seqlen_q - i0 : kBlockM;
                const size_t at = query_start(a, b, h) + i0 * stride;
                for (int i = 0; i < rows; ++i)
                    for (int d = 0; d < n; ++d) t->q[i][d] = q[at + i * stride + d] * scale_of(a);
                attend(t, a, i0, rows, kt, v + key_start(a, b, h));
                for (int i = 0; i < rows; ++i) {
                    const float weight = t->row_sum[i] > 0 ? 1 / t->row_sum[i] : 0;
                    for (int d = 0; d < n; ++d) out[at + i * stride + d] = t->out[i][d] * weight;
                    lse[((size_t)b * a->heads + h) * a->seqlen_q + i0 + i] = t->row_max[i] + logf(t->row_sum[i]);
                }
            }
        }
    const int failed = !t || !kt;
    free(t), free(kt);
    return failed;
}

#ifdef MAIN
#include "backward_02_tiles.c"
#include "check.h"
#endif
