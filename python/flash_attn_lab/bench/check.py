"""Checks answers: compares sampled heads with float64, within the error that the precision allows.

The budget is twice the error of the plain three steps in the same precision (scores and sums in float32, P and the
result rounded to the inputs' dtype), plus a floor. Early rows of a causal mask average few values and have large
errors. They have a separate budget, so that their errors do not widen the budget of the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

FACTOR, FLOOR = 2.0, {"float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-5, "float8_e4m3fn": 1e-5}
GRADIENT_FLOOR = {"float32": 1e-5, "float16": 2e-4, "bfloat16": 1e-3}  # times the largest gradient
EARLY = 64  # rows before this one are judged separately
ROWS, HEADS, GRADIENT_HEADS = 32, 6, 2
BLOCK = 2048  # rows of S in memory at once


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to the values of `dtype` (or tf32), returned as float32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32; to nearest, ties to even
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    if dtype == "tf32":  # 10 bits of mantissa; ties away from zero
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32) + np.uint32(0x1000)
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if dtype == "float8_e4m3fn":  # 3 bits of mantissa, below 2**-6 multiples of 2**-9
        step = np.exp2(np.maximum(np.frexp(x)[1], -5) - 4).astype(np.float32)
        return np.clip(np.rint(x / step) * step, -448, 448)
    return x


def attend(q, k, v, rows, causal, dtype=None):
    """Attention of some rows of one head: q (len(rows), headdim), with all keys in k and v. With `causal`, row i sees
    the keys up to rows[i]. dtype=None computes in float64; "tf32" rounds the operands of products."""
    working = np.float32 if dtype else np.float64
    q, k, v = (x.astype(working) for x in (q, k, v))
    if dtype == "tf32":
        q, k, v = (round_to(x, dtype) for x in (q, k, v))
    s = (q @ k.T) * working(q.shape[1] ** -0.5)
    if causal:
        s[np.arange(len(k)) > rows[:, None]] = -np.inf
    p = np.exp(s - s.max(axis=1, keepdims=True))
    total = p.sum(axis=1, keepdims=True)
    if dtype == "float8_e4m3fn":  # its range is too small for P / total; the output has 16 bits
        return round_to(round_to(p, dtype) @ v / total, "bfloat16")
    p /= total
    return round_to(round_to(p, dtype) @ v, "float32" if dtype == "tf32" else dtype) if dtype else p @ v


def gradients(machine, q, k, v, dout, causal, dtype=None):
    """dq, dk, dv of one key head, computed on the machine. q and dout are lists over the query heads of the key head;
    arrays are (seqlen, headdim). With `causal` the last query sees the last key. dtype=None computes in float64."""
    xp, working = machine.xp, "float32" if dtype else "float64"

    def rounded(x):
        return machine.cast(machine.cast(x, dtype), working) if dtype else x

    k, v = machine.cast(k, working), machine.cast(v, working)
    scale = k.shape[1] ** -0.5
    dq, dk, dv = [], xp.zeros_like(k), xp.zeros_like(v)
    for qh, douth in zip(q, dout, strict=True):
        blocks = []
        for start in range(0, len(qh), BLOCK):
            rows = slice(start, start + BLOCK)
            qb, doutb = machine.cast(qh[rows], working), machine.cast(douth[rows], working)
            s = qb @ k.T * scale
            p = xp.exp(s - xp.amax(s, 1)[:, None])
            if causal:
                p = xp.tril(p, start + len(k) - len(qh))
            p = p / p.sum(1)[:, None]
            delta = (doutb * rounded(rounded(p) @ v)).sum(1)[:, None]
            ds = rounded(p * (doutb @ v.T - delta))
            blocks.append(rounded(ds @ k * scale))
            dk += ds.T @ qb * scale
            dv += rounded(p).T @ doutb
        dq.append(np.concatenate([machine.host(block) if dtype else _host64(block) for block in blocks]))
    return dq, *((machine.host(rounded(x)) if dtype else _host64(x)) for x in (dk, dv))


def _host64(array) -> np.ndarray:
    return np.asarray(array.get() if hasattr(array, "get") else array.cpu() if hasattr(array, "cpu") else array)


class Exact:
    """The float64 answer on a sample, computed once for all systems that get the same inputs."""

    def __init__(self, machine, shape, q, k, v, dout=None, seed=0, kept=None):
        """q, k, v as in shape: (batch, seqlen, heads, headdim), or (total, heads, headdim) for a varlen shape. Without
        dout the answer is the output. With dout, of the output's shape, it is (dq, dk, dv); each head is then judged at
        the first and last EARLY rows and `kept` others (None: at all rows)."""
        self.machine, self.kept = machine, kept
        self.samples = []  # (which array of the answer, where in it, rows there, exact, {precision: plain}, floors)
        sample = self._output if dout is None else self._gradients
        sample(shape, q, k, v, *([] if dout is None else [dout]), np.random.default_rng(seed))

    def _output(self, shape, q, k, v, draw):
        group = shape.nheads // shape.nheads_k
        floor = FLOOR[shape.dtype]
        for b, h in _heads(shape.batch, shape.nheads, HEADS, draw):
            in_q, in_k = shape.where(b, h), shape.where(b, h // group)
            kh, vh = (self.machine.host(x[in_k]) for x in (k, v))
            qh = self.machine.host(q[in_q])
            n = len(qh)
            rows = np.unique(
                np.concatenate(
                    [[0, n // 2, n - 1], draw.integers(n, size=ROWS), draw.integers(min(n, EARLY), size=ROWS // 4)]
                )
            )
            qh, ends = qh[rows], rows + len(kh) - n
            exact = attend(qh, kh, vh, ends, shape.causal)
            plain = {p: attend(qh, kh, vh, ends, shape.causal, p) for p in shape.precisions}
            if shape.dtype == "float8_e4m3fn" and n > 1:  # in the plain steps the largest P is 1, which is exact
                floor = max(floor, FLOOR[shape.dtype] + 2**-5 * float(np.abs(vh).max()))
            self.samples.append((0, in_q, rows, exact, plain, (floor, 0.0)))

    def _gradients(self, shape, q, k, v, dout, draw):
        group = shape.nheads // shape.nheads_k
        for b, h in _heads(shape.batch, shape.nheads_k, GRADIENT_HEADS, draw):
            in_q, in_k = [shape.where(b, h * group + g) for g in range(group)], shape.where(b, h)
            given = [q[at] for at in in_q], k[in_k], v[in_k], [dout[at] for at in in_q]
            exact = gradients(self.machine, *given, shape.causal)
            plain = gradients(self.machine, *given, shape.causal, shape.dtype)
            places = [*((0, at) for at in in_q), (1, in_k), (2, in_k)]
            pairs = zip([*exact[0], *exact[1:]], [*plain[0], *plain[1:]], strict=True)
            for (array, where), (e, p) in zip(places, pairs, strict=True):
                floors = 0.1 * FLOOR[shape.dtype], GRADIENT_FLOOR[shape.dtype]
                rows = np.arange(len(e))
                if self.kept and self.kept < len(e):
                    few = draw.integers(len(e), size=self.kept)
                    rows = np.unique(np.concatenate([rows[:EARLY], rows[-EARLY:], few]))
                self.samples.append((array, where, rows, e[rows], {shape.dtype: p[rows]}, floors))

    def judge(self, answer, precision: str) -> tuple[float, float]:
        """(max_err, err_budget) of the group of rows whose error is the largest share of its budget. A NaN or Inf
        anywhere in an array counts as an error of inf."""
        arrays = answer if isinstance(answer, tuple) else (answer,)
        if not all(self.machine.finite(x) for x in arrays):
            return float("inf"), self.samples[0][-1][0]
        verdicts: dict[tuple[int, bool], tuple[float, float, float]] = {}  # error, plain's error, floor
        for array, where, rows, exact, plain, (absolute, relative) in self.samples:
            got = self.machine.host(arrays[array][where][rows])
            for early in (True, False):  # early rows, then the other rows
                part = (rows < EARLY) == early
                if part.any():
                    error, same = (float(np.abs(x[part] - exact[part]).max()) for x in (got, plain[precision]))
                    floor = absolute + relative * float(np.abs(exact[part]).max())
                    found, before = (error, same, floor), verdicts.get((array, early), (0.0, 0.0, 0.0))
                    verdicts[array, early] = tuple(map(largest, zip(found, before, strict=True)))
        return worst((error, FACTOR * plain + floor) for error, plain, floor in verdicts.values())


def largest(values: Iterable[float]) -> float:
    """The largest value, or NaN if one of them is NaN. max() loses a NaN that is not the first value."""
    return float(np.max(list(values)))


def worst(verdicts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The (max_err, err_budget) whose error is the largest share of its budget. If a number is inf or NaN, the error is
    inf."""
    verdicts = list(verdicts)
    if not np.isfinite(verdicts).all():
        return math.inf, min((budget for _, budget in verdicts if math.isfinite(budget)), default=0.0)
    return max(verdicts, key=lambda verdict: verdict[0] / verdict[1])


def _heads(batch: int, nheads: int, count: int, draw) -> list[tuple[int, int]]:
    """(b, h) of the first head, the last head, and some heads between."""
    corners = {(0, 0), (batch - 1, nheads - 1)}
    drawn = {(int(draw.integers(batch)), int(draw.integers(nheads))) for _ in range(count - len(corners))}
    return sorted(corners | drawn)
