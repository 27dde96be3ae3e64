"""The library's error texts in the words of a Python caller.

The C ABI names the fields of its structs: window_left, seqlen_q, k_new. The Python functions have other names for some
of them, and arrays instead of sizes. `explained` translates a text after the call has failed; a call that succeeds does
not come here. This module knows the structs of structs.py by their names alone.
"""

from __future__ import annotations

import re
from typing import Any

_FLAGS = "|".join(
    ("causal", "top_left", "deterministic", "allow_tf32", "fast_accum", "hadamard", "programmatic", "batch_invariant")
    + ("rotary_interleaved", "pair", "shared_prefix")
)

# In this order. Names that stand for something else in C and in Python are translated by struct: see _RENAMED.
_RULES: list[tuple[str, Any]] = [
    (r"\bwindow_left=(-?\d+), window_right=(-?\d+)(?= )", r"window_size=(\1, \2)"),
    (r"\bwindow_left\b", "window_size[0]"),
    (r"\bwindow_right\b", "window_size[1]"),
    (rf"\b({_FLAGS})=([01])\b(?! on rank)", lambda m: f"{m[1]}={m[2] == '1'}"),
    (r"\b(device is|call on) FA_CPU\b", r"\1 the CPU"),
    (r"\b(device is|call on) FA_CUDA\b", r"\1 a GPU"),
    (r"\bkind(=| is not )FA_GROUP_(\w+)", lambda m: f"kind{m[1]}{m[2].lower()!r}"),
    (r"\bwith device=FA_CPU\b", "with device='cpu'"),
    (r"\bfloat8_e4m3\b", "float8_e4m3fn"),
    (
        r"^([qkv]_descale)\.data is NULL.*",
        r"\1 is None: q, k and v of float8_e4m3fn need q_descale, k_descale and v_descale; "
        r"x8, x_descale = quantize_fp8(x) makes both",
    ),
    (
        r"^([kv]_scale)\.data is NULL.*",
        r"\1 is None: an 8-bit cache needs k_scale and v_scale; quantize_kvcache makes the cache and both",
    ),
    (r"\bdtype=float8_e4m3fn has (factors|sums of 8-bit products)", r"q, k and v of float8_e4m3fn have \1"),
    (r"\b(\w+)\.data is set\b", r"\1 is given"),
    (
        r"\bout_dtype=(\w+) with dtype=float8_e4m3fn: not served.*",
        r"out_dtype=\1: the result of q, k and v of float8_e4m3fn is bfloat16 or float16",
    ),
    (
        r"\bout_dtype=(\w+) with dtype=(\w+): not served.*",
        r"out_dtype=\1, but q, k and v are \2: only those of float8_e4m3fn have a result of another dtype",
    ),
    (
        r"(^cu_seqlens(?:_[qk])?\[0\]=-?\d+ is not 0)$",
        r"\1: expected cumulative lengths from 0 on, such as [0, 3, 8] for sequences of 3 and 5 rows",
    ),
    (r"(^cu_seqlens_([qk]): .*more than )seqlen_[qk]=", r"\1max_seqlen_\2="),
    (
        r"\brotary_rows=(\d+): sequence (\d+) turns by the positions (.*), which rotary_cos.*",
        r"rotary_cos has \1 rows, but sequence \2 needs rows \3: the tables have a row for each position",
    ),
    (r"\brotary_rows=0 is below 1", "rotary_cos has no rows: the tables have a row for each position"),
    (
        r"\brotary_dim=(\d+) is not an even number in 2 \.\. headdim=(\d+)",
        lambda m: _rotary_width(int(m[1]), int(m[2])),
    ),
    (r"^(rotary_dim=\d+) is outside 0 \.\. (\d+)$", r"\1, twice the columns of cos if not given, is above headdim=\2"),
    (r"\bgoes beyond table_rows=(\d+)", r"goes beyond the \1 rows of cos and sin"),
    (r"\btable_rows=(\d+)", r"\1 rows"),
    (r"\bcache_batch=(\d+) is below batch=(\d+)", r"k_cache has \1 entries, fewer than batch=\2,"),
    (
        r"^(seqlen_new=\d+ is above )seqlen_k=(\d+).*",
        r"\1the \2 keys of a cache entry: the order of arguments is q, k_cache, v_cache, k, v",
    ),
]
_COMPILED = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]

# Texts that quote what a caller has written. They name nothing that has another name in Python.
_QUOTING = re.compile(r"(kernel|FLASH_ATTN_\w+)=.* is not a (kernel of this build|number of threads)", re.DOTALL)

# Of a struct's type: its arrays whose names differ.
_CACHED = {"k_new": "k", "v_new": "v", "k": "k_cache", "v": "v_cache"}
_RENAMED = {"fa_kvcache_args": _CACHED, "fa_distributed_decode_args": _CACHED}
_ARRAY = re.compile(r"\b([kv](?:_new)?)(?=\.(?:data|batch_stride|row_stride|head_stride)\b)")


def explained(text: str, struct: Any = None) -> str:
    """The text of a failed call. struct: what the call was given, or None where that is not known."""
    if _QUOTING.match(text):
        return text
    renamed = _RENAMED.get(type(struct).__name__)
    if renamed:
        text = _ARRAY.sub(lambda m: renamed[m[1]], text)
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    args = _attention(struct)
    if args is None:
        return text
    if args.cu_seqlens_q:
        text = re.sub(r"(?<![.\w])seqlen_([qk])=", r"max_seqlen_\1=", text)
    elif text.startswith("nheads=") and "multiple of nheads_k" in text:
        text += _heads_first(args.seqlen_q, args.seqlen_k, args.nheads_k)
    return text


def _attention(struct: Any) -> Any:
    """The fa_attention_args of a call of attention, or None."""
    kind = type(struct).__name__
    if kind == "fa_distributed_backward_args":
        struct, kind = struct.forward.contents, "fa_distributed_args"
    inner = {"fa_attention_backward_args": "forward", "fa_distributed_args": "attention"}.get(kind)
    if inner:
        return getattr(struct, inner).contents if getattr(struct, inner) else None
    return struct if kind == "fa_attention_args" else None


def _heads_first(seqlen_q: int, seqlen_k: int, nheads_k: int) -> str:
    """Advice for arrays whose axes of heads and rows seem to be exchanged."""
    if not 0 < seqlen_k < nheads_k or seqlen_q % seqlen_k:
        return ""
    return (
        "; the layout is (batch, seqlen, nheads, headdim): of arrays (batch, nheads, seqlen, headdim) pass "
        "q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)"
    )


def _rotary_width(dim: int, headdim: int) -> str:
    most = headdim // 2
    halves = f"; of tables that have every angle twice pass rotary_cos[:, :{most}]" if dim == 2 * headdim else ""
    return (
        f"rotary_cos has {dim // 2} columns: expected 1 .. {most}, one for each pair of dims{halves}; headdim={headdim}"
    )
