def pack(q, nheads_k):
    seqlen_q, nheads, dim = q.shape
    grouped = q.reshape(seqlen_q, nheads_k, nheads // nheads_k, dim)
    return grouped.swapaxes(0, 1).reshape(nheads_k, -1, dim)


def unpack(tiles, seqlen_q):
    nheads_k, rows, dim = tiles.shape
    grouped = tiles.reshape(nheads_k, seqlen_q, rows // seqlen_q, dim)
    return grouped.swapaxes(0, 1).reshape(seqlen_q, -1, dim)
