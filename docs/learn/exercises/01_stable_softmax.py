"""Exercise 1. The softmax of rows of scores, for any finite scores, and for rows that are partly or wholly masked.

    p[i, j] = exp(s[i, j]) / sum over j of exp(s[i, j])        lse[i] = log(sum over j of exp(s[i, j]))

exp(1000) overflows, so the formula as it stands fails. A masked score is -inf and has p = 0. A row whose scores are all
-inf has p = 0 everywhere and lse = -inf, without a NaN and without a warning.

    python docs/learn/exercises/01_stable_softmax.py
"""

import warnings

import numpy as np
from judging import close, main

TO_WRITE = ("softmax",)


def softmax(scores):
    """scores (rows, columns) float64 -> p (rows, columns), lse (rows)."""
    raise NotImplementedError("softmax(scores) -> p, lse")


# ---- the judge ----


def judge(softmax):
    rng = np.random.default_rng(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = rng.standard_normal((5, 7))
        weight = np.exp(small)
        p, lse = softmax(small.copy())
        close("p of small scores", p, weight / weight.sum(1, keepdims=True))
        close("lse of small scores", lse, np.log(weight.sum(1)))
        for shift in (1000.0, -1000.0):
            p_shifted, lse_shifted = softmax(small + shift)
            close(f"p of the same scores {shift:+.0f}", p_shifted, p)
            close(f"lse of the same scores {shift:+.0f}", lse_shifted, lse + shift)
        steps = small + np.array([-1000.0, -10.0, 0.0, 10.0, 1000.0])[:, None]
        p_steps, lse_steps = softmax(steps.copy())
        close("p of rows that lie 1000 apart", p_steps, p)
        close("lse of rows that lie 1000 apart", lse_steps, lse + steps[:, 0] - small[:, 0])
        masked = small.copy()
        masked[0, 3:] = -np.inf
        masked[2] = -np.inf
        hidden = np.where(np.isneginf(masked), 0, weight)
        sums = hidden.sum(1, keepdims=True)
        p, lse = softmax(masked.copy())
        close("p of masked scores", p, hidden / np.where(sums == 0, 1, sums))
        close(
            "lse of masked scores", lse, np.where(sums[:, 0] == 0, -np.inf, np.log(np.where(sums == 0, 1, sums))[:, 0])
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        softmax(masked)


if __name__ == "__main__":
    main(globals())
