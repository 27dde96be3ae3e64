"""Exercise 9. The gradients that one tile of scores contributes.

The forward pass left lse of each row. Before the tiles, delta = rowsum(dout * out) was computed. Then

    P  = exp(S - lse)       dP = dout V^T       dS = P (dP - delta)
    dV += P^T dout          dK += scale dS^T Q  dQ += scale dS K

Nothing else of the forward pass is kept: S is computed again from q and k.

    python docs/learn/exercises/09_backward_tile.py
"""

import numpy as np
from judging import close, main

TO_WRITE = ("tile_gradients",)


def tile_gradients(q, k, v, dout, lse, delta, scale):
    """Of some rows and keys: q (rows, dim), k (keys, dim), v (keys, dim_v), dout (rows, dim_v), lse and delta (rows)
    -> what the tile adds to dq (rows, dim), dk (keys, dim) and dv (keys, dim_v)."""
    raise NotImplementedError("tile_gradients(q, k, v, dout, lse, delta, scale) -> dq, dk, dv")


# ---- the judge ----


def attention(q, k, v, scale):
    scores = scale * q @ k.T
    top = scores.max(1, keepdims=True)
    weight = np.exp(scores - top)
    sums = weight.sum(1, keepdims=True)
    return weight / sums @ v, (top + np.log(sums))[:, 0]


def judge(tile_gradients):
    rng = np.random.default_rng(5)
    scale, rows, keys = 0.3, 10, 12
    q, k, v, dout = (rng.standard_normal(shape) for shape in ((rows, 5), (keys, 5), (keys, 4), (rows, 4)))
    out, lse = attention(q, k, v, scale)
    delta = (dout * out).sum(1)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for i in (slice(0, 6), slice(6, 10)):
        for j in (slice(0, 5), slice(5, 12)):
            parts = tile_gradients(*(x.copy() for x in (q[i], k[j], v[j], dout[i], lse[i], delta[i])), scale)
            dq[i] += parts[0]
            dk[j] += parts[1]
            dv[j] += parts[2]
    for name, array, found in (("dv", v, dv), ("dk", k, dk), ("dq", q, dq)):  # against differences of the loss
        exact = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            losses = []
            for step in (1e-5, -1e-5):
                array[at] += step
                losses.append((attention(q, k, v, scale)[0] * dout).sum())
                array[at] -= step
            exact[at] = (losses[0] - losses[1]) / 2e-5
        close(f"{name}, the sum over four tiles", found, exact, 1e-7)


if __name__ == "__main__":
    main(globals())
