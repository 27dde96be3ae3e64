"""torch.nn.functional.scaled_dot_product_attention, served by this library."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._core import checks
from ..errors import BadArgument, Unsupported
from ._inputs import autocast, dense_rows
from ._seeded import attend


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention: its arguments, layout, meaning and gradients.

    Arguments:
        query: (..., heads, seqlen_q, headdim), or (seqlen_q, headdim); float32, float16 or bfloat16, or a dtype that
            autocast converts to one of these. Headdims up to 512. Or jagged, see below.
        key, value: (..., heads_k, seqlen_k, headdim), (..., heads_k, seqlen_k, headdim_v). Axes before seqlen
            broadcast, as in PyTorch.
        attn_mask: bool, True = attend, or float (of query's dtype, or float32), added to the scores; broadcasts to
            (..., heads, seqlen_q, seqlen_k). A float mask that requires a gradient gets one.
        dropout_p: always applied, as in PyTorch. The seed is PyTorch's: torch.manual_seed decides, activation
            checkpointing drops the same probabilities again, and torch.vmap's `randomness` holds. A call with dropout
            cannot be captured in a CUDA graph, whose replays would all drop the same probabilities; torch.compile
            leaves it out of its graphs.
        is_causal: row i sees key j if j <= i: the mask hangs from the top left corner. Not with attn_mask.
        scale: None means headdim ** -0.5.
        enable_gqa: heads may be a multiple of heads_k.

    Jagged tensors, from torch.nested.nested_tensor(..., layout=torch.jagged), are (batch, heads, *, headdim). Then all
    three must be jagged; query and key may have different lengths. As in PyTorch they take no attn_mask, and must have
    no holes.

    Returns (..., heads, seqlen_q, headdim_v), in memory (..., seqlen_q, heads, headdim_v). A row that sees no key is 0.

    Raises: BadArgument (a ValueError), Unsupported (a NotImplementedError), as flash_attn_func.
    """
    given = {"query": query, "key": key, "value": value}
    for name, x in (given | {"attn_mask": attn_mask}).items():
        if not isinstance(x, torch.Tensor) and (x is not None or name in given):
            raise BadArgument(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    if attn_mask is not None and is_causal:
        raise BadArgument("is_causal=True with attn_mask: scaled_dot_product_attention takes one of them")
    if any(x.is_nested for x in given.values()):
        return _jagged(given, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    given = {"query": query, "key": key, "value": value}
    _check(given)
    rank = max(x.dim() for x in given.values())
    arrays = [x if x.dim() > 2 else x.unsqueeze(0) for x in given.values()]
    leading = torch.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    batch = math.prod(leading)
    if len(leading) == 1:
        arrays = [x.expand(batch, *x.shape[-3:]) for x in arrays]
    else:
        arrays = [x.expand(*leading, *x.shape[-3:]).reshape(batch, *x.shape[-3:]) for x in arrays]
    q, k, v = _heads(*arrays, enable_gqa)
    rows, keys = q.shape[2], k.shape[2]
    options = _mask(attn_mask, q.dtype, (*leading, q.shape[1], rows, keys), batch)
    q, k, v = dense_rows(*(x.transpose(1, 2) for x in (q, k, v)))
    out = attend(
        q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=bool(is_causal),
        top_left=bool(is_causal) and bool(rows != keys), **options,
    ).transpose(1, 2)  # fmt: skip
    if rank == 2:
        return out[0, 0]
    return out if len(leading) == 1 else out.reshape(*leading, *out.shape[1:])


def _check(given: dict[str, torch.Tensor]) -> None:
    query, key, value = given.values()
    for name, x in given.items():
        checks.shape(name, x, x.dim() >= 2, "(..., seqlen, headdim)")
    _check_alike(given)
    if key.shape[-1] != query.shape[-1]:
        raise BadArgument(f"key has shape {tuple(key.shape)}, but query {tuple(query.shape)}: headdim must agree")
    if value.shape[-2] != key.shape[-2]:
        raise BadArgument(f"value has shape {tuple(value.shape)}, but key {tuple(key.shape)}: seqlen must agree")


def _check_alike(given: dict[str, torch.Tensor]) -> None:
    query = given["query"]
    for name, x in given.items():
        if x.dtype != query.dtype or x.device != query.device:
            here, there = (f"{y.dtype} on {y.device}" for y in (x, query))
            raise BadArgument(f"{name} is {here}, but query is {there}: they must be the same")
    if query.dtype == torch.float64:
        raise Unsupported("query is torch.float64: expected float32, float16 or bfloat16; query.float() is one")


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> tuple[torch.Tensor, ...]:
    """The arrays with heads that fit: k and v have the same number, and q a multiple of it."""
    heads = q.shape[1], k.shape[1], v.shape[1]
    if enable_gqa:
        if heads[1] == 0 or heads[2] == 0 or heads[0] % heads[1] or heads[0] % heads[2]:
            raise BadArgument(f"query has {heads[0]} heads, no multiple of key's {heads[1]} and value's {heads[2]}")
        if heads[1] != heads[2]:
            k, v = (x.repeat_interleave(heads[0] // x.shape[1], 1) for x in (k, v))
        return q, k, v
    if any(n not in (1, max(heads)) for n in heads):
        raise BadArgument(
            f"query has {heads[0]} heads, key {heads[1]}, value {heads[2]}: that needs enable_gqa=True"
        )  # fmt: skip
    q = q.expand(-1, max(heads), -1, -1)
    if heads[1] != heads[2]:
        k, v = (x.expand(-1, max(heads), -1, -1) for x in (k, v))
    return q, k, v


def _mask(attn_mask: torch.Tensor | None, dtype: torch.dtype, full: tuple[int, ...], batch: int) -> dict[str, Any]:
    """attn_mask as an option of the core. full: (..., heads, seqlen_q, seqlen_k)."""
    if attn_mask is None:
        return {}
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise BadArgument(f"attn_mask is {attn_mask.dtype}: expected bool, float32 or query's {dtype}")
    shape = tuple(attn_mask.shape)
    if len(shape) > len(full) or any(n not in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)):
        raise BadArgument(f"attn_mask has shape {shape}, which does not broadcast to {full}")
    mask = attn_mask if attn_mask.dim() else attn_mask.view(1)
    if mask.shape[-1] != full[-1]:
        mask = mask.expand(*mask.shape[:-1], full[-1])
    (mask,) = dense_rows(mask)
    if mask.dim() > 4 or (mask.dim() == 4 and len(full) > 4):
        mask = mask.expand(*full[:-3], *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])
    return {"mask" if mask.dtype == torch.bool else "bias": mask}


# ---- jagged tensors ----


def _jagged(
    given: dict[str, torch.Tensor], attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Attention of nested tensors (batch, heads, *, headdim), as packed sequences."""
    if attn_mask is not None:
        raise Unsupported("attn_mask is given, which attention of nested tensors does not take")
    for name, x in given.items():
        if not x.is_nested:
            raise BadArgument(f"{name} is a dense tensor beside nested ones: all three must be nested")
        if x.layout != torch.jagged:
            raise Unsupported(f"{name} is a nested tensor of layout {x.layout}: make it with layout=torch.jagged")
        if x.dim() != 4 or x._ragged_idx != 2:
            raise BadArgument(
                f"{name} has {x.dim()} axes, number {x._ragged_idx} of them ragged: expected "
                "(batch, heads, *, headdim), which x.unflatten(-1, (heads, headdim)).transpose(1, 2) is"
            )
        if x.lengths() is not None:
            raise Unsupported(f"{name} has holes between its sequences: {name}.contiguous() has none")
    query, key, value = given.values()
    offsets = query.offsets(), key.offsets()
    if value.offsets() is not key.offsets():
        raise BadArgument(
            "value's offsets are not those of key: make both of one tensor, or with offsets=key.offsets()"
        )
    longest = tuple(x._get_max_seqlen() for x in (query, key))
    arrays = autocast(*(x.transpose(1, 2).values() for x in given.values()))
    _check_alike(dict(zip(given, arrays, strict=True)))
    heads = [x.shape[1] for x in arrays]
    if heads[1] != heads[2] or (heads[0] != heads[1] and not enable_gqa):
        need = ": that needs enable_gqa=True" if heads[1] == heads[2] else ": key and value must agree"
        raise BadArgument(f"query has {heads[0]} heads, key {heads[1]}, value {heads[2]}{need}")
    cu_seqlens = [x.int() for x in offsets]
    out = attend(
        *dense_rows(*arrays), (*cu_seqlens, *longest), dropout_p=dropout_p, softmax_scale=scale,
        causal=bool(is_causal), top_left=bool(is_causal) and offsets[0] is not offsets[1],
    )  # fmt: skip
    packed = torch.nested.nested_tensor_from_jagged(out, offsets[0], max_seqlen=longest[0])
    return packed.transpose(1, 2)
