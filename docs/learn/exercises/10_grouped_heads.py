"""Exercise 10. Grouped-query attention: which key head a query head reads, and how decode packs a group into one tile.

With nheads = 8 and nheads_k = 2, query heads 0 .. 3 share key head 0 and query heads 4 .. 7 share key head 1. In decode
the seqlen_q * group rows that share a key head are one tile, so that each key is read once: row r of the tile of a key
head is position r // group of the sequence and query head r % group of the group.

    python docs/learn/exercises/10_grouped_heads.py
"""

import numpy as np
from judging import close, main, require

TO_WRITE = ("pack", "unpack")


def pack(q, nheads_k):
    """q (seqlen_q, nheads, dim) -> (nheads_k, seqlen_q * group, dim): the tile of each key head."""
    raise NotImplementedError("pack(q, nheads_k)")


def unpack(tiles, seqlen_q):
    """The inverse: (nheads_k, seqlen_q * group, dim) -> (seqlen_q, nheads, dim)."""
    raise NotImplementedError("unpack(tiles, seqlen_q)")


# ---- the judge ----


def softmax(s):
    weight = np.exp(s - s.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def judge(pack, unpack):
    rng = np.random.default_rng(6)
    for seqlen_q, nheads, nheads_k in ((1, 8, 2), (3, 6, 6), (4, 6, 1), (2, 12, 3)):
        call = f"seqlen_q={seqlen_q}, nheads={nheads}, nheads_k={nheads_k}"
        q, k, v = (
            rng.standard_normal((n, heads, 4)) for n, heads in ((seqlen_q, nheads), (9, nheads_k), (9, nheads_k))
        )
        tiles = np.asarray(pack(q, nheads_k))
        shape = (nheads_k, seqlen_q * nheads // nheads_k, 4)
        require(tiles.shape == shape, f"{call}: pack has the shape {tiles.shape}, expected {shape}")
        group = nheads // nheads_k
        for head in range(nheads):
            rows = tiles[head // group, head % group :: group]
            close(f"{call}: the rows of query head {head} in its tile", rows, q[:, head])
        out = unpack(np.stack([softmax(tiles[h] @ k[:, h].T) @ v[:, h] for h in range(nheads_k)]), seqlen_q)
        exact = [softmax(q[:, h] @ k[:, h // group].T) @ v[:, h // group] for h in range(nheads)]
        close(f"{call}: attention through pack and unpack", out, np.stack(exact, axis=1))


if __name__ == "__main__":
    main(globals())
