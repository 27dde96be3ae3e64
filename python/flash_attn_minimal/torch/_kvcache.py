"""flash_attn_with_kvcache as operators of PyTorch, which graphs can hold: one that reads the cache, one that also
writes keys and values, and one that also writes the factors of an 8-bit cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import kvcache
from .._arrays import torch_modes
from .._core import checks
from ..errors import BadArgument, Unsupported
from ._operators import numbers_of, pack

_ARRAYS = kvcache._Step._fields[: kvcache._LENGTHS + 1]
_NUMBERS = numbers_of(kvcache.NUMBERS)
# `length` is one length for all sequences.
_MORE = {"length": "SymInt?", **_NUMBERS, "return_lse": "bool"}
ARGUMENTS = (*_ARRAYS, *_MORE)


@functools.wraps(kvcache.flash_attn_with_kvcache)
def flash_attn_with_kvcache(*arguments, **named):
    arrays = [x for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor)]
    if not (torch_modes.active() or not all(map(torch_modes.is_plain, arrays))):
        return kvcache.flash_attn_with_kvcache(*arguments, **named)
    given, out, return_lse = kvcache.arguments_of("flash_attn_with_kvcache", arguments, named)
    if torch_modes.records():
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise Unsupported(f"{name} requires a gradient, which a cache has not: call it under torch.no_grad()")
    if out is not None:
        raise Unsupported("out is given, which flash_attn_with_kvcache does not take where PyTorch traces it")
    if torch_modes.transforms():
        raise Unsupported("flash_attn_with_kvcache is not served under a transform of torch.func")
    step = kvcache.step_of("flash_attn_with_kvcache", given)
    packed = _packed(step, bool(return_lse))  # first: it checks what _operator reads
    found, lse = _operator(step)(*packed)
    return (found, lse) if return_lse else found


def _operator(step: kvcache._Step) -> Any:
    if step.k is None:
        return torch.ops.flash_attn_minimal.kvcache_attention
    rows = step.k_cache.shape[1]
    for scale in (step.k_scale, step.v_scale):
        if scale is not None and scale.dim() == 3 and scale.shape[1] == rows:  # factors of tokens, not of heads
            return torch.ops.flash_attn_minimal.kvcache_append_scaled
    return torch.ops.flash_attn_minimal.kvcache_append


def _packed(step: kvcache._Step, return_lse: bool) -> list:
    """The arguments of the operators."""
    lengths = step.cache_seqlens
    by_array = isinstance(lengths, torch.Tensor)
    arrays = [*step[: kvcache._LENGTHS], lengths if by_array else None]
    for name, array in zip(_ARRAYS, arrays, strict=True):
        if array is not None and not isinstance(array, torch.Tensor):
            raise BadArgument(f"{name} is a {type(array).__name__}: where q is a tensor, it must be one too")
    _check_axes(step.q, step.k_cache, step.v_cache)
    if not by_array and lengths is not None and not isinstance(lengths, (int, torch.SymInt)):
        raise BadArgument(f"cache_seqlens is a {type(lengths).__name__}: expected a tensor or an integer")
    length = None if by_array else lengths
    return [*arrays, length, *pack(step._asdict(), _NUMBERS), return_lse]


def _run(*arguments):
    given = dict(zip(ARGUMENTS, arguments, strict=True))
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    length, return_lse = given.pop("length"), given.pop("return_lse")
    if length is not None:
        given["cache_seqlens"] = length
    with torch.no_grad(), torch_modes.unwatched():
        results = kvcache.flash_attn_with_kvcache(**given, return_lse=return_lse)
    return results if return_lse else (results, results.new_empty(0, dtype=torch.float32))


def _check_axes(q, k_cache, v_cache) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.shape(name, x, x.dim() == 4, "4 axes")


def _fake(q, k_cache, v_cache, *rest):
    _check_axes(q, k_cache, v_cache)
    batch, seqlen_q, nheads, _ = q.shape
    lse = q.new_empty((batch, nheads, seqlen_q) if rest[-1] else 0, dtype=torch.float32)
    return q.new_empty((batch, seqlen_q, nheads, v_cache.shape[-1])), lse


def _define(name: str, written: tuple[str, ...]) -> None:
    """Defines an operator that writes to the arrays `written`."""
    kinds = []
    for array in _ARRAYS:
        alias = f"({chr(ord('a') + written.index(array))}!)" if array in written else ""
        kinds.append(f"Tensor{alias}{'' if array in _ARRAYS[:3] else '?'} {array}")
    kinds += [f"{kind} {number}" for number, kind in _MORE.items()]
    name = f"flash_attn_minimal::{name}"
    torch.library.define(name, f"({', '.join(kinds)}) -> (Tensor, Tensor)")
    torch.library.impl(name, ("cpu", "cuda"), _run)
    torch.library.register_fake(name, _fake)


_define("kvcache_attention", ())
_define("kvcache_append", ("k_cache", "v_cache"))
_define("kvcache_append_scaled", ("k_cache", "v_cache", "k_scale", "v_scale"))
