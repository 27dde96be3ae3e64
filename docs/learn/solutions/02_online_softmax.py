import numpy as np


def step(row_max, row_sum, acc, scores, v):
    new_max = np.maximum(row_max, scores.max(axis=1))
    base = np.where(np.isneginf(new_max), 0.0, new_max)
    p = np.exp(scores - base[:, None])
    factor = np.exp(row_max - base)  # what the sums so far are worth under the new maximum
    return new_max, factor * row_sum + p.sum(axis=1), factor[:, None] * acc + p @ v
