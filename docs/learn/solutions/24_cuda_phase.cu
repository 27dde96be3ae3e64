for (int tile = 0; tile < tiles; ++tile) {
    const int slot = tile % kSlots, phase = tile / kSlots % 2;
    if (producer) {
        wait(empty[slot], phase ^ 1);  // true at once on the first lap
        produce(slots[slot], x, tile);
        fa::mbarrier_arrive(full[slot]);
    } else {
        wait(full[slot], phase);
        consume(slots[slot], y, tile);
        fa::mbarrier_arrive(empty[slot]);
    }
}
