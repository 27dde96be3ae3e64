"""Exercise 22, in CUDA. A swizzle without bank conflicts: 22_cuda_swizzle.cu.

A warp copies a tile of 64 x 64 bf16 into shared memory and reads it with ldmatrix, 2000 times. Write `offset`, one
line: exercise 18 on a GPU. The judge runs your lines on the CPU, thread by thread, compares every fragment and counts
bank conflicts. Where there are nvcc and a GPU of compute capability 8.0, it then runs them there, and wants twice the
speed of rows that follow each other.

    python docs/learn/exercises/22_cuda_swizzle.py
"""

import numpy as np
from judging import close, main, require

KERNEL = "22_cuda_swizzle.cu"


def fragments(tile):
    """(4, 4, 32 lanes, 4 registers, 2): matrix m of ldmatrix.x4 is rows 8 (m % 2), columns 8 (m // 2) of 16 x 16."""
    at, lane, m, half = np.indices((16, 32, 4, 2))
    row = at // 4 * 16 + 8 * (m % 2) + lane // 4
    column = at % 4 * 16 + 8 * (m // 2) + 2 * (lane % 4) + half
    return tile[row, column]


def judge(kernel):
    tile = np.random.default_rng(22).integers(0, 1 << 15, (64, 64)).astype(np.uint16)
    shapes = [((16, 32, 4, 2), np.uint16)]
    (got,), _ = kernel.run([tile], shapes, (1,))
    close("fragments[tile, lane, register, half]", got.astype(float), fragments(tile).astype(float), 0)
    if kernel.on_cpu():
        count = kernel.counted("bank_conflicts")
        require(count == 0, f"right, but {count} times a lane of ldmatrix wants the banks of another; 0 is possible")
    kernel.race([tile], shapes, (2000,), 2)


if __name__ == "__main__":
    main(globals())
