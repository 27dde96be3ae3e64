for (int item; (item = atomic_fetch_add(&w->next, 1)) < w->items;) run(w, item, w->scratch + (size_t)me->number * w->a->seqlen_k);
