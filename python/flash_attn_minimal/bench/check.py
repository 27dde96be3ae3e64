"""Is the answer right? A few rows of a few heads against float64, with the budget that the precision allows.

The budget is twice the error of the plain three steps in the same precision (scores and sums in float32, P and out
rounded to the inputs' dtype), plus a floor. Early rows of a causal mask average few values and have large errors, so
they get a budget of their own and lend none of it to the others.
"""

from __future__ import annotations

import numpy as np

FACTOR, FLOOR = 2.0, {"float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-5}
EARLY = 64  # rows before this one are judged by themselves
ROWS, HEADS = 32, 6


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to what `dtype` can hold, kept as float32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32; to nearest, ties to even
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return x


def attend(q, k, v, rows, causal, dtype=None):
    """Attention of some rows of one head: q (len(rows), headdim), k and v whole. dtype=None computes in float64."""
    working = np.float32 if dtype else np.float64
    q, k, v = (x.astype(working) for x in (q, k, v))
    s = (q @ k.T) * working(q.shape[1] ** -0.5)
    if causal:
        s[np.arange(len(k)) > rows[:, None]] = -np.inf
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return round_to(round_to(p, dtype) @ v, dtype) if dtype else p @ v


class Exact:
    """The float64 answer on a sample of rows, computed once for all systems that get the same inputs."""

    def __init__(self, machine, shape, q, k, v, seed=0):
        """q, k, v as in shape: (batch, seqlen, heads, headdim), or (total, heads, headdim) for a varlen shape."""
        self.machine, self.floor = machine, FLOOR[shape.dtype]
        self.samples = []  # (where, rows, exact, plain); out[where] are all the rows of that head
        draw = np.random.default_rng(seed)
        group = shape.nheads // shape.nheads_k
        corners = {(0, 0), (shape.batch - 1, shape.nheads - 1)}
        drawn = {
            (int(draw.integers(shape.batch)), int(draw.integers(shape.nheads))) for _ in range(HEADS - len(corners))
        }
        for b, h in sorted(corners | drawn):
            in_q, in_k = shape.where(b, h), shape.where(b, h // group)
            kh, vh = (machine.host(x[in_k]) for x in (k, v))
            n = len(kh)
            rows = np.unique(
                np.concatenate(
                    [[0, n // 2, n - 1], draw.integers(n, size=ROWS), draw.integers(min(n, EARLY), size=ROWS // 4)]
                )
            )
            qh = machine.host(q[in_q])[rows]
            exact = attend(qh, kh, vh, rows, shape.causal)
            plain = attend(qh, kh, vh, rows, shape.causal, shape.dtype)
            self.samples.append((in_q, rows, exact, plain))

    def judge(self, out) -> tuple[float, float]:
        """(max_err, err_budget) where they are furthest apart. A NaN or Inf anywhere in `out` is an error of inf."""
        if not self.machine.finite(out):
            return float("inf"), self.floor
        errors, budgets = {True: [0.0], False: [0.0]}, {True: [0.0], False: [0.0]}  # early rows and the others
        for where, rows, exact, plain in self.samples:
            got = self.machine.host(out[where])[rows]
            for early in (True, False):
                part = (rows < EARLY) == early
                if part.any():
                    errors[early].append(float(np.abs(got[part] - exact[part]).max()))
                    budgets[early].append(float(np.abs(plain[part] - exact[part]).max()))
        verdicts = [(max(errors[early]), FACTOR * max(budgets[early]) + self.floor) for early in (True, False)]
        return max(verdicts, key=lambda verdict: verdict[0] / verdict[1])
