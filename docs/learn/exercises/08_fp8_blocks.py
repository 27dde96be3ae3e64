"""Exercise 8. Rounding to float8_e4m3, and a scale factor for every block.

An e4m3 number has a sign, 4 bits of exponent and 3 of mantissa. From 2^-6 to 448 it is (1 + m / 8) 2^e with m = 0 .. 7.
Below 2^-6 the numbers are the multiples of 2^-9. Round to the nearest, on a tie to the even mantissa. What is beyond
448 becomes 448 with its sign.

A block of numbers with the largest magnitude a is divided by a / 448, so that its largest becomes 448. A block of zeros
has the factor 1.

    python docs/learn/exercises/08_fp8_blocks.py
"""

import numpy as np
from judging import close, main, require

TO_WRITE = ("round_e4m3", "quantize")


def round_e4m3(x):
    """The nearest e4m3 number to each x, as float64."""
    raise NotImplementedError("round_e4m3(x)")


def quantize(x, block):
    """x (rows, columns), columns a multiple of block -> values (rows, columns) that are e4m3 numbers, and factors
    (rows, columns // block); x is about values times the factor of their block."""
    raise NotImplementedError("quantize(x, block) -> values, factors")


# ---- the judge ----


def every_e4m3():
    bits = np.arange(127)
    exponent, mantissa = bits // 8, bits % 8
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def judge(round_e4m3, quantize):
    numbers = every_e4m3()
    for sign in (1, -1):
        close("round_e4m3 of e4m3 numbers", round_e4m3(sign * numbers), sign * numbers, 0)
        middles = (numbers[:-1] + numbers[1:]) / 2
        even = np.where(np.arange(126) % 2 == 0, numbers[:-1], numbers[1:])
        close("round_e4m3 of ties", round_e4m3(sign * middles), sign * even, 0)
        for nudge, wanted in ((0.999, numbers[:-1]), (1.001, numbers[1:])):
            close("round_e4m3 beside ties", round_e4m3(sign * middles * nudge), sign * wanted, 0)
        close("round_e4m3 beyond 448", round_e4m3(sign * np.array([449.0, 1e6])), sign * np.array([448.0, 448.0]), 0)
    x = np.random.default_rng(8).standard_normal((16, 256))
    x[3, 40] = 3e4  # an outlier: with one factor for everything, all other numbers fall below 2^-9
    x[5, :64] = 0
    error = {}
    for block in (256, 64):
        values, factors = quantize(x.copy(), block)
        require(np.shape(factors) == (16, 256 // block), f"block={block}: factors have the shape {np.shape(factors)}")
        close(f"block={block}: the values, rounded once more", round_e4m3(values), values, 0)
        factors = np.repeat(factors, block, axis=1)
        top = np.abs(x).reshape(16, -1, block).max(2).repeat(block, axis=1)
        close(f"block={block}: the factors", factors, np.where(top == 0, 1, top / 448), 1e-9)
        off = np.abs(values * factors - x) - np.maximum(np.abs(x) / 16, factors * 2.0**-10)
        require(off.max() <= 1e-9, f"block={block}: a number is off by more than half a step, by {off.max():.3g}")
        error[block] = np.abs(values * factors - x)[3].mean()
    require(
        error[64] < error[256],
        f"the row with the outlier: mean error {error[64]:.3g} in blocks of 64, {error[256]:.3g} whole",
    )


if __name__ == "__main__":
    main(globals())
