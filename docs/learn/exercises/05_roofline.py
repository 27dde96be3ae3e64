"""Exercise 5. How fast attention can be: its work, the bytes that must move, and the larger of the two times.

A multiply-add is two operations. S = Q K^T and O = P V take 2 x rows x columns x headdim each. Under a causal mask (of
equal lengths) count half, as all tables here do. FlashAttention reads q, k and v once and writes out once; leave out
lse.

The judge compares the answers with docs/benchmarks/h200: no measurement may be faster than the bound.

    python docs/learn/exercises/05_roofline.py
"""

import json
from pathlib import Path

from judging import close, main, require

TO_WRITE = ("work", "traffic", "bound")

PEAK = 989e12  # dense bf16 operations a second of an H200, as its data sheet has it
BANDWIDTH = 4.8e12  # bytes a second of its memory


def work(batch, seqlen_q, seqlen_k, nheads, headdim, causal):
    """Floating-point operations of the forward pass."""
    raise NotImplementedError("work(...)")


def traffic(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, element_bytes):
    """Bytes that must be read or written at least once."""
    raise NotImplementedError("traffic(...)")


def bound(operations, bytes_moved, peak=PEAK, bandwidth=BANDWIDTH):
    """The least time in seconds, and "compute" or "memory": what sets it."""
    raise NotImplementedError("bound(operations, bytes_moved) -> seconds, what")


# ---- the judge ----


def judge(work, traffic, bound):
    close("work of 4 x 4096 x 4096, 16 heads of 128", work(4, 4096, 4096, 16, 128, False), 549755813888, 0)
    close("the same, causal", work(4, 4096, 4096, 16, 128, True), 274877906944, 0)
    close("work of one query over 1000 keys", work(1, 1, 1000, 32, 128, False), 16384000, 0)
    close("traffic of 4 x 4096 x 4096, 16 heads of 128, bf16", traffic(4, 4096, 4096, 16, 16, 128, 2), 268435456, 0)
    close("traffic of one query over 1000 keys, 32/8 heads", traffic(1, 1, 1000, 32, 8, 128, 2), 4112384, 0)
    close("traffic of the same in 8 bits", traffic(1, 1, 1000, 32, 8, 128, 1), 2056192, 0)
    for operations, moved, seconds, expected in ((6e12, 2e9, 3.0, "compute"), (2e12, 6e9, 2.0, "memory")):
        got, what = bound(operations, moved, peak=2e12, bandwidth=3e9)
        call = f"bound({operations:g}, {moved:g}, peak=2e12, bandwidth=3e9)"
        close(f"{call}: the time", got, seconds, 1e-9)
        require(what == expected, f"{call}: bound by {what}, expected {expected}")
    root = Path(__file__).resolve().parents[3]
    for file, expected in (("forward.json", "compute"), ("decode.json", "memory")):
        rows = json.loads((root / "docs/benchmarks/h200" / file).read_text())["rows"]
        rows = [row for row in rows if row["system"] in ("ours", "cudnn", "fa2", "fa3")]
        rows = [row for row in rows if row.get("cache_dtype", row["dtype"]) == "bfloat16"]
        rows = [row for row in rows if not row.get("shared")]  # keys of several sequences at once
        require(len(rows) > 40, f"{file} has {len(rows)} rows")
        for row in rows:
            shape = [row[key] for key in ("batch", "seqlen_q", "seqlen_k", "nheads")]
            causal = row.get("causal", False)
            seconds, what = bound(
                work(*shape, row["headdim"], causal), traffic(*shape, row["nheads_k"], row["headdim"], 2)
            )
            call = f"{file}, {row['system']}, batch, seqlen_q, seqlen_k, nheads = {shape}, causal={causal}"
            require(
                seconds * 1e6 < row["us"],
                f"{call}: measured {row['us']:.1f} us, below your bound of {seconds * 1e6:.1f}",
            )
            if row["seqlen_k"] >= 2048:
                require(what == expected, f"{call}: bound by {what}, expected {expected}")


if __name__ == "__main__":
    main(globals())
