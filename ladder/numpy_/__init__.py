"""Attention in NumPy, to show the order of the work: the standard three steps, FlashAttention v1, v2, v3, and 8
bits."""

from __future__ import annotations

import functools

from ..rung import Calls, Rung

REFERENCE = ("python/flash_attn_lab/reference.py",)
SHARED = ("Head", "_or_zero", "_times_values", "_divide", "heads", "_over_heads")
MINE = "ladder/numpy_/"


def _reference(name: str, backward: bool = False) -> Calls:
    """A function of reference.py, which computes in float64."""
    from flash_attn_lab import reference

    attention = getattr(reference, name)

    def forward(q, k, v, causal):
        out, lse = attention(q, k, v, causal=causal)
        return out.astype(q.dtype), lse.astype("float32")

    def gradients(dout, q, k, v, out, lse, causal):  # the reference computes out and lse again
        found = reference.standard_attention_backward(dout, q, k, v, causal=causal)
        return found.dq.astype(q.dtype), found.dk.astype(k.dtype), found.dv.astype(v.dtype)

    return Calls(forward, gradients if backward else None)


def _v3() -> Calls:
    from .flash_attention_v3 import flash_attention_v3

    return Calls(lambda q, k, v, causal: flash_attention_v3(q, k, v, causal=causal))


def _fp8() -> Calls:
    from .flash_attention_fp8 import flash_attention_fp8

    return Calls(lambda q, k, v, causal: flash_attention_fp8(q, k, v, causal=causal))


def _rung(name, about, load, files=REFERENCE, dtypes=("float32",), headdims=(32, 64, 128), parts=()) -> Rung:
    return Rung(
        name=name,
        language="NumPy",
        about=about,
        device="cpu",
        files=files,
        parts=parts,
        load=load,
        dtypes=dtypes,
        headdims=headdims,
    )


RUNGS = (
    _rung("numpy_standard", "the formula: three steps, S in memory",
          functools.partial(_reference, "standard_attention", backward=True),
          parts=(*SHARED, "_standard", "_standard_backward")),
    _rung("numpy_v1", "online softmax, keys outside: S is never whole",
          functools.partial(_reference, "flash_attention_v1"), parts=(*SHARED, "_flash_v1")),
    _rung("numpy_v2", "queries outside: out stays in place and is divided once",
          functools.partial(_reference, "flash_attention_v2"), parts=(*SHARED, "_flash_v2")),
    _rung("numpy_v3", "a producer, and two warpgroups that take turns at the tensor cores", _v3,
          (MINE + "flash_attention_v3.py", MINE + "block.py")),
    _rung("numpy_fp8", "8 bits: scales for blocks, and sums of two levels", _fp8, (MINE + "flash_attention_fp8.py",),
          ("float8_e4m3fn",), (64, 128)),
)  # fmt: skip
