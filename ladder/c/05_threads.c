// 05_threads.c: the micro kernel of 04_register_tiles.c on all cores.
//
// New: threads. The work is cut into items of 384 queries of one head, more items than cores. A thread takes the next item from a counter
// that all threads share, so slow threads, and threads whose items have many visible keys, take fewer items. No item writes what another
// reads, so there is no lock. Each item packs its own copy of the keys, which costs a few percent with 384 queries in an item.
//
// Bound by the multiply-add units of all cores. The library's kernel (cuda/cpu/attention/tile_kernel.h) goes further: its lanes are
// queries, so that maximum, sum and correction of 16 rows are single vectors; it takes the exponentials of S soon after the product; its
// tiles fit the caches and are fetched ahead; its threads outlive the call; one program serves every instruction set, dtype and option.
#define FROM_NEXT_STEP
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "04_register_tiles.c"

enum { kItemRows = 8 * kBlockM, kMaxThreads = 256 };

struct work {
    const struct attention* a;
    const float *q, *k, *v;
    float *out, *lse;
    int items_of_head, items;
    atomic_int next, failed;
};

static void* worker(void* given) {
    struct work* w = given;
    const struct attention* a = w->a;
    for (int item; (item = atomic_fetch_add(&w->next, 1)) < w->items;) {
        const int head = item / w->items_of_head, b = head / a->heads, h = head % a->heads;
        const int part = w->items_of_head - 1 - item % w->items_of_head;  // the last queries first: under a causal mask they see most keys
        const int first = part * kItemRows, last = first + kItemRows < a->seqlen_q ? first + kItemRows : a->seqlen_q;
        if (attend_rows(a, b, h, first, last, w->q, w->k, w->v, w->out, w->lse)) atomic_store(&w->failed, 1);
    }
    return NULL;
}

int attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, const struct attention* a) {
    struct work w = {.a = a, .q = q, .k = k, .v = v, .out = out, .lse = lse};
    w.items_of_head = (a->seqlen_q + kItemRows - 1) / kItemRows;
    w.items = a->batch * a->heads * w.items_of_head;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    pthread_t threads[kMaxThreads];
    int started = 0;
    while (started < cores - 1 && started < w.items - 1 && started < kMaxThreads)
        if (pthread_create(&threads[started], NULL, worker, &w) == 0) ++started;
        else break;  // fewer threads do the same work
    worker(&w);
    for (int i = 0; i < started; ++i) pthread_join(threads[i], NULL);
    return atomic_load(&w.failed);
}

#ifdef MAIN
#include "backward_02_tiles.c"
#include "check.h"
#endif
