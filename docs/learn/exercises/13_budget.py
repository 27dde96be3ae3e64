"""Exercise 13. The judge itself: whether a kernel's result is as good as its precision allows.

`exact` is the float64 answer. `plain` is what a simple implementation gives that rounds as the kernel may. The result
may be off by twice the largest error of `plain`, plus a floor. NaN is always wrong. An infinity (lse of an empty row)
is right where `exact` has the same one, and wrong anywhere else; errors are measured over the finite rest.

    python docs/learn/exercises/13_budget.py
"""

import numpy as np
from judging import main, require

TO_WRITE = ("within_budget",)


def within_budget(out, exact, plain, floor=1e-6):
    """Three arrays of one shape, or not -> True or False."""
    raise NotImplementedError("within_budget(out, exact, plain) -> bool")


# ---- the judge of the judge ----


def judge(within_budget):
    rng = np.random.default_rng(13)
    exact = rng.standard_normal((20, 8))
    plain = exact + 1e-3 * rng.uniform(-1, 1, exact.shape)
    largest = np.abs(plain - exact).max()

    def changed(value, at=(3, 4)):
        out = exact.copy()
        out[at] = value
        return out

    empty, empty_plain = exact.copy(), plain.copy()
    empty[5] = empty_plain[5] = -np.inf
    minus, plus = empty.copy(), empty.copy()
    plus[5] = np.inf
    off_elsewhere = empty.copy()
    off_elsewhere[3, 4] += 2.1 * np.abs(np.delete(plain - exact, 5, 0)).max()
    cases = [
        ("the exact answer", exact, exact, plain, True),
        ("the plain answer", plain, exact, plain, True),
        ("1.9 times its error", changed(exact[3, 4] + 1.9 * largest), exact, plain, True),
        ("2.1 times its error, one element", changed(exact[3, 4] - 2.1 * largest), exact, plain, False),
        ("one NaN", changed(np.nan), exact, plain, False),
        ("an infinity where none belongs", changed(np.inf), exact, plain, False),
        ("-inf where it belongs", minus, empty, empty_plain, True),
        ("-inf where it belongs, and 2.1 times its error elsewhere", off_elsewhere, empty, empty_plain, False),
        ("+inf where -inf belongs", plus, empty, empty_plain, False),
        ("a number where -inf belongs", exact, empty, empty_plain, False),
        ("a difference below the floor, plain being exact", exact + 9e-7, exact, exact, True),
        ("one above it", exact + 2e-6, exact, exact, False),
        ("another shape", exact[:1], exact, plain, False),
    ]
    for name, out, true, simple, right in cases:
        with np.errstate(all="ignore"):
            said = within_budget(out.copy(), true.copy(), simple.copy())
        require(
            bool(said) == right,
            f"{name}: judged {'right' if said else 'wrong'}, but it is {'right' if right else 'wrong'}",
        )


if __name__ == "__main__":
    main(globals())
