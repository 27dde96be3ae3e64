"""The features of flash_attn's calls over caches and pages that flash_attn_minimal.flash_attn_with_kvcache does not
have: packed rows of q, packed new keys, separate positions for the rotary embedding, scores of q and qv, float8 rows of
q. They are prepared here with PyTorch's own operations; the core does the rest. None of them has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..._core.checks import integer
from ...errors import BadArgument, Unsupported
from ...kvcache import flash_attn_with_kvcache
from ._calls import check_array, without_gradient
from ._packed import Tails, check_packed, inside, owners, readable
from .layers.rotary import rotate


@without_gradient("attention of packed rows over a cache has no backward pass")
def attend_packed(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int,
    lengths: Any, where: dict[str, Any], options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (total_q, nheads, headdim_v) and lse (nheads, total_q) of packed rows over a cache. lengths: the number of
    keys of each sequence; where: the core's arguments that locate them in the cache."""
    check_packed("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q, "max_seqlen_q")
    tails = Tails(cu_seqlens_q, max_seqlen_q, q.shape[0])
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.int().contiguous()
    out, lse = flash_attn_with_kvcache(
        tails.pad(q), k_cache, v_cache, cache_seqlens=lengths, return_lse=True, **where, **options
    )
    return tails.pack(out, 0.0), tails.pack(lse.transpose(1, 2), -torch.inf).T.contiguous()


def lengths_of(cu_seqlens_k: torch.Tensor) -> torch.Tensor:
    """(batch,) the number of keys of each sequence, whose places a table gives."""
    check_packed("cu_seqlens_k", cu_seqlens_k, 2**31 - 1)
    return cu_seqlens_k.diff()


def packed_keys(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Packed keys and values, (total_k, nheads_k, .), as a cache with pages of one row each. Without keys the cache
    gets one row, which no sequence reaches."""
    check_packed("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k, "max_seqlen_k")
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


class Places:
    """The rows of a cache that new keys are written to: token t is row `row[t]` of sequence `owner[t]`. Tokens for
    which `counts` is False, and those whose entry or page the cache does not have, have no place and are not written.
    The contents of tensors on a GPU are not read on the host."""

    def __init__(self, cache: torch.Tensor, owner, row, counts, batch_idx: Any, table: Any):
        entries, rows = cache.shape[:2]
        if table is not None:
            page, row = row // rows, row % rows
            entry = table[owner, page].long()
        else:
            entry = owner if batch_idx is None else batch_idx[owner].long()
        inside = entry.clamp(0, entries - 1)
        written = counts & (entry == inside)
        host = readable(written)
        if host and (table is not None or batch_idx is not None):
            self._check(owner, entry, row, counts, written, entries, None if table is None else page)
        self.source = self.any = None
        if not (host and written.all()):
            # A token without a place does what the first token with a place does, so that all writes to a row are of
            # the same values. If no token has a place, all of them write what one row holds already.
            first = written.view(torch.uint8).argmax(0, keepdim=True)
            self.source = torch.where(written, torch.arange(len(owner), device=owner.device), first)
            self.any = written[first][:, None, None]
            entry, row = inside[self.source], row[self.source]
        self.at = entry, row

    @staticmethod
    def _check(owner, entry, row, counts, written, entries: int, page) -> None:
        """Refuses entries and pages that the cache does not have, and those to which two sequences append."""
        name, kind = ("cache_batch_idx", "entries") if page is None else ("page_table", "pages")
        for t in (counts & ~written).nonzero().flatten().tolist():
            where = f"{name}[{int(owner[t])}]" + ("" if page is None else f"[{int(page[t])}]")
            raise RuntimeError(f"{where}={int(entry[t])} is outside 0 .. {entries - 1}, the {kind} of the cache")
        # Other sequences of an entry would read what one of them appends. Pages may be shared, rows of them not.
        goals = set(zip(entry[written].tolist(), (owner if page is None else row)[written].tolist(), strict=True))
        if len(goals) != (int(written.sum()) if page is not None else len({entry for entry, _ in goals})):
            what = "entry" if page is None else "row of a page"
            raise RuntimeError(f"{name}: two sequences append to the same {what}")

    def write(self, cache: torch.Tensor, new: torch.Tensor) -> Callable[[], None]:
        """Writes rows `new` (tokens, nheads_k, dim) to the cache. Returns a function that undoes it."""
        new = new.to(cache.dtype)
        if cache.element_size() == 1:  # not every release of PyTorch selects among float8 elements
            cache, new = cache.view(torch.uint8), new.view(torch.uint8)
        before = cache[self.at]
        cache[self.at] = new if self.source is None else torch.where(self.any, new[self.source], before)
        return lambda: cache.index_put_(self.at, before)


def per_head(descale: torch.Tensor | None, group: int) -> Any:
    """Factors of key heads, (batch, nheads_k), as (batch, 1, nheads, 1) float32; 1 if there are none."""
    return 1.0 if descale is None else descale.float().repeat_interleave(group, -1)[:, None, :, None]


def scaled(x: torch.Tensor, factor: Any, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor:
    """The rows x (batch, seqlen, nheads, .), or packed (total, nheads, .), times factors of per_head."""
    if not isinstance(factor, torch.Tensor):
        return x
    if cu_seqlens_q is not None:
        factor = factor[owners(cu_seqlens_q, x.shape[0])[0], 0]
    return (x.float() * factor).to(x.dtype)


def with_kvcache(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-3's flash_attn_with_kvcache: out and lse, for packed rows as in attend_packed. The arguments are
    those of hopper.flash_attn_with_kvcache, with `options` for the core. A refused call leaves the cache as it was."""
    step = SimpleNamespace(**arguments, written=[])  # written: functions that undo the writes to the cache
    try:
        return _with_kvcache(step)
    except (BadArgument, Unsupported):
        for undo in reversed(step.written):
            undo()
        raise


def _with_kvcache(s: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    for pair in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if len(missing := [name for name in pair if getattr(s, name) is None]) == 1:
            raise RuntimeError(f"{missing[0]} is None, but {' and '.join(pair)} come together")
    descales, kind = (s.q_descale, s.k_descale, s.v_descale), s.k_cache.dtype
    eight_bit = kind in (torch.float8_e4m3fn, torch.int8)
    if not eight_bit and any(x is not None for x in descales):
        raise RuntimeError(f"q_descale, k_descale or v_descale is given, but k_cache is {kind}: not of 8 bits")
    if s.page_table is not None and s.cache_batch_idx is not None:
        s.page_table, s.cache_batch_idx = _rows_of(s.q, s.page_table, s.cache_batch_idx, s.cache_seqlens), None
    if s.q.dtype == torch.float8_e4m3fn:
        s.q = s.q.to(torch.bfloat16)
    if s.rotary_seqlens is s.cache_seqlens:
        s.rotary_seqlens = None
    elsewhere = s.rotary_cos is not None and s.rotary_seqlens is not None
    prepared = elsewhere or any(x is not None for x in (s.cu_seqlens_q, s.cu_seqlens_k_new, s.qv))
    if prepared or eight_bit:
        _check_step(s)
    if prepared:
        # The core rotates and appends only a dense batch at the positions of its keys. Everything else is done here.
        s.q, s.cache_seqlens = _rotate_and_append(s)
        s.k = s.v = s.rotary_cos = s.rotary_sin = None
    if s.qv is not None:
        s.k_cache, s.v_cache = joined(s.v_cache, s.k_cache)
        s.q = torch.cat([s.qv, s.q], -1)
    group = s.q.shape[-2] // max(s.k_cache.shape[-2], 1)
    if eight_bit:  # the factors belong to sequences, not to the cache: those of q and k go into q, those of v into out
        s.q = scaled(s.q, per_head(s.q_descale, group) * per_head(s.k_descale, group), s.cu_seqlens_q)
        for name in ("k", "v", "rotary_cos", "rotary_sin"):
            if (x := getattr(s, name)) is not None:
                setattr(s, name, x.to(s.q.dtype))
        ones = torch.ones(s.k_cache.shape[-2], device=s.q.device)
        s.options = s.options | {"k_scale": ones, "v_scale": ones}
    where = {"cache_batch_idx": s.cache_batch_idx, "cache_leftpad": s.cache_leftpad, "block_table": s.page_table}
    if s.cu_seqlens_q is None:
        out, lse = flash_attn_with_kvcache(
            s.q, s.k_cache, s.v_cache, s.k, s.v, s.rotary_cos, s.rotary_sin, s.cache_seqlens, return_lse=True,
            rotary_interleaved=s.rotary_interleaved, **where, **s.options,
        )  # fmt: skip
    else:
        lengths = _room(s) if s.cache_seqlens is None else s.cache_seqlens
        out, lse = attend_packed(s.q, s.k_cache, s.v_cache, s.cu_seqlens_q, s.max_seqlen_q, lengths, where, s.options)
    return scaled(out, per_head(s.v_descale, group), s.cu_seqlens_q), lse


def _room(s: SimpleNamespace) -> int:
    """The most keys that a sequence can have."""
    return s.k_cache.shape[1] * (1 if s.page_table is None else s.page_table.shape[1])


def _rows_of(q: torch.Tensor, table: torch.Tensor, batch_idx: torch.Tensor, cache_seqlens: Any) -> torch.Tensor:
    """The rows batch_idx (batch,) of a page_table. A row that the table does not have becomes pages of number -1, which
    no cache has: the core then writes no keys there."""
    check_array(q, "page_table", table, "rows", "pages of a sequence")
    check_array(q, "cache_batch_idx", batch_idx, "batch")
    if not table.shape[0]:
        return table.new_full((batch_idx.shape[0], table.shape[1]), -1)
    exists = (batch_idx >= 0) & (batch_idx < table.shape[0])
    if readable(batch_idx):
        lost = ~exists if not isinstance(cache_seqlens, torch.Tensor) else ~exists & (cache_seqlens >= 0)
        for b in lost.nonzero().flatten().tolist():  # an idle sequence has no row
            raise RuntimeError(
                f"cache_batch_idx[{b}]={int(batch_idx[b])} is outside 0 .. {table.shape[0] - 1}, the rows of page_table"
            )
    return torch.where(exists[:, None], table[batch_idx.clamp(0, table.shape[0] - 1).long()], -1)


def _check_step(s: SimpleNamespace) -> None:
    """Checks the shapes that the operations here rely on. The core does not see all of these arrays."""
    q, k_cache, batch_idx, table = s.q, s.k_cache, s.cache_batch_idx, s.page_table
    if s.cu_seqlens_q is None:
        check_array(q, "q", q, "batch", "seqlen_q", "nheads", "headdim")
        batch = q.shape[0]
    else:
        check_array(q, "q", q, "total_q", "nheads", "headdim")
        check_packed("cu_seqlens_q", s.cu_seqlens_q, q.shape[0], s.max_seqlen_q, "max_seqlen_q")
        batch = s.cu_seqlens_q.shape[0] - 1
    nheads, headdim = q.shape[-2:]
    check_array(q, "qv", s.qv, *q.shape[:-1], "headdim_v")
    check_array(q, "k_cache", k_cache, "entries", "seqlen_cache", "nheads_k", headdim)
    check_array(q, "v_cache", s.v_cache, *k_cache.shape[:3], "headdim_v" if s.qv is None else s.qv.shape[-1])
    nheads_k = k_cache.shape[2]
    if not nheads_k or nheads % nheads_k:
        raise RuntimeError(f"nheads={nheads} is not a multiple of nheads_k={nheads_k}")
    for name in ("q_descale", "k_descale", "v_descale"):
        check_array(q, name, getattr(s, name), batch, nheads_k)
    check_array(q, "cache_batch_idx", batch_idx, batch)
    check_array(q, "page_table", table, batch, "pages of a sequence")
    if table is batch_idx is None and k_cache.shape[0] < batch:
        raise RuntimeError(f"k_cache has {k_cache.shape[0]} entries for batch={batch} without cache_batch_idx")
    if table is not None and not k_cache.shape[1]:
        raise RuntimeError(f"k_cache has shape {tuple(k_cache.shape)}: a page has at least one row")
    if isinstance(s.cache_seqlens, torch.Tensor):
        check_array(q, "cache_seqlens", s.cache_seqlens, batch)
    check_array(q, "rotary_seqlens", s.rotary_seqlens, batch)
    if (cos := s.rotary_cos) is not None:
        check_array(q, "rotary_cos", cos, "positions", "rotary_dim / 2")
        check_array(q, "rotary_sin", s.rotary_sin, *cos.shape)
        if 2 * cos.shape[1] > headdim:
            raise RuntimeError(f"rotary_cos has shape {tuple(cos.shape)}: more than headdim={headdim} dims turn")
    if s.k is not None:
        new: tuple = (batch, "seqlen_new") if s.cu_seqlens_k_new is None else ("total_k",)
        check_array(q, "k", s.k, *new, nheads_k, headdim)
        check_array(q, "v", s.v, *s.k.shape[:-1], s.v_cache.shape[-1])
        if s.cu_seqlens_k_new is not None:
            check_packed("cu_seqlens_k_new", s.cu_seqlens_k_new, s.k.shape[0])
            check_array(q, "cu_seqlens_k_new", s.cu_seqlens_k_new, batch + 1)


def _rotate_and_append(s: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates q, and rotates the new keys and appends them to the cache. Returns q and the new lengths.

    A sequence whose length is below 0 is idle: it appends nothing, and its length stays below 0. On a GPU, where the
    host does not read lengths, a sequence whose new keys do not fit into its entry appends nothing either."""
    q, k, v, cu_seqlens_q, cu_seqlens_k_new = s.q, s.k, s.v, s.cu_seqlens_q, s.cu_seqlens_k_new
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache_seqlens, room = s.cache_seqlens, _room(s)
    new = 0 if k is None else k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff().long()
    if isinstance(cache_seqlens, torch.Tensor):
        before = cache_seqlens.long().expand(batch)
    else:  # filled on the device, because a CUDA graph cannot hold a copy from the host
        length = room if cache_seqlens is None else integer("cache_seqlens", cache_seqlens, 0, 2**31 - 1)
        before = torch.full((batch,), length, device=q.device)
        before = before - new if cache_seqlens is None else before
    idle = before < 0
    if cache_seqlens is None and k is not None and readable(before) and idle.any():
        raise RuntimeError(f"k has {room - int(before.min())} keys for one sequence, more than the {room} of its entry")
    first = before if s.rotary_seqlens is None else s.rotary_seqlens
    rotates = s.rotary_cos is not None
    if rotates:
        causal, window, chunk = (s.options[name] for name in ("causal", "window_size", "attention_chunk"))
        ordered = causal or max(window) >= 0 or chunk > 0
        if cu_seqlens_q is None:
            positions = first[:, None] + torch.arange(q.shape[1], device=q.device) * ordered
            counts = ~idle[:, None].expand_as(positions)
        else:
            owner, number = owners(cu_seqlens_q, q.shape[0])
            positions, counts = first[owner] + number * ordered, inside(cu_seqlens_q, q.shape[0]) & ~idle[owner]
        q = rotate(q, s.rotary_cos, s.rotary_sin, positions, s.rotary_interleaved, counts)
    if k is None:
        return q, None if cache_seqlens is None else before.int()
    after = torch.where(idle, before, before + new)
    if readable(after) and batch and after.max() > room:
        raise RuntimeError(
            f"cache_seqlens={before.tolist()}: with the new keys a sequence has {after.tolist()}, "
            f"more than the {room} keys of {'a cache entry' if s.page_table is None else 'a row of page_table'}"
        )
    fits = ~idle & (after <= room)
    if cu_seqlens_k_new is None:
        owner = torch.arange(batch, device=q.device).repeat_interleave(k.shape[1])
        number = torch.arange(k.shape[1], device=q.device).repeat(batch)
        k, v, counts = k.flatten(0, 1), v.flatten(0, 1), fits[owner]
    else:
        owner, number = owners(cu_seqlens_k_new, k.shape[0])
        counts = inside(cu_seqlens_k_new, k.shape[0]) & fits[owner]
    row = before[owner] + number
    if rotates:
        k = rotate(k, s.rotary_cos, s.rotary_sin, first[owner] + number, s.rotary_interleaved, counts)
    if k.shape[0] and batch and room and s.k_cache.shape[0]:
        row = row.clamp(0, room - 1)  # inside the entry, also for keys that do not count
        places = Places(s.k_cache, owner, row, counts, s.cache_batch_idx, s.page_table)
        s.written += [places.write(s.k_cache, k), places.write(s.v_cache, v)]
    return q, after.clamp(-1, room).int()
