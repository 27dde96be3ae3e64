"""Exercise 16, in C. e^x in a loop that becomes vectors: 16_exponential.c.

The slow line calls expf for each score. A loop with a call stays scalar, so the exponentials take longer than both
products. Write e^x for x <= 0 as arithmetic: x = n ln 2 + r with n whole and |r| <= ln 2 / 2; e^r is a polynomial of
degree 7, and 2^n is added to the exponent's bits. Below -87 the result is 0, and so it is for a hidden score,
-inf. It may be off by 3 units in the last place. The judge wants the exponentials 3 times as fast as expf, or 1.3 times
where vectors have only 4 numbers.

    python docs/learn/exercises/16_exponential.py
"""

import ctypes
import time

import numpy as np
from judging import main, require
from kernels import check, machine, race

KERNEL = "16_exponential.c"


def exponentials(kernel, x, slow=False):
    y = np.empty_like(x)
    kernel.library(slow).exponentials(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), x.size)
    return y


def judge(kernel):
    kernel.attention(*(np.ones((1, 1, 1, 16), np.float32),) * 3, False)  # says so if it is not written
    for name, first, last in (("0 to -1", 0, -1), ("-1 to -20", -1, -20), ("-20 to -87", -20, -86.9)):
        x = np.linspace(first, last, 100003, dtype=np.float32)
        y, exact = exponentials(kernel, x), np.exp(x.astype(np.float64))
        off = np.abs(y - exact) / np.spacing(exact.astype(np.float32))
        at = int(off.argmax()) if not np.isnan(off).any() else int(np.isnan(off).argmax())
        require(off[at] <= 3, f"x from {name}: e^{x[at]:.7g} is {y[at]:.8g}, expected {exact[at]:.8g}")
    x = np.array([0, -np.inf, -1e30, -200], np.float32)
    for value, y, exact in zip(x, exponentials(kernel, x), (1, 0, 0, 0), strict=True):
        require(y == exact, f"the ends: e^{value:g} is {y:g}, expected {exact}")
    x = np.linspace(-87, -1000, 100003, dtype=np.float32)
    y = exponentials(kernel, x)
    off = ~((y >= 0) & (y < 2e-38))
    at = int(off.argmax())
    require(not off.any(), f"the ends: e^{x[at]:.7g} is {y[at]:.8g}, expected 0")
    check(kernel)
    x, took = np.linspace(-30, 0, 32768, dtype=np.float32), {True: np.inf, False: np.inf}
    for _ in range(60):
        for slow in took:
            start = time.perf_counter()
            exponentials(kernel, x, slow)
            took[slow] = min(took[slow], time.perf_counter() - start)
    ratio = took[True] / took[False]
    race(kernel, (1, 256, 1024, 1, 1, 32), False, 0)
    kernel.said = f"the exponentials alone: {ratio:.1f} times as fast as expf. The kernel: {kernel.said}"
    least = 3 if machine()["vector"] > 16 else 1.3
    require(
        ratio >= least * kernel.strict,
        f"right, but the exponentials are {ratio:.1f} times as fast as expf; {least:g} times is enough",
    )


if __name__ == "__main__":
    main(globals())
