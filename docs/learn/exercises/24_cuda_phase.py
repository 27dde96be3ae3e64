"""Exercise 24, in CUDA. The phases of mbarriers between two warps: 24_cuda_phase.cu.

A warp puts tiles into two slots in turn, another takes them out. Write both roles: who waits for which barrier with
which parity, and who arrives where. Exercise 20 on a GPU, without __syncthreads in the loop. A wait that lasts a second
is taken for a deadlock. The judge runs your lines on the CPU, thread by thread; where there are nvcc and a GPU of
compute capability 9.0, then there.

    python docs/learn/exercises/24_cuda_phase.py
"""

import numpy as np
from judging import close, main, require

KERNEL = "24_cuda_phase.cu"


def taken(x):
    return 2 * np.roll(x, -1, axis=1)


def judge(kernel):
    kernel.needs = (9, 0)
    rng = np.random.default_rng(24)
    for tiles in (1, 2, 3, 4, 5, 1000):
        x = rng.standard_normal((tiles, 32)).astype(np.float32)
        (y,), _ = kernel.run([x], [((tiles, 32), np.float32)], (tiles,))
        close(f"{tiles} tiles: y[tile, lane]", y, taken(x), 0)
    if kernel.on_cpu():
        times = kernel.counted("block_meetings")
        require(
            times < 1000, f"right, but the whole block meets {times} times, and no warp runs ahead: use the mbarriers"
        )
    kernel.race([x], [((tiles, 32), np.float32)], (tiles,), 0)


if __name__ == "__main__":
    main(globals())
