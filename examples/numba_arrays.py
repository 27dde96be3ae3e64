"""Attention between your own functions, compiled by Numba.

    python examples/numba_arrays.py                 on a GPU if there is one: device arrays, kernels of cuda.jit
    python examples/numba_arrays.py --device cpu    NumPy arrays, functions of @njit

A rotary embedding turns q and k in place, attention reads them, and a last function takes the mean over the heads. The
result is compared with NumPy in float64. Needs numba, on a GPU numba-cuda too.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np

from flash_attn_minimal import flash_attn_func

try:
    import numba
    from numba import cuda
except ImportError as error:
    raise SystemExit(f"{error} (pip install numba)") from None

BASE = 10000.0  # base of the rotary embedding's frequencies


def angle(row, pair, pairs):
    return row * BASE ** (-pair / pairs)


# ---- NumPy arrays ----

angle_of = numba.njit(angle)


@numba.njit
def rotate(x):
    """Turns x (batch, rows, heads, dim) in place, neighbouring pairs of columns by the angle of their row."""
    batch, rows, heads, dim = x.shape
    for b in range(batch):
        for row in range(rows):
            for pair in range(dim // 2):
                turn = angle_of(row, pair, dim // 2)
                c, s = math.cos(turn), math.sin(turn)
                for head in range(heads):
                    even, odd = x[b, row, head, 2 * pair], x[b, row, head, 2 * pair + 1]
                    x[b, row, head, 2 * pair] = even * c - odd * s
                    x[b, row, head, 2 * pair + 1] = even * s + odd * c


@numba.njit
def mean_of_heads(x, mean):
    """mean (batch, rows, dim) of x (batch, rows, heads, dim)."""
    batch, rows, heads, dim = x.shape
    for b in range(batch):
        for row in range(rows):
            for d in range(dim):
                total = 0.0
                for head in range(heads):
                    total += x[b, row, head, d]
                mean[b, row, d] = total / heads


def on_cpu(q, k, v):
    rotate(q)
    rotate(k)
    out = flash_attn_func(q, k, v, causal=True)
    mean = np.empty((*out.shape[:2], out.shape[3]), np.float32)
    mean_of_heads(out, mean)
    return mean


# ---- device arrays: the same functions, one thread for each innermost step ----


def on_gpu(q, k, v):
    angle_of = cuda.jit(device=True)(angle)

    def turn_pair(x):
        row, pair, b = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockIdx.y
        turn = angle_of(row, pair, x.shape[3] // 2)
        c, s = math.cos(turn), math.sin(turn)
        for head in range(x.shape[2]):
            even, odd = x[b, row, head, 2 * pair], x[b, row, head, 2 * pair + 1]
            x[b, row, head, 2 * pair] = even * c - odd * s
            x[b, row, head, 2 * pair + 1] = even * s + odd * c

    def mean_of_column(x, mean):
        row, d, b = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockIdx.y
        total = 0.0
        for head in range(x.shape[2]):
            total += x[b, row, head, d]
        mean[b, row, d] = total / x.shape[2]

    rotate, mean_of_heads = cuda.jit(turn_pair), cuda.jit(mean_of_column)
    q, k, v = (cuda.to_device(x) for x in (q, k, v))
    batch, rows, _, dim = q.shape
    rotate[(rows, batch), dim // 2](q)
    rotate[(rows, batch), dim // 2](k)
    out = flash_attn_func(q, k, v, causal=True)  # a device array of Numba's; runs after the kernels above
    mean = cuda.device_array((batch, rows, dim), np.float32)
    mean_of_heads[(rows, batch), dim](out, mean)
    return mean.copy_to_host()


# ---- the same in NumPy ----


def exact(q, k, v):
    batch, rows, heads, dim = q.shape
    turn = np.exp(1j * angle(np.arange(rows)[:, None, None], np.arange(dim // 2), dim // 2))
    q, k = ((x.astype(np.float64).view(np.complex128) * turn).view(np.float64) for x in (q, k))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(dim)
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bid", p / p.sum(-1, keepdims=True), v) / heads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    for name, value in (("batch", 2), ("rows", 300), ("heads", 4), ("dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.device == "cuda" and not cuda.is_available():
        parser.error("--device cuda: Numba finds no GPU")
    on_a_gpu = args.device == "cuda" or args.device == "auto" and cuda.is_available()

    shape = (3, args.batch, args.rows, args.heads, args.dim)
    q, k, v = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    right = exact(q, k, v)
    error = np.abs((on_gpu if on_a_gpu else on_cpu)(q, k, v) - right).max()
    print(f"{'Numba device arrays' if on_a_gpu else 'NumPy arrays between jitted functions'}: error {error:.1e}")
    if not error < 1e-4:
        sys.exit("that is wrong")


if __name__ == "__main__":
    main()
