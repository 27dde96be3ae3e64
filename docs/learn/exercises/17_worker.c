// 17_worker.c: attention in work items, each 32 queries of one head. The slow lines have one thread; yours are what every thread runs.
// The exercise and its judge are in 17_worker.py. Write between `#else` and `#endif`.
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "row_tools.h"

enum { kBlockM = 32, kMaxThreads = 256 };

struct work {
    const struct attention* a;
    const float *q, *k, *v;
    float *out, *lse, *scratch;  // scratch: seqlen_k floats for each thread
    int items;
    atomic_int next;   // 0 at the start; for you
    atomic_int* done;  // how often each item was computed
};
struct thread {
    struct work* w;
    int number;  // 0 .. threads - 1
};

int pause_us = 0;             // the judge makes items slow, so that threads meet
int wrong_item, wrong_count;  // for the judge's message

// The judge holds the first thread that takes an item, and counts how many items this thread takes in all.
int hold_us = 0, of_the_held;
static atomic_int somebody_held, beyond;
static _Thread_local int is_held;

// Between a look at a number and what is done about it others may go on; the judge gives them time.
static int looked_at(int x) {
    if (pause_us) usleep(pause_us);
    return x;
}
#undef atomic_load
#define atomic_load(p) looked_at(atomic_load_explicit(p, memory_order_seq_cst))

// Computes item 0 .. w->items - 1. s: seqlen_k floats, which no other thread may use meanwhile.
static void run(struct work* w, int item, float* s) {
    const struct attention* a = w->a;
    if (item < 0 || item >= w->items) {
        beyond = 1, wrong_item = item;
        return;
    }
    if (hold_us && !atomic_exchange(&somebody_held, 1)) is_held = 1, usleep(hold_us);
    if (is_held) ++of_the_held;
    const int tiles = (a->seqlen_q + kBlockM - 1) / kBlockM, head = item / tiles, b = head / a->heads, h = head % a->heads, n = a->headdim;
    const int first = item % tiles * kBlockM, last = first + kBlockM < a->seqlen_q ? first + kBlockM : a->seqlen_q;
    for (int i = first; i < last; ++i) {
        const size_t at = query_start(a, b, h) + i * query_stride(a), keys = key_start(a, b, h);
        const int seen = visible_keys(a, i);
        float max = -INFINITY, sum = 0;
        scores(w->q + at, w->k + keys, key_stride(a), seen, n, scale_of(a), s);
        if (pause_us && i == first) usleep(pause_us);
        for (int j = 0; j < seen; ++j) max = s[j] > max ? s[j] : max;
        for (int j = 0; j < seen; ++j) sum += s[j] = expf(s[j] - max);
        for (int d = 0; d < n; ++d) w->out[at + d] = 0;
        add_values(w->out + at, s, w->v + keys, key_stride(a), seen, n);
        for (int d = 0; d < n && seen > 0; ++d) w->out[at + d] /= sum;
        w->lse[((size_t)b * a->heads + h) * a->seqlen_q + i] = seen > 0 ? max + logf(sum) : -INFINITY;
    }
    atomic_fetch_add(&w->done[item], 1);
}

static int threads_of(void) {
#ifdef SLOW
    return 1;
#else
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 2 ? 2 : cores > kMaxThreads ? kMaxThreads : (int)cores;
#endif
}

static int written = 1;

static void* worker(void* given) {
    struct thread* me = given;
    struct work* w = me->w;
#ifdef SLOW
    for (int item = 0; item < w->items; ++item) run(w, item, w->scratch);
#else
    (void)w, (void)run, written = 0;  // yours: every item once, by whichever thread is free
#endif
    return NULL;
}

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    const int threads = threads_of(), items = a->batch * a->heads * ((a->seqlen_q + kBlockM - 1) / kBlockM);
    struct work w = {.a = a, .q = q, .k = k, .v = v, .out = out, .lse = lse, .items = items};
    struct thread all[kMaxThreads];
    pthread_t started[kMaxThreads];
    is_held = 0, of_the_held = 0, somebody_held = 0, beyond = 0;
    w.scratch = malloc(sizeof(float) * threads * (a->seqlen_k + kLanes)), w.done = calloc(items, sizeof *w.done);
    for (int t = 0; t < threads; ++t) all[t] = (struct thread){&w, t};
    for (int t = 1; t < threads; ++t)
        if (pthread_create(&started[t], NULL, worker, &all[t])) return 1;
    worker(&all[0]);
    for (int t = 1; t < threads; ++t) pthread_join(started[t], NULL);
    int code = !written ? kNotWritten : beyond ? kNoSuchItem : 0;
    if (beyond) wrong_count = items;
    for (int item = 0; item < items && !code; ++item)
        if (w.done[item] != 1) code = kWrongItems, wrong_item = item, wrong_count = w.done[item];
    free(w.scratch), free(w.done);
    return code;
}
