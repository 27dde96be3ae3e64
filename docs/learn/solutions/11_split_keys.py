import numpy as np


def combine(outs, lses):
    top = lses.max(axis=0)
    base = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(lses - base)  # 0 for a piece without keys
    total = weight.sum(axis=0)
    empty = total == 0
    divisor = np.where(empty, 1.0, total)
    share = (weight / divisor)[..., None]
    out = np.where(share == 0, 0.0, share * np.where(share == 0, 0.0, outs)).sum(axis=0)  # 0 x NaN would be NaN
    return out, np.where(empty, -np.inf, base + np.log(divisor))
