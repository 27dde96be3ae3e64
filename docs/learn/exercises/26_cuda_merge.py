"""Exercise 26, in CUDA. The merge of split keys, a warp for each row: 26_cuda_merge.cu.

Each of up to 32 pieces has left out, divided by its own sum, and lse. Write the merge: a lane reads the lse of one
piece, shuffles give all lanes the largest and the sum of the weights, and every lane adds up four of the 128 numbers. A
piece without keys has lse = -inf and an out that nobody wrote. The judge runs your lines on the CPU, thread by
thread; where there are nvcc and a GPU of compute capability 8.0, then there, and wants 0.9 times the speed of the slow
lines: both are bound by memory, yours with an eighth of the loads.

    python docs/learn/exercises/26_cuda_merge.py
"""

import numpy as np
from judging import close, main

KERNEL = "26_cuda_merge.cu"
DIM = 128


def merged(outs, lses):
    """(pieces, rows, DIM), (pieces, rows) -> out, lse, in float64."""
    top = lses.max(0)
    weight = np.exp(lses - np.where(np.isneginf(top), 0, top))
    total = weight.sum(0)
    outs = np.where(weight[..., None] == 0, 0, outs)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isneginf(top), 0, top) + np.log(total)
    return (weight[..., None] * outs).sum(0) / np.where(total == 0, 1, total)[:, None], lse


def pieces_of(pieces, rows, empty, scale, seed):
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((pieces, rows, DIM)).astype(np.float32)
    lses = (scale * rng.standard_normal((pieces, rows))).astype(np.float32)
    if empty:
        lses[rng.random((pieces, rows)) < 0.4] = -np.inf
        lses[:, rows // 2] = -np.inf  # a row without any key
        outs[np.isneginf(lses)] = np.nan
    return outs, lses


def judge(kernel):
    for pieces, rows, empty, scale in (
        (1, 1, False, 1),
        (2, 5, False, 1),
        (5, 7, False, 300),
        (7, 9, True, 1),
        (32, 101, True, 3),
    ):
        outs, lses = pieces_of(pieces, rows, empty, scale, pieces)
        shapes = [((rows, DIM), np.float32), ((rows,), np.float32)]
        (out, lse), _ = kernel.run([outs, lses], shapes, (pieces, rows))
        exact, exact_lse = merged(outs.astype(float), lses.astype(float))
        call = f"{pieces} pieces, {rows} rows{', some without keys' if empty else ''}"
        close(f"{call}: lse[row]", lse, exact_lse, 1e-4)
        close(f"{call}: out[row, d]", out, exact, 1e-5)
    outs, lses = pieces_of(32, 4096, False, 1, 0)
    kernel.race([outs, lses], [((4096, DIM), np.float32), ((4096,), np.float32)], (32, 4096), 0.9, outs.nbytes)


if __name__ == "__main__":
    main(globals())
