/* Attention from C: the library and its header, nothing else.
 *
 *     cmake --install build --prefix $HOME/fa
 *     cc -std=c99 -O2 examples/c/attention.c -I$HOME/fa/include -L$HOME/fa/lib -Wl,-rpath,$HOME/fa/lib -lflash_attn_minimal -lm
 *     ./a.out
 *
 * A text of ROWS tokens goes through causal attention at once. Then its last token comes alone, over a cache that holds the keys and values
 * of the tokens before it. Its output has to equal the last row of the first output. Both are compared with standard attention in double
 * precision. In the end the call for one token is prepared once and made for the last LAST tokens, one after the other.
 *
 * For memory on a GPU: device = FA_CUDA, pointers from cudaMalloc, and a cudaStream_t in place of the NULL. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flash_attn.h"

enum { ROWS = 500, LAST = 10, HEADS = 8, HEADS_K = 2, DIM = 64 };

static float q[ROWS][HEADS][DIM], k[ROWS][HEADS_K][DIM], v[ROWS][HEADS_K][DIM], out[ROWS][HEADS][DIM];
static float cache_k[ROWS][HEADS_K][DIM], cache_v[ROWS][HEADS_K][DIM], step[1][HEADS][DIM];

static void fill(float* x, size_t count) {
    static unsigned state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / (1 << 23) - 1.0f;
    }
}

/* Strides of a (rows, heads, DIM) array, in elements. There is one sequence, so batch_stride does not matter. */
static fa_tensor tensor(float* data, int heads) {
    fa_tensor t = {data, 0, (int64_t)heads * DIM, DIM};
    return t;
}

static void check(fa_status status) {
    if (status == FA_OK) return;
    fprintf(stderr, "%s: %s\n", fa_status_name(status), fa_last_error());
    exit(1);
}

/* The library allocates nothing: the plan of a call says how much scratch memory it needs, and the caller provides it. */
static void attach_workspace(fa_attention_args* args, const fa_attention_plan* plan) {
    args->workspace = malloc(plan->workspace_bytes);
    args->workspace_bytes = plan->workspace_bytes;
    if (!args->workspace && plan->workspace_bytes) exit(1);
}

/* The largest difference between one row of attention over `keys` keys and the definition. */
static double row_error(const float* row, float (*result)[DIM], int keys) {
    double worst = 0;
    for (int h = 0; h < HEADS; h++) {
        const int h_k = h / (HEADS / HEADS_K); /* four query heads share each key head */
        double weight[ROWS], sum = 0, largest = -INFINITY;
        for (int j = 0; j < keys; j++) {
            weight[j] = 0;
            for (int d = 0; d < DIM; d++) weight[j] += (double)row[h * DIM + d] * k[j][h_k][d] / sqrt(DIM);
            largest = fmax(largest, weight[j]);
        }
        for (int j = 0; j < keys; j++) sum += weight[j] = exp(weight[j] - largest);
        for (int d = 0; d < DIM; d++) {
            double exact = 0;
            for (int j = 0; j < keys; j++) exact += weight[j] / sum * v[j][h_k][d];
            worst = fmax(worst, fabs(result[h][d] - exact));
        }
    }
    return worst;
}

int main(void) {
    fill(&q[0][0][0], ROWS * HEADS * DIM);
    fill(&k[0][0][0], ROWS * HEADS_K * DIM);
    fill(&v[0][0][0], ROWS * HEADS_K * DIM);

    /* ---- the whole text ---- */
    fa_attention_args args;
    memset(&args, 0, sizeof args); /* zero is the default of every option */
    args.struct_size = sizeof args;
    args.device = FA_CPU;
    args.dtype = FA_FLOAT32;
    args.batch = 1, args.nheads = HEADS, args.nheads_k = HEADS_K, args.headdim = DIM;
    args.seqlen_q = ROWS, args.seqlen_k = ROWS;
    args.q = tensor(&q[0][0][0], HEADS), args.out = tensor(&out[0][0][0], HEADS);
    args.k = tensor(&k[0][0][0], HEADS_K), args.v = tensor(&v[0][0][0], HEADS_K);
    args.causal = 1;

    fa_attention_plan plan;
    plan.struct_size = sizeof plan;
    check(fa_attention_query(&args, &plan));
    attach_workspace(&args, &plan);
    check(fa_attention_forward(&args, NULL));
    free(args.workspace);
    double worst = 0;
    for (int i = 0; i < ROWS; i++) worst = fmax(worst, row_error(&q[i][0][0], out[i], i + 1));
    printf("%d tokens at once: %s, error %.1e\n", ROWS, plan.kernel, worst);

    /* ---- one token, over a cache with room for ROWS keys that holds ROWS - 1 ---- */
    memcpy(cache_k, k, sizeof k - sizeof k[0]);
    memcpy(cache_v, v, sizeof v - sizeof v[0]);
    args.workspace = NULL, args.workspace_bytes = 0;
    args.seqlen_q = 1;
    args.q = tensor(&q[ROWS - 1][0][0], HEADS), args.out = tensor(&step[0][0][0], HEADS);
    args.k = tensor(&cache_k[0][0][0], HEADS_K), args.v = tensor(&cache_v[0][0][0], HEADS_K);

    const int32_t in_cache[1] = {ROWS - 1};
    fa_kvcache_args cached;
    memset(&cached, 0, sizeof cached);
    cached.struct_size = sizeof cached;
    cached.attention = &args;
    cached.cache_batch = 1;
    cached.cache_seqlens = in_cache;
    cached.seqlen_new = 1;
    cached.k_new = tensor(&k[ROWS - 1][0][0], HEADS_K), cached.v_new = tensor(&v[ROWS - 1][0][0], HEADS_K);
    check(fa_kvcache_query(&cached, &plan));
    attach_workspace(&args, &plan);
    check(fa_kvcache_attention(&cached, NULL));
    free(args.workspace);
    const double error = row_error(&q[ROWS - 1][0][0], step[0], ROWS);
    printf("the last one over a cache: %s, error %.1e\n", plan.kernel, error);

    const int appended = memcmp(cache_k, k, sizeof k) == 0 && memcmp(cache_v, v, sizeof v) == 0;
    if (!appended || !(fmax(worst, error) < 1e-5)) return fprintf(stderr, "that is wrong\n"), 1;

    /* ---- a prepared call: what differs from token to token are addresses and the contents of lengths[0] ---- */
    struct {
        fa_kvcache_args cached; /* the struct of the operation comes first */
        fa_attention_args args;
    } image = {cached, args};
    int32_t lengths[1];
    image.cached.cache_seqlens = lengths;
    enum { Q, OUT, K_NEW, V_NEW, WORKSPACE, WORKSPACE_BYTES, VALUES };
#define AT(field) (int32_t)((const char*)&image.field - (const char*)&image), 8
    const fa_hole holes[] = {{AT(cached.attention), -1 - (int32_t)((const char*)&image.args - (const char*)&image)},
                             {AT(args.q.data), Q},
                             {AT(args.out.data), OUT},
                             {AT(cached.k_new.data), K_NEW},
                             {AT(cached.v_new.data), V_NEW},
                             {AT(args.workspace), WORKSPACE},
                             {AT(args.workspace_bytes), WORKSPACE_BYTES}};
    const fa_call call = {FA_OP_KVCACHE_ATTENTION, 0, &image, sizeof image, holes, sizeof holes / sizeof holes[0], VALUES};
    double replayed = 0;
    for (int i = ROWS - LAST; i < ROWS; i++) {
        uint64_t values[VALUES] = {(uintptr_t)q[i], (uintptr_t)step[0], (uintptr_t)k[i], (uintptr_t)v[i], 0, 0};
        lengths[0] = i;
        check(fa_query_call(&call, values, &plan)); /* the plan of this very call */
        attach_workspace(&args, &plan);
        values[WORKSPACE] = (uintptr_t)args.workspace, values[WORKSPACE_BYTES] = args.workspace_bytes;
        check(fa_run_call(&call, values, NULL));
        free(args.workspace);
        replayed = fmax(replayed, row_error(&q[i][0][0], step[0], i + 1));
    }
    printf("the last %d by one prepared call: %s, error %.1e\n", LAST, plan.kernel, replayed);
    if (!(replayed < 1e-5)) return fprintf(stderr, "that is wrong\n"), 1;

    /* ---- what a mistake looks like ---- */
    args.nheads_k = 3;
    if (fa_kvcache_attention(&cached, NULL) == FA_OK) return 1;
    printf("refused: %s\n", fa_last_error());
    return 0;
}
