"""Exercise 3. FlashAttention-2 in NumPy: one head, queries outside, keys inside.

The judge measures how much memory the call takes. The scores of 1024 x 1024 pairs would be 8 MB, those of 64 queries
with 8192 keys 4 MB; tiles of 64 x 64 need far less. Lengths need not be multiples of the tile, and scores may
be large.

    python docs/learn/exercises/03_tiled_forward.py
"""

import tracemalloc

import numpy as np
from judging import close, main, require

TO_WRITE = ("attention",)


def attention(q, k, v, scale, block_q=64, block_k=64):
    """q (seqlen_q, dim), k (seqlen_k, dim), v (seqlen_k, dim_v) float64 -> out (seqlen_q, dim_v), lse (seqlen_q)."""
    raise NotImplementedError("attention(q, k, v, scale) -> out, lse")


# ---- the judge ----


def judge(attention):
    rng = np.random.default_rng(3)
    for seqlen_q, seqlen_k, factor, tiles in (
        (1, 1, 1, {}),
        (64, 64, 1, {}),
        (130, 77, 1, {}),
        (50, 200, 1, {"block_q": 16, "block_k": 48}),
        (70, 130, 300, {}),
        (1024, 1024, 1, {}),
        (64, 8192, 1, {}),
    ):
        call = f"{seqlen_q} x {seqlen_k}{', scores of some hundred' * (factor > 1)}"
        call += "".join(f", {name}={n}" for name, n in tiles.items())
        dim = 32 if seqlen_k <= 1024 else 8  # copies of k and v are small: only scores are not to be whole
        q, k, v = (rng.standard_normal(shape) for shape in ((seqlen_q, dim), (seqlen_k, dim), (seqlen_k, 3 * dim // 4)))
        q[::2] *= factor
        scores = 0.5 * q @ k.T
        top = scores.max(1, keepdims=True)
        weight = np.exp(scores - top)
        sums = weight.sum(1, keepdims=True)
        exact, exact_lse = weight @ v / sums, (top + np.log(sums))[:, 0]
        del scores, weight
        peak = np.inf
        for _ in range(2):  # what another thread of the process takes meanwhile is not in both
            given = q.copy(), k.copy(), v.copy()
            tracemalloc.start()
            out, lse = attention(*given, 0.5, **tiles)
            peak = min(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        close(f"out of {call}", out, exact)
        close(f"lse of {call}", lse, exact_lse)
        require(peak < 2e6, f"{call} took {peak / 1e6:.1f} MB: more than the tiles and out need")


if __name__ == "__main__":
    main(globals())
