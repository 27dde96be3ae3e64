"""The rows of the ledger: calls that stand for all suites. A row is what ledger/worker.py takes; its name and its
family, which the picture draws as one line, are never reused for another call, so that results of years compare."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def _attention(family: str, batch: int, seqlens, heads, dims, dtype: str, backward: bool, options=None, **more) -> Row:
    n_q, n_k = seqlens if isinstance(seqlens, tuple) else (seqlens, seqlens)
    h, h_k = heads if isinstance(heads, tuple) else (heads, heads)
    d, d_v = dims if isinstance(dims, tuple) else (dims, dims)
    length = f"{n_q}" if n_q == n_k else f"{n_q} x {n_k}"
    words = [
        f"{batch} x {length}, heads {h}" + (f"/{h_k}" if h_k != h else ""),
        f"D{d}" + (f"/{d_v}" if d_v != d else ""),
    ]
    words += [f"{key}={value}" if value is not True else key for key, value in (options or {}).items()]
    words += [word for word, key in (("fp8", "fp8"), ("packed", "lengths")) if more.get(key)]
    if family == "host":
        words.append("a cache" if more.get("kind") == "cache" else "backward" if backward else "forward")
    words += [f"pages of {more['page']}"] if more.get("page") else []
    return {
        "name": f"{family}: {dtype} {', '.join(words)}", "family": family, "kind": more.pop("kind", "attention"),
        "batch": batch, "seqlens": (n_q, n_k), "heads": (h, h_k), "dims": (d, d_v), "dtype": dtype,
        "backward": backward, "options": options or {}, **more,
    }  # fmt: skip


CAUSAL: Row = {"causal": True}
LENGTHS = [2048, 731, 1024, 96, 1530, 512, 1999, 252]  # 8192 tokens
OPTIONS = (
    {"window_size": (256, 0), "causal": True}, {"softcap": 30.0}, {"alibi": True, "causal": True}, {"dropout_p": 0.1},
    {"mask": "keys"}, {"mask": "pairs"}, {"bias": True},
)  # fmt: skip


def cuda_rows() -> list[Row]:
    half = "bfloat16"
    rows = []
    for backward, family in ((False, "forward"), (True, "backward")):
        for d, heads in ((64, 32), (128, 16), (256, 8)):
            for options in ({}, CAUSAL):
                rows.append(_attention(family, 4, 4096, heads, d, half, backward, options))
        rows += [
            _attention(family, 16, 1024, 32, 64, half, backward, CAUSAL),
            _attention(family, 16, 1024, 16, 128, half, backward, CAUSAL),
            _attention(family, 2, 8192, (64, 8), 128, half, backward, CAUSAL),
            _attention(family, 2, 4096, 16, (192, 128), half, backward, CAUSAL),
            _attention(family, 2, 2048, 16, 80, half, backward),
            _attention(family, 1, 2048, 4, 512, half, backward),
        ]
        rows += [
            _attention(f"{family}, short", 8, 128, 32, 64, half, backward),
            _attention(f"{family}, short", 1, 512, 16, 128, half, backward, CAUSAL),
        ]
        rows += [_attention(f"{family}, options", 4, 2048, 16, 128, half, backward, more) for more in OPTIONS]
        rows.append(_attention(f"{family}, options", 4, 2048, 32, 64, half, backward, {"mask": "keys"}))
        rows.append(_attention(f"{family}, packed", 8, 2048, 16, 128, half, backward, CAUSAL, lengths=LENGTHS))
        rows += [_attention(f"{family}, float32", 2, 2048, 16, d, "float32", backward) for d in (64, 128)]
    rows += [
        _attention("backward", 4, 4096, 16, 128, half, True, {"deterministic": True}),
        _attention("forward, fp8", 4, 4096, 16, 128, half, False, fp8=True),
        _attention("forward, float32", 2, 2048, 16, 128, "float32", False, {"allow_tf32": True}),
        _attention("few queries", 1, (512, 65536), (8, 1), 128, half, False, CAUSAL),
        _attention("few queries", 8, (16, 8192), (64, 8), 128, half, False, CAUSAL),
        _attention("few queries", 8, (1, 8192), (64, 8), 128, half, False, {"mask": "keys"}),
    ]
    for batch, keys, heads, page in (
        (1, 1024, (32, 8), 0),
        (8, 8192, (64, 8), 0),
        (8, 8192, (64, 8), 16),
        (64, 4096, (32, 8), 16),
    ):
        rows.append(_attention("decode", batch, (1, keys), heads, 128, half, False, kind="cache", page=page))
    for m in (1, 8, 64, 512):
        name = f"4 bits: nvfp4 {m} x 4096 x 4096"
        rows.append(
            {
                "name": name,
                "family": "4 bits",
                "kind": "linear",
                "mnk": (m, 4096, 4096),
                "dtype": half,
                "format": "nvfp4",
            }
        )
    rows += _operations(half, (16, 4096))
    rows += [
        _attention("host", 1, 1, 1, 64, half, False, host=True),
        _attention("host", 1, 1, 1, 64, half, True, host=True),
        _attention("host", 1, (1, 128), 1, 64, half, False, host=True, kind="cache"),
    ]
    return rows


def cpu_rows() -> list[Row]:
    single = "float32"
    rows = []
    for backward, family in ((False, "forward"), (True, "backward")):
        for d in (64, 128):
            for options in ({}, CAUSAL):
                rows.append(_attention(family, 1, 1024, 4, d, single, backward, options))
        rows += [_attention(f"{family}, options", 1, 512, 4, 64, single, backward, more) for more in OPTIONS]
        rows.append(
            _attention(f"{family}, packed", 8, 512, 4, 64, single, backward, CAUSAL, lengths=[n // 4 for n in LENGTHS])
        )
        rows.append(_attention(f"{family}, 16 bits", 1, 1024, 4, 64, "float16", backward))
    rows += [
        _attention("few queries", 4, (1, 4096), (8, 2), 64, single, False),
        _attention("decode", 4, (1, 1024), (8, 2), 64, single, False, kind="cache"),
        _attention("decode", 4, (1, 1024), (8, 2), 64, single, False, kind="cache", page=16),
        {
            "name": "4 bits: int4 4 x 1024 x 1024",
            "family": "4 bits",
            "kind": "linear",
            "mnk": (4, 1024, 1024),
            "dtype": "float16",
            "format": "int4",
        },
        *_operations(single, (16, 4096)),
        _attention("host", 1, 1, 1, 64, single, False, host=True),
        _attention("host", 1, 1, 1, 64, single, True, host=True),
        _attention("host", 1, (1, 128), 1, 64, single, False, host=True, kind="cache"),
    ]
    return rows


def _operations(dtype: str, shape) -> list[Row]:
    names = ("rms_norm", "swiglu")
    return [
        {
            "name": f"ops: {op} {dtype} {shape[0]} x {shape[1]}",
            "family": "ops",
            "kind": "operation",
            "op": op,
            "shape": shape,
            "dtype": dtype,
        }
        for op in names
    ]


ROWS = {"cuda": cuda_rows, "cpu": cpu_rows}
