"""Exercise 14, in C. Softmax in one pass over the keys, inside a kernel that works: 14_one_pass.c.

The kernel computes a row of scores, then takes its maximum, its exponentials and its sum, and needs memory for a score
of every key. Write the function `row` with memory for 64 scores: ten lines of online softmax between `#else` and
`#endif`. The slow lines above them show what `scores` and `add_values` do.

One row at a time, this saves memory and not time; exercise 15 is about time. The judge wants half of the slow lines'
speed.

    python docs/learn/exercises/14_one_pass.py
"""

from judging import main
from kernels import check, race

KERNEL = "14_one_pass.c"


def judge(kernel):
    check(kernel)
    race(kernel, (1, 256, 4096, 1, 1, 64), False, 0.5)


if __name__ == "__main__":
    main(globals())
