"""The features of flash_attn's calls over caches and pages that flash_attn_minimal.flash_attn_with_kvcache does not
have: packed rows of q, packed new keys, separate positions for the rotary embedding, scores of q and qv, float8 rows of
q. They are prepared here with PyTorch's own operations; the core does the rest. None of them has a gradient."""

from __future__ import annotations

from typing import Any

import torch

from ...kvcache import flash_attn_with_kvcache
from ._calls import without_gradient
from ._packed import Tails, inside, owners
from .layers.rotary import rotate


@without_gradient("attention of packed rows over a cache has no backward pass")
def attend_packed(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int,
    lengths: Any, where: dict[str, Any], options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (total_q, nheads, headdim_v) and lse (nheads, total_q) of packed rows over a cache. lengths: the number of
    keys of each sequence; where: the core's arguments that locate them in the cache."""
    tails = Tails(cu_seqlens_q, max_seqlen_q, q.shape[0])
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.int().contiguous()
    out, lse = flash_attn_with_kvcache(
        tails.pad(q), k_cache, v_cache, cache_seqlens=lengths, return_lse=True, **where, **options
    )
    return tails.pack(out, 0.0), tails.pack(lse.transpose(1, 2), -torch.inf).T.contiguous()


def packed_keys(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Packed keys and values, (total_k, nheads_k, .), as a cache with pages of one row each. Without keys the cache
    gets one row, which no sequence reaches."""
    if not k.shape[0]:
        k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
    columns = torch.arange(max(max_seqlen_k, 1), device=k.device, dtype=torch.int32)
    table = (cu_seqlens_k[:-1, None] + columns).clamp_max(max(k.shape[0] - 1, 0))
    return k.unsqueeze(1), v.unsqueeze(1), {"block_table": table}


def joined(v: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of v followed by those of k, and their first columns, which are v. Nothing is copied if they lie like that
    already, as in latent attention, where keys and values are columns of one cache. If a gradient is wanted they are
    copied, because autograd would take such a view for a view of v, and the gradient of k would be lost."""
    width = v.shape[-1]
    beside = (
        not (torch.is_grad_enabled() and (v.requires_grad or k.requires_grad))
        and k.dtype == v.dtype
        and k.shape[:-1] == v.shape[:-1]
        and v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and k.storage_offset() == v.storage_offset() + width
        and k.stride() == v.stride()
    )
    if beside:
        both = v.as_strided((*v.shape[:-1], width + k.shape[-1]), v.stride())
    else:
        both = torch.cat([v, k], -1)
    return both, both[..., :width]


def append(
    cache: torch.Tensor, new: torch.Tensor, owner: torch.Tensor, row: torch.Tensor, batch_idx: Any, table: Any
) -> None:
    """Writes rows `new` (tokens, nheads_k, dim) to the cache: token t is row `row[t]` of sequence `owner[t]`."""
    if table is not None:
        entry, row = table[owner, row // cache.shape[1]].long(), row % cache.shape[1]
    else:
        entry = owner if batch_idx is None else batch_idx[owner].long()
    cache[entry, row] = new.to(cache.dtype)


def per_head(descale: torch.Tensor | None, group: int) -> Any:
    """Factors of key heads, (batch, nheads_k), as (batch, 1, nheads, 1) float32; 1 if there are none."""
    return 1.0 if descale is None else descale.float().repeat_interleave(group, -1)[:, None, :, None]


def with_kvcache(
    q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, batch_idx, leftpad, table, cu_seqlens_q,
    cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, q_descale, k_descale, v_descale, rotary_interleaved,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention-3's flash_attn_with_kvcache: out and lse, for packed rows as in attend_packed."""
    for pair in ({"k": k, "v": v}, {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}):
        if len(missing := [name for name, x in pair.items() if x is None]) == 1:
            raise RuntimeError(f"{missing[0]} is None, but {' and '.join(pair)} come together")
    if table is not None and batch_idx is not None:
        table, batch_idx = table[batch_idx.long()], None
    if q.dtype == torch.float8_e4m3fn:
        q = q.to(torch.bfloat16)
    rotary = rotary_cos is not None
    rotary_seqlens = None if rotary_seqlens is cache_seqlens else rotary_seqlens
    if (
        cu_seqlens_q is not None
        or cu_seqlens_k_new is not None
        or qv is not None
        or (rotary and rotary_seqlens is not None)
    ):
        # The core rotates and appends only a dense batch at the positions of its keys. Everything else is done here.
        q, cache_seqlens = _rotate_and_append(
            q, k_cache, v_cache, k, v, (rotary_cos, rotary_sin, rotary_interleaved) if rotary else None, cache_seqlens,
            batch_idx, table, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, options,
        )  # fmt: skip
        k = v = rotary_cos = rotary_sin = None
    if qv is not None:
        k_cache, v_cache = joined(v_cache, k_cache)
        q = torch.cat([qv, q], -1)
    where = {"cache_batch_idx": batch_idx, "cache_leftpad": leftpad, "block_table": table}
    eight_bit = k_cache.dtype in (torch.float8_e4m3fn, torch.int8)
    group = q.shape[-2] // k_cache.shape[-2]
    if eight_bit:  # the factors belong to sequences, not to the cache: those of q and k go into q, those of v into out
        factor = per_head(q_descale, group) * per_head(k_descale, group)
        if isinstance(factor, torch.Tensor):
            if cu_seqlens_q is not None:
                factor = factor[owners(cu_seqlens_q, q.shape[0])[0], 0]
            q = (q.float() * factor).to(q.dtype)
        k, v = (None if x is None else x.to(q.dtype) for x in (k, v))
        rotary_cos, rotary_sin = (None if x is None else x.to(q.dtype) for x in (rotary_cos, rotary_sin))
        ones = torch.ones(k_cache.shape[-2], device=q.device)
        options = options | {"k_scale": ones, "v_scale": ones}
    elif not (q_descale is k_descale is v_descale is None):
        raise RuntimeError(f"q_descale, k_descale or v_descale is given, but k_cache is {k_cache.dtype}: not of 8 bits")
    if cu_seqlens_q is None:
        out, lse = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, return_lse=True,
            rotary_interleaved=rotary_interleaved, **where, **options,
        )  # fmt: skip
    else:
        lengths = (
            k_cache.shape[1] * (1 if table is None else table.shape[1]) if cache_seqlens is None else cache_seqlens
        )
        out, lse = attend_packed(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, lengths, where, options)
    if v_descale is not None:
        factor = per_head(v_descale, group)
        factor = factor if cu_seqlens_q is None else factor[owners(cu_seqlens_q, q.shape[0])[0], 0]
        out = (out.float() * factor).to(out.dtype)
    return out, lse


def _rotate_and_append(
    q, k_cache, v_cache, k, v, rotary, cache_seqlens, batch_idx, table, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens,
    options,
):  # fmt: skip
    """Rotates q, and rotates the new keys and appends them to the cache. Returns q and the new lengths."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    new = 0 if k is None else k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    if cache_seqlens is None:
        before = room - torch.as_tensor(new, device=q.device).expand(batch)
    else:
        before = torch.as_tensor(cache_seqlens, device=q.device).expand(batch)
    first = before if rotary_seqlens is None else rotary_seqlens
    if rotary is not None:
        cos, sin, interleaved = rotary
        ordered = options["causal"] or max(options["window_size"]) >= 0 or options["attention_chunk"] > 0
        if cu_seqlens_q is None:
            positions = first[:, None] + torch.arange(q.shape[1], device=q.device) * ordered
            counts = None
        else:
            owner, number = owners(cu_seqlens_q, q.shape[0])
            positions, counts = first[owner] + number * ordered, inside(cu_seqlens_q, q.shape[0])
        q = rotate(q, cos, sin, positions, interleaved, counts)
    if k is None:
        return q, None if cache_seqlens is None else before.int()
    after = (before + new).int()
    if q.device.type == "cpu" and after.max() > room:
        raise RuntimeError(
            f"cache_seqlens={before.tolist()}: with the new keys a sequence has {after.tolist()}, "
            f"more than the {room} keys of {'a cache entry' if table is None else 'a row of page_table'}"
        )
    if cu_seqlens_k_new is None:
        owner = torch.arange(batch, device=q.device).repeat_interleave(k.shape[1])
        number = torch.arange(k.shape[1], device=q.device).repeat(batch)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        owner, number = owners(cu_seqlens_k_new, k.shape[0])
    if rotary is not None:
        counts = None if cu_seqlens_k_new is None else inside(cu_seqlens_k_new, k.shape[0])
        k = rotate(k, cos, sin, first[owner] + number, interleaved, counts)
    row = (before[owner].long() + number).clamp(0, room - 1)  # lengths on a GPU are not read: clamped, to stay inside
    append(k_cache, k, owner, row, batch_idx, table)
    append(v_cache, v, owner, row, batch_idx, table)
    return q, after
