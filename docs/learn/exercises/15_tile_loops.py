"""Exercise 15, in C. Two loops in another order: 15_tile_loops.c.

A tile of 32 rows meets tiles of 64 keys. The slow lines take row after row over all keys, so that each row reads all of
K and V from the second-level cache or from memory, and under a causal mask also computes what it then hides. Write
`attend` with the keys outside: a tile of keys stays in the first-level cache for all 32 rows, and tiles that no row
sees are left out. The judge's call is causal, and wants 1.5 times the speed.

    python docs/learn/exercises/15_tile_loops.py
"""

from judging import main
from kernels import check, race

KERNEL = "15_tile_loops.c"


def judge(kernel):
    check(kernel)
    race(kernel, (1, 1024, 1024, 1, 1, 64), True, 1.5)


if __name__ == "__main__":
    main(globals())
