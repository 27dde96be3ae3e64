"""Exercise 2. The step on which FlashAttention rests: the state of some rows, and one more tile of keys.

The state of a row after some keys is

    row_max   the largest score so far, -inf before the first key
    row_sum   sum of exp(s - row_max) over the keys so far
    acc       sum of exp(s - row_max) v over the keys so far

Write the step that takes the scores of the next tile and its values. Whatever the order of the tiles, acc / row_sum
must end as the softmax times V. A tile may be masked for some rows (scores -inf), before and after other tiles.

    python docs/learn/exercises/02_online_softmax.py
"""

import numpy as np
from judging import close, main, require

TO_WRITE = ("step",)


def step(row_max, row_sum, acc, scores, v):
    """row_max, row_sum (rows), acc (rows, dim), scores (rows, keys), v (keys, dim) -> the new row_max, row_sum, acc."""
    raise NotImplementedError("step(row_max, row_sum, acc, scores, v) -> row_max, row_sum, acc")


# ---- the judge ----


def judge(step):
    rng = np.random.default_rng(2)
    rows, keys, dim, tile = 6, 64, 8, 16
    scores, v = 30 * rng.standard_normal((rows, keys)), rng.standard_normal((keys, dim))
    scores += np.linspace(-800, 800, rows)[:, None]  # no row can do without its maximum
    scores[1, :tile] = scores[2, tile : 2 * tile] = scores[3, -tile:] = -np.inf
    scores[4] = -np.inf
    top = scores.max(1, keepdims=True)
    weight = np.where(np.isneginf(scores), 0, np.exp(scores - np.where(np.isneginf(top), 0, top)))
    seen = weight.sum(1) != 0
    exact = np.where(seen[:, None], weight @ v / np.where(seen, weight.sum(1), 1)[:, None], 0)
    for name, order in (("first to last", range(0, keys, tile)), ("last to first", range(keys - tile, -1, -tile))):
        state = np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, dim))
        for n, j in enumerate(order, 1):
            state = step(*state, scores[:, j : j + tile].copy(), v[j : j + tile])
            for part, array in zip(("row_max", "row_sum", "acc"), state, strict=True):
                require(not np.isnan(array).any(), f"{part} has a NaN after {n} tiles, tiles from {name}")
        row_max, row_sum, acc = state
        close(f"row_max, tiles from {name}", row_max, top[:, 0])
        close(f"row_sum, tiles from {name}", row_sum, weight.sum(1), 1e-9)
        out = acc / np.where(row_sum == 0, 1, row_sum)[:, None]
        close(f"acc / row_sum, tiles from {name}", out, exact)


if __name__ == "__main__":
    main(globals())
