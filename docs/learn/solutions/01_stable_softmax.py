import numpy as np


def softmax(scores):
    row_max = scores.max(axis=1)
    base = np.where(np.isneginf(row_max), 0.0, row_max)  # -inf - -inf would be NaN
    weight = np.exp(scores - base[:, None])  # at most 1
    row_sum = weight.sum(axis=1)
    empty = row_sum == 0
    divisor = np.where(empty, 1.0, row_sum)
    return weight / divisor[:, None], np.where(empty, -np.inf, base + np.log(divisor))
