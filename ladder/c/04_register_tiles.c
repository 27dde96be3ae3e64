// 04_register_tiles.c: the same loops, with both products as sums of outer products in registers.
//
// New: the micro kernel. A block of C, 6 rows x 4 vectors, stays in 24 registers while the sum runs. One step of the sum loads 4 vectors of
// B and 6 numbers of A and makes 24 multiply-adds, so loads are no longer the bound. Both products have that form: S = Q K^T, with B a tile
// of K^T, and out += P V, with B a tile of V. Tiles are copied and padded with zeros, so the kernel has no edges.
//
// With 16 registers (AVX2) the block is 6 x 2 vectors of half the length. Bound by the multiply-add units of one core.
#include "attention.h"
#include "row.h"

#if defined(__AVX512F__)
enum { kVector = 16, kWidth = 4 };  // floats in a vector; vectors in a row of a block
#else
enum { kVector = 8, kWidth = 2 };
#endif
enum { kHeight = 6, kColumns = kWidth * kVector, kBlockM = 8 * kHeight, kBlockN = 64, kMaxDim = 256 };
typedef float vec __attribute__((vector_size(kVector * sizeof(float)), aligned(4), may_alias));

// C (rows, columns) += A (rows, depth) B (depth, columns); rows is a multiple of kHeight, columns of kColumns. ld: floats from row to row.
static void multiply(const float* A, int lda, const float* B, int ldb, float* C, int ldc, int rows, int columns, int depth) {
    for (int i = 0; i < rows; i += kHeight)
        for (int j = 0; j < columns; j += kColumns) {
            const float *a = A + i * lda, *b = B + j;
            float* c = C + i * ldc + j;
            vec acc[kHeight][kWidth];
            for (int r = 0; r < kHeight; ++r)
                for (int w = 0; w < kWidth; ++w) acc[r][w] = *(const vec*)(c + r * ldc + w * kVector);
            for (int d = 0; d < depth; ++d, b += ldb)
                for (int r = 0; r < kHeight; ++r)
                    for (int w = 0; w < kWidth; ++w) acc[r][w] += a[r * lda + d] * *(const vec*)(b + w * kVector);
            for (int r = 0; r < kHeight; ++r)
                for (int w = 0; w < kWidth; ++w) *(vec*)(c + r * ldc + w * kVector) = acc[r][w];
        }
}

struct tile {
    float q[kBlockM * kMaxDim], out[kBlockM * kMaxDim], s[kBlockM * kBlockN];
    float row_max[kBlockM], row_sum[kBlockM];
};

// The keys and values of one head, tile after tile: K^T (headdim, kBlockN) and V (kBlockN, padded headdim).
struct packed {
    int headdim, padded;
    float *kt, *v;
};

static int padded_dim(const struct attention* a) { return (a->headdim + kColumns - 1) / kColumns * kColumns; }
static int key_tiles(const struct attention* a) { return (a->seqlen_k + kBlockN - 1) / kBlockN; }

// Copies the first `keys` keys. Memory that is not written stays zero.
static void pack(struct packed* x, const struct attention* a, const float* k, const float* v, int keys) {
    for (int j = 0; j < keys; ++j)
        for (int d = 0; d < a->headdim; ++d) {
            x->kt[((size_t)(j / kBlockN) * a->headdim + d) * kBlockN + j % kBlockN] = k[j * key_stride(a) + d];
            x->v[(size_t)j * x->padded + d] = v[j * key_stride(a) + d];
        }
}

static void softmax(struct tile* t, int i, int seen, int padded) {
    float* s = t->s + i * kBlockN;
    for (int j = seen < 0 ? 0 : seen; j < kBlockN; ++j) s[j] = -INFINITY;
    const float new_max = largest_of(s, kBlockN, t->row_max[i]);
    const float shift = new_max == -INFINITY ? 0 : new_max;  // no key yet: -inf - -inf would be NaN
    const float correction = exponential(t->row_max[i] - shift);
    t->row_sum[i] = t->row_sum[i] * correction + exponentials(s, kBlockN, shift);
    t->row_max[i] = new_max;
    for (int d = 0; d < padded; ++d) t->out[i * padded + d] *= correction;
}

// kBlockM queries from row i0 on; rows past the last are zeros that see no key.
static void attend(struct tile* t, const struct attention* a, const struct packed* x, const float* q, int i0, float* out, float* lse) {
    const int rows = a->seqlen_q - i0 < kBlockM ? a->seqlen_q - i0 : kBlockM, last = visible_keys(a, i0 + rows - 1);
    const int height = (rows + kHeight - 1) / kHeight * kHeight;
    memset(t, 0, sizeof *t);
    for (int i = 0; i < height; ++i) t->row_max[i] = -INFINITY;
    for (int i = 0; i < rows; ++i)
        for (int d = 0; d < a->headdim; ++d) t->q[i * a->headdim + d] = q[(i0 + i) * query_stride(a) + d] * scale_of(a);
    for (int j0 = 0; j0 < last; j0 += kBlockN) {
        memset(t->s, 0, sizeof t->s);
        multiply(t->q, a->headdim, x->kt + (size_t)j0 * a->headdim, kBlockN, t->s, kBlockN, height, kBlockN, a->headdim);
        for (int i = 0; i < height; ++i) {
            const int seen = visible_keys(a, i0 + i);
            softmax(t, i, (seen < a->seqlen_k ? seen : a->seqlen_k) - j0, x->padded);
        }
        multiply(t->s, kBlockN, x->v + (size_t)j0 * x->padded, x->padded, t->out, x->padded, height, x->padded, kBlockN);
    }
    for (int i = 0; i < rows; ++i) {
        const float weight = t->row_sum[i] > 0 ? 1 / t->row_sum[i] : 0;
        for (int d = 0; d < a->headdim; ++d) out[(i0 + i) * query_stride(a) + d] = t->out[i * x->padded + d] * weight;
        lse[i0 + i] = t->row_max[i] + logf(t->row_sum[i]);
    }
}

// Queries first .. last - 1 of one head. Returns 1 if there is not enough memory, or headdim is above kMaxDim.
static int attend_rows(const struct attention* a, int b, int h, int first, int last, const float* q, const float* k, const float* v,
                       float* out, float* lse) {
    struct packed x = {a->headdim, padded_dim(a), 0, 0};
    struct tile* t = malloc(sizeof *t);
    x.kt = calloc((size_t)key_tiles(a) * kBlockN * (a->headdim + x.padded), sizeof(float));
    if (t && x.kt && a->headdim <= kMaxDim) {
        x.v = x.kt + (size_t)key_tiles(a) * kBlockN * a->headdim;
        const int keys = visible_keys(a, last - 1);
        pack(&x, a, k + key_start(a, b, h), v + key_start(a, b, h), keys);
        float* L = lse + ((size_t)b * a->heads + h) * a->seqlen_q;
        for (int i = first; i < last; i += kBlockM) attend(t, a, &x, q + query_start(a, b, h), i, out + query_start(a, b, h), L);
    }
    const int failed = !t || !x.kt || a->headdim > kMaxDim;
    free(t), free(x.kt);
    return failed;
}

#ifndef FROM_NEXT_STEP
int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    for (int b = 0; b < a->batch; ++b)
        for (int h = 0; h < a->heads; ++h)
            if (attend_rows(a, b, h, 0, a->seqlen_q, q, k, v, out, lse)) return 1;
    return 0;
}

#ifdef MAIN
#include "backward_02_tiles.c"
#include "check.h"
#endif
#endif
