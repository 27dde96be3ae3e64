"""Exercise 11. Split keys: merge what several blocks computed over disjoint pieces of the keys.

Decode has one query, so one block for each head would leave most of a GPU idle. The keys are cut into pieces instead.
The block of piece i leaves out_i, already divided by its own sum, and lse_i. Merge them:

    lse = log(sum over i of exp(lse_i))        out = sum over i of exp(lse_i - lse) out_i

A piece without keys has lse_i = -inf, and its out_i was never written: it may hold NaN. If all pieces are empty, out is
0 and lse is -inf.

    python docs/learn/exercises/11_split_keys.py
"""

import numpy as np
from judging import close, main

TO_WRITE = ("combine",)


def combine(outs, lses):
    """outs (pieces, rows, dim), lses (pieces, rows) -> out (rows, dim), lse (rows)."""
    raise NotImplementedError("combine(outs, lses) -> out, lse")


# ---- the judge ----


def attention(q, k, v):
    scores = q @ k.T
    top = scores.max(1, keepdims=True)
    weight = np.exp(scores - top)
    sums = weight.sum(1, keepdims=True)
    return weight / sums @ v, (top + np.log(sums))[:, 0]


def judge(combine):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(shape) for shape in ((4, 8), (50, 8), (50, 3)))
    q[1] *= 300  # scores of some thousand: exp of them overflows
    exact = attention(q, k, v)
    for cuts in ([0, 50], [0, 25, 50], [0, 1, 2, 49, 50], [0, 0, 20, 20, 50, 50]):
        outs, lses = np.full((len(cuts) - 1, 4, 3), np.nan), np.full((len(cuts) - 1, 4), -np.inf)
        for i, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            if begin < end:
                outs[i], lses[i] = attention(q, k[begin:end], v[begin:end])
        out, lse = combine(outs, lses)
        close(f"out of the pieces {cuts}", out, exact[0])
        close(f"lse of the pieces {cuts}", lse, exact[1], 1e-9)
    outs, lses = np.full((3, 4, 3), np.nan), np.full((3, 4), -np.inf)
    for row, seen in enumerate((10, 30, 45, 50)):  # under a causal mask: other pieces are empty for each row
        for i, begin in enumerate((0, 20, 40)):
            if begin < seen:
                keys = slice(begin, min(begin + 20, seen))
                outs[i, row], lses[i, row] = (x[0] for x in attention(q[row : row + 1], k[keys], v[keys]))
    exact = [attention(q[row : row + 1], k[:seen], v[:seen]) for row, seen in enumerate((10, 30, 45, 50))]
    out, lse = combine(outs, lses)
    close("causal, pieces empty for some rows: out", out, np.concatenate([one[0] for one in exact]))
    close("causal, pieces empty for some rows: lse", lse, np.concatenate([one[1] for one in exact]), 1e-9)
    out, lse = combine(np.full((3, 4, 2), np.nan), np.full((3, 4), -np.inf))
    close("out without keys", out, np.zeros((4, 2)))
    close("lse without keys", lse, np.full(4, -np.inf))


if __name__ == "__main__":
    main(globals())
