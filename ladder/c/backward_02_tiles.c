// backward_02_tiles.c: the gradients by tiles, in loops that the compiler turns into vectors.
//
// New against backward_01_naive.c: P and dS exist for one query and a tile of 64 keys at a time; they are recomputed from lse and used at
// once. The outer loop walks over keys: a tile of K, K^T, V^T, dK and dV stays in the cache while the inner loop walks over all queries
// and adds to dQ. Where a sum runs over head dims, neighbouring lanes are neighbouring keys; where it runs over keys or queries, they are
// neighbouring head dims.
//
// Bound by loads and stores of the first-level cache: each multiply-add of dK and dV loads two vectors and stores one.
#include "attention.h"
#include "row.h"

enum { kKeys = 64, kDims = 256 };

struct key_tile {
    float kt[kDims][kKeys], vt[kDims][kKeys];  // columns past the last key are zero
    float k[kKeys][kDims], dk[kKeys][kDims], dv[kKeys][kDims];
};

static void load_keys(struct key_tile* t, const float* k, const float* v, size_t stride, int keys, int headdim) {
    memset(t, 0, sizeof *t);
    for (int j = 0; j < keys; ++j)
        for (int d = 0; d < headdim; ++d) {
            t->k[j][d] = t->kt[d][j] = k[j * stride + d];
            t->vt[d][j] = v[j * stride + d];
        }
}

// One query row against the tile; `seen` of its keys are visible.
static void one_row(struct key_tile* t, const float* q, const float* dout, float lse, float delta, float scale, int seen, int headdim,
                    float* dq) {
    float p[kKeys] = {0}, ds[kKeys] = {0};
    add_rows(p, kKeys, q, t->kt[0], kKeys, headdim);
    add_rows(ds, kKeys, dout, t->vt[0], kKeys, headdim);
    for (int j = 0; j < kKeys; ++j) {
        const float above = p[j] * scale - lse;  // 0 or less, except for rounding
        p[j] = exponential(above < 0 ? above : 0);
        ds[j] = p[j] * (ds[j] - delta) * scale;
    }
    for (int j = 0; j < seen; ++j)
        for (int d = 0; d < headdim; ++d) {
            t->dv[j][d] += p[j] * dout[d];
            t->dk[j][d] += ds[j] * q[d];
        }
    add_rows(dq, headdim, ds, t->k[0], kDims, seen);
}

int attention_backward(const float* dout, const float* q, const float* k, const float* v, const float* out, const float* lse, float* dq,
                       float* dk, float* dv, const struct attention* a) {
    const size_t rows = query_stride(a), stride = key_stride(a), at_least = 1;
    const int headdim = a->headdim;
    struct key_tile* t = malloc(sizeof *t);
    float* delta = malloc(sizeof(float) * (a->seqlen_q + at_least));
    if (!t || !delta || headdim > kDims) return free(t), free(delta), 1;
    memset(dq, 0, sizeof(float) * a->batch * a->seqlen_q * rows);
    memset(dk, 0, sizeof(float) * a->batch * a->seqlen_k * stride);  // several query heads may add to one key head
    memset(dv, 0, sizeof(float) * a->batch * a->seqlen_k * stride);
    for (int b = 0; b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h) {
            const size_t at = query_start(a, b, h), at_k = key_start(a, b, h);
            const float* L = lse + ((size_t)b * a->heads + h) * a->seqlen_q;
            for (int i = 0; i < a->seqlen_q; ++i) {
                delta[i] = 0;
                for (int d = 0; d < headdim; ++d) delta[i] += dout[at + i * rows + d] * out[at + i * rows + d];
            }
            for (int j0 = 0; j0 < a->seqlen_k; j0 += kKeys) {
                const int keys = a->seqlen_k - j0 < kKeys ? a->seqlen_k - j0 : kKeys;
                load_keys(t, k + at_k + j0 * stride, v + at_k + j0 * stride, stride, keys, headdim);
                for (int i = 0; i < a->seqlen_q; ++i) {
                    const int seen = visible_keys(a, i) - j0, row = seen < keys ? seen : keys;
                    const size_t x = at + i * rows;
                    if (row > 0) one_row(t, q + x, dout + x, L[i], delta[i], scale_of(a), row, headdim, dq + x);
                }
                for (int j = 0; j < keys; ++j)
                    for (int d = 0; d < headdim; ++d) {
                        dk[at_k + (j0 + j) * stride + d] += t->dk[j][d];
                        dv[at_k + (j0 + j) * stride + d] += t->dv[j][d];
                    }
            }
        }
    free(t), free(delta);
    return 0;
}
