import numpy as np


def within_budget(out, exact, plain, floor=1e-6):
    if out.shape != exact.shape or np.isnan(out).any():
        return False
    infinite = np.isinf(exact)
    if not np.array_equal(infinite, np.isinf(out)) or not np.array_equal(out[infinite], exact[infinite]):
        return False
    finite = ~infinite
    budget = 2 * np.abs(plain[finite] - exact[finite]).max(initial=0) + floor
    return bool(np.abs(out[finite] - exact[finite]).max(initial=0) <= budget)
