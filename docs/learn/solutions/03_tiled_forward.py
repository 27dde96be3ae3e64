import numpy as np


def attention(q, k, v, scale, block_q=64, block_k=64):
    out, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        height = len(lse[rows])
        row_max, row_sum, acc = np.full(height, -np.inf), np.zeros(height), np.zeros((height, v.shape[1]))
        for j in range(0, len(k), block_k):
            scores = scale * q[rows] @ k[j : j + block_k].T
            new_max = np.maximum(row_max, scores.max(axis=1))
            p = np.exp(scores - new_max[:, None])
            factor = np.exp(row_max - new_max)
            row_max, row_sum = new_max, factor * row_sum + p.sum(axis=1)
            acc = factor[:, None] * acc + p @ v[j : j + block_k]
        out[rows], lse[rows] = acc / row_sum[:, None], row_max + np.log(row_sum)
    return out, lse
