def producer(tiles, slots, full, empty, put):
    slot = phase = 0
    for tile in range(tiles):
        while not empty[slot].done(phase ^ 1):  # true at once on the first lap
            yield
        put(slot, tile)
        full[slot].arrive()
        slot += 1
        if slot == slots:
            slot, phase = 0, phase ^ 1


def consumer(tiles, slots, full, empty, take):
    slot = phase = 0
    for _ in range(tiles):
        while not full[slot].done(phase):
            yield
        take(slot)
        empty[slot].arrive()
        slot += 1
        if slot == slots:
            slot, phase = 0, phase ^ 1
