// check.h: the main program of a step that is compiled alone.   cc -O3 -march=native -DMAIN 03_tiles.c -lm && ./a.out
// Compares both passes with sums in double on a few shapes, then prints the speed, unless there is an argument. The exit status is 1 if an
// answer is wrong.
#include <stdio.h>
#include <time.h>

static float* made(size_t count, unsigned seed) {  // uniform in -1.7 .. 1.7, as wide as a normal distribution
    float* x = malloc(sizeof(float) * count);
    if (!x) exit(2);
    unsigned long long state = seed * 2654435761ull + 1;
    for (size_t i = 0; i < count; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        x[i] = ((float)(state >> 40) / (1 << 24) - 0.5f) * 3.4f;
    }
    return x;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

struct arrays {
    size_t count_q, count_k, count_lse;
    float *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
};

static struct arrays arrays_of(const struct attention* a) {
    struct arrays x = {.count_q = a->batch * a->seqlen_q * query_stride(a), .count_k = a->batch * a->seqlen_k * key_stride(a)};
    x.count_lse = (size_t)a->batch * a->heads * a->seqlen_q;
    x.q = made(x.count_q, 1), x.k = made(x.count_k, 2), x.v = made(x.count_k, 3), x.dout = made(x.count_q, 4);
    x.out = made(x.count_q, 5), x.lse = made(x.count_lse, 6);  // to be overwritten
    x.dq = made(x.count_q, 7), x.dk = made(x.count_k, 8), x.dv = made(x.count_k, 9);
    return x;
}

static void free_arrays(struct arrays* x) {
    float* all[] = {x->q, x->k, x->v, x->out, x->lse, x->dout, x->dq, x->dk, x->dv};
    for (int i = 0; i < 9; ++i) free(all[i]);
}

static double largest;  // difference so far
static void compare(double got, double want) {
    const double error = got == want ? 0 : fabs(got - want);
    if (!(error <= largest)) largest = error;  // NaN too
}

// One query row in double: compares out and lse, and adds the row's part to the gradients gk and gv of its key head.
static void check_row(const struct attention* a, const struct arrays* x, int b, int h, int i, double* p, double* gk, double* gv) {
    const size_t row = query_start(a, b, h) + i * query_stride(a), keys = key_stride(a), start = key_start(a, b, h);
    const int seen = visible_keys(a, i), n = a->headdim;
    double row_max = -INFINITY, row_sum = 0, delta = 0;
    for (int j = 0; j < seen; ++j) {
        p[j] = 0;
        for (int d = 0; d < n; ++d) p[j] += (double)x->q[row + d] * x->k[start + j * keys + d] / sqrt(n);
        row_max = fmax(row_max, p[j]);
    }
    for (int j = 0; j < seen; ++j) row_sum += p[j] = exp(p[j] - row_max);
    compare(x->lse[((size_t)b * a->heads + h) * a->seqlen_q + i], seen ? row_max + log(row_sum) : -INFINITY);
    for (int d = 0; d < n; ++d) {
        double o = 0;
        for (int j = 0; j < seen; ++j) o += p[j] / row_sum * x->v[start + j * keys + d];
        compare(x->out[row + d], o);
        delta += o * x->dout[row + d];
    }
    for (int j = 0; j < seen; ++j) {  // p becomes dS
        double dp = 0;
        for (int d = 0; d < n; ++d) dp += (double)x->dout[row + d] * x->v[start + j * keys + d];
        for (int d = 0; d < n; ++d) gv[j * n + d] += p[j] / row_sum * x->dout[row + d];
        p[j] = p[j] / row_sum * (dp - delta) / sqrt(n);
        for (int d = 0; d < n; ++d) gk[j * n + d] += p[j] * x->q[row + d];
    }
    for (int d = 0; d < n; ++d) {
        double gq = 0;
        for (int j = 0; j < seen; ++j) gq += p[j] * x->k[start + j * keys + d];
        compare(x->dq[row + d], gq);
    }
}

static int check(struct attention a) {
    struct arrays x = arrays_of(&a);
    if (attention_forward(x.q, x.k, x.v, x.out, x.lse, &a)) return 1;
    if (attention_backward(x.dout, x.q, x.k, x.v, x.out, x.lse, x.dq, x.dk, x.dv, &a)) return 1;
    const size_t head = (size_t)a.seqlen_k * a.headdim;
    double* p = malloc(sizeof(double) * (a.seqlen_k + 2 * head));
    if (!p) exit(2);
    double *gk = p + a.seqlen_k, *gv = gk + head;
    largest = 0;
    for (int b = 0; b < a.batch; ++b)
        for (int h = 0; h < a.heads; ++h) {
            if (h % (a.heads / a.heads_k) == 0) memset(gk, 0, sizeof(double) * 2 * head);
            for (int i = 0; i < a.seqlen_q; ++i) check_row(&a, &x, b, h, i, p, gk, gv);
            if ((h + 1) % (a.heads / a.heads_k) == 0)
                for (size_t at = 0; at < head; ++at) {
                    const size_t place = key_start(&a, b, h) + at / a.headdim * key_stride(&a) + at % a.headdim;
                    compare(x.dk[place], gk[at]), compare(x.dv[place], gv[at]);
                }
        }
    printf("%d x %d queries, %d keys, %d/%d heads of %d, %s: largest error %.1e\n", a.batch, a.seqlen_q, a.seqlen_k, a.heads, a.heads_k,
           a.headdim, a.causal ? "causal" : "full", largest);
    free(p), free_arrays(&x);
    return !(largest < 2e-4);
}

int main(int count, char** arguments) {
    (void)arguments;
    int wrong = 0;
    for (int causal = 0; causal < 2; ++causal) {
        wrong |= check((struct attention){2, 77, 203, 4, 2, 64, causal});
        wrong |= check((struct attention){1, 130, 35, 2, 1, 128, causal});
        wrong |= check((struct attention){1, 1, 1, 1, 1, 40, causal});
    }
    struct attention a = {1, 1024, 1024, 4, 4, 64, 0};
    struct arrays x = arrays_of(&a);
    for (int backward = 0; backward < 2 && count == 1; ++backward) {
        double best = INFINITY, all = 0;
        for (int i = 0; i < 9 && all < 1; ++i) {
            const double start = seconds();
            if (backward) attention_backward(x.dout, x.q, x.k, x.v, x.out, x.lse, x.dq, x.dk, x.dv, &a);
            else attention_forward(x.q, x.k, x.v, x.out, x.lse, &a);
            const double took = seconds() - start;
            best = fmin(best, took), all += took;
        }
        const double flop = (backward ? 10.0 : 4.0) * a.batch * a.heads * a.seqlen_q * a.seqlen_k * a.headdim;
        printf("%s: %.1f ms, %.1f GFLOP/s\n", backward ? "backward" : "forward", best * 1e3, flop / best * 1e-9);
    }
    free_arrays(&x);
    puts(wrong ? "WRONG" : "right");
    return wrong;
}
