def accumulator(lane, i):
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def pack(c, c_next):
    return (c[0], c[1]), (c[2], c[3]), (c_next[0], c_next[1]), (c_next[2], c_next[3])
