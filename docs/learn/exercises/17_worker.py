"""Exercise 17, in C. All cores: 17_worker.c.

The queries of each head are cut into items of 32. The file starts threads, and every thread calls `worker`. Write it:
every item once, by whichever thread is free, because under a causal mask later items take longer. A thread may write
only into its part of the scratch memory: w->scratch + number * seqlen_k. The judge holds one thread back to see whether
the others take its items, and wants 1.3 times the speed, where there are at least two cores.

    python docs/learn/exercises/17_worker.py
"""

import ctypes

from judging import main, require
from kernels import check, cores, inputs, race

KERNEL = "17_worker.c"


def judge(kernel):
    for pause in (300, 0):  # first with pauses in the middle of an item, so that threads that share memory are seen
        ctypes.c_int.in_dll(kernel.library(), "pause_us").value = pause
        check(kernel)
    for _ in range(12):  # many items that end at once: most of the time somebody is about to take the next
        kernel.attention(*inputs(64, 1, 1, 512, 512, 16), False)
    library = kernel.library()
    for hold in (50, 200, 1000):  # ms for which a thread is held; on a busy machine the others may need some of it
        ctypes.c_int.in_dll(library, "hold_us").value = 1000 * hold
        kernel.attention(*inputs(1, 1, 1, 128, 128, 16), False)
        count = ctypes.c_int.in_dll(library, "of_the_held").value
        if count < 2:
            break
    ctypes.c_int.in_dll(library, "hold_us").value = 0
    said = f"one thread was held for {hold} ms in its first item, and yet took {count} of 128 items"
    require(count < 2, f"right, but {said}, while others were free")
    race(kernel, (1, 512, 1024, 2, 2, 64), True, 1.3 if cores() > 1 else 0.8, threads=cores())


if __name__ == "__main__":
    main(globals())
