def place(thread, i):
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def owner(row, column):
    warp, row = divmod(row, 16)
    thread = 32 * warp + 4 * (row % 8) + column % 8 // 2
    return thread, 4 * (column // 8) + 2 * (row // 8) + column % 2


def partners(thread):
    first = thread % 32 // 4 * 4
    return list(range(first, first + 4))
