"""Attention on a GPU with CuPy alone: arrays and a stream, no framework.

    python examples/cupy_alone.py
    python examples/cupy_alone.py --length 4000 --heads 32 --dtype float16

Causal attention over a text, its gradients, and the last tokens again over a paged cache, all on one stream. The
results are compared with standard attention in float64. Needs CuPy (`pip install cupy-cuda13x`).
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from flash_attn_minimal import backward, flash_attn_func, flash_attn_with_kvcache

PAGE = 16  # keys in a page


def exact_attention(cp, q, k, v, dout):
    """(out, dq, dk, dv) of one causal sequence by the definition, float64; arrays (1, length, heads, dim)."""
    q, k, v, dout = (x[0].astype(np.float64).swapaxes(0, 1) for x in (q, k, v, dout))  # (heads, length, dim)
    length, scale = q.shape[1], q.shape[2] ** -0.5
    scores = cp.where(cp.tri(length, dtype=bool), q @ k.swapaxes(1, 2) * scale, -np.inf)
    p = cp.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    ds = p * (dout @ v.swapaxes(1, 2) - (dout * out).sum(-1, keepdims=True)) * scale
    results = out, ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout
    return [x.swapaxes(0, 1)[None] for x in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, value in (("length", 1000), ("heads", 8), ("dim", 64), ("steps", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    args = parser.parse_args()
    try:
        import cupy as cp
    except ImportError as error:
        parser.error(f"CuPy is missing (pip install cupy-cuda13x): {error}")
    try:
        cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        parser.error(f"CuPy finds no GPU: {error}")
    if not 0 < args.steps < args.length:
        parser.error(f"--steps {args.steps} is outside 1 .. {args.length - 1}, the length less one")

    with cp.cuda.Stream(non_blocking=True) as stream:  # calls run on the current stream, and the host does not wait
        shape = (1, args.length, args.heads, args.dim)
        rng = cp.random.default_rng(0)
        q, k, v, dout = (rng.standard_normal(shape, np.float32).astype(args.dtype) for _ in range(4))

        # The whole text at once, and its gradients.
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True)

        # The last tokens again, one after another. Each call also appends the token's key and value to the cache.
        pages = -(-args.length // PAGE)
        k_cache, v_cache = (cp.zeros((pages, PAGE, args.heads, args.dim), args.dtype) for _ in range(2))
        table = cp.arange(pages, dtype=np.int32)[None, ::-1].copy()  # the sequence's pages, in any order
        known, lengths = args.length - args.steps, cp.zeros(1, np.int32)
        before = {"k": k[:, :known], "v": v[:, :known], "cache_seqlens": lengths, "block_table": table, "causal": True}
        flash_attn_with_kvcache(q[:, :known], k_cache, v_cache, **before)
        lengths += known
        texts = []
        for i in range(known, args.length):
            now = slice(i, i + 1)
            new = {"k": k[:, now], "v": v[:, now], "cache_seqlens": lengths, "block_table": table, "causal": True}
            texts.append(flash_attn_with_kvcache(q[:, now], k_cache, v_cache, **new))
            lengths += 1  # only kernels read it, never the host
        continued = cp.concatenate(texts, 1)

        exact = exact_attention(cp, q, k, v, dout)
        exact.append(exact[0][:, known:])
        results = dict(zip(("out", "dq", "dk", "dv", "over a cache"), (out, dq, dk, dv, continued), strict=True))
        wrong = [name for (name, x), right in zip(results.items(), exact, strict=True) if not near(cp, name, x, right)]
        stream.synchronize()
    if wrong:
        sys.exit(f"that is wrong: {', '.join(wrong)}")


def near(cp, name: str, x, right) -> bool:
    """Whether the largest error is a few roundings of the largest element."""
    bound = {"float32": 1e-5, "float16": 4e-3}[x.dtype.name]
    error = float(cp.abs(x.astype(np.float64) - right).max() / cp.abs(right).max())
    print(f"{name:12} {type(x).__module__.split('.')[0]} {x.dtype.name} {x.shape}, error {error:.1e}")
    return error < bound


if __name__ == "__main__":
    main()
