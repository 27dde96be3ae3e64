"""Exercise 23, in CUDA. Copies under way while a block computes: 23_cuda_pipeline.cu.

The slow lines copy a tile into shared memory, wait, and compute. Write the loop with kStages buffers: three copies are
under way while the block computes with the fourth. One __syncthreads for each tile is enough. The judge runs
your lines on the CPU, thread by thread, and looks whether copies are under way at the same time. Where there are nvcc
and a GPU of compute capability 8.0, it then runs them there, and wants 1.2 times the speed.

    python docs/learn/exercises/23_cuda_pipeline.py
"""

import numpy as np
from judging import close, main, require

KERNEL = "23_cuda_pipeline.cu"
THREADS, FLOATS = 128, 512


def sums(x):
    """x (blocks, tiles, FLOATS) -> (blocks, THREADS): what the kernel computes, in float64."""
    total = np.zeros((len(x), THREADS))
    for tile in range(x.shape[1]):
        one = np.zeros((len(x), THREADS))
        for i in range(64):
            one = one * 0.5 + x[:, tile, (np.arange(THREADS) + 4 * i) % FLOATS]
        total += one
    return total


def judge(kernel):
    rng = np.random.default_rng(23)
    for tiles in (1, 2, 3, 4, 5, 37):  # fewer than the stages, as many, and more
        x = rng.standard_normal((5, tiles, FLOATS)).astype(np.float32)
        (y,), _ = kernel.run([x], [((5, THREADS), np.float32)], (5, tiles))
        close(f"{tiles} tiles: y[block, thread]", y, sums(x), 1e-4)
    if kernel.on_cpu():
        under_way = kernel.counted("most_groups")
        require(
            under_way > 1, "right, but each copy is waited for before the next one starts: none is under way meanwhile"
        )
    x = rng.standard_normal((132, 200, FLOATS)).astype(np.float32)
    kernel.race([x], [((132, THREADS), np.float32)], (132, 200), 1.2, x.nbytes)


if __name__ == "__main__":
    main(globals())
