TILE_BYTES = 8192


def counts(consumers):
    return 1, consumers


def producer(tiles, slots, full, empty, copy):
    for tile in range(tiles):
        lap, slot = divmod(tile, slots)
        yield empty[slot], (lap + 1) % 2  # over at once on the first lap
        full[slot].arrive(expect=TILE_BYTES)
        copy(tile, slot, full[slot])


def consumer(tiles, slots, full, empty, read):
    for tile in range(tiles):
        lap, slot = divmod(tile, slots)
        yield full[slot], lap % 2
        read(slot)
        empty[slot].arrive()
