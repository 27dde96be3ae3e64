"""The cost of the library's operators, for torch.utils.flop_counter. All pairs of a row and a key count, hidden ones
too, as for PyTorch's own attention. Packed sequences count with their own lengths, if these can be read."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from . import _kvcache, _seeded  # noqa: F401  (they define operators)
from ._operators import OPTION_ARRAYS

_ops = torch.ops.flash_attn_minimal
_LENGTHS = slice(len(OPTION_ARRAYS), len(OPTION_ARRAYS) + 4)  # cu_seqlens and the longest, after q, k and v


def _pairs(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Rows times keys, over all heads and sequences."""
    if cu_seqlens_q is None:
        return q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, FakeTensor):
        return (cu_seqlens_q.shape[0] - 1) * q.shape[1] * max_seqlen_q * max_seqlen_k
    return q.shape[1] * int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())


@register_flop_formula([_ops.attention], get_raw=True)
def attention(q, k, v, *args, **kwargs) -> int:
    """Two products, q k^T and P v."""
    return 2 * _pairs(q, k, *args[_LENGTHS]) * (q.shape[-1] + v.shape[-1])


@register_flop_formula([_ops.attention_backward], get_raw=True)
def attention_backward(dout, dlse, out, lse, want_dbias, want_dsinks, q, k, v, *args, **kwargs) -> int:
    """Five products: S again, dq and dk over headdim; dP and dv over headdim_v."""
    return 2 * _pairs(q, k, *args[_LENGTHS]) * (3 * q.shape[-1] + 2 * v.shape[-1])


for _op, _formula in ((_ops.attention_seeded, attention), (_ops.attention_seeded_backward, attention_backward)):
    register_flop_formula([_op], get_raw=True)(lambda seed, *args, f=_formula, **kwargs: f(*args, **kwargs))


@register_flop_formula([_ops.kvcache_attention, _ops.kvcache_append, _ops.kvcache_append_scaled], get_raw=True)
def kvcache_attention(*args, out_val=None, **kwargs) -> int:
    """Lengths in an array are not read: all places of the cache count."""
    given = dict(zip(_kvcache.ARGUMENTS, args, strict=False)) | kwargs
    q, k_cache, v_cache, table = (given[name] for name in ("q", "k_cache", "v_cache", "block_table"))
    keys = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if given["length"] is not None:
        keys = given["length"] + (0 if given["k"] is None else given["k"].shape[1])
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * keys * (q.shape[-1] + v_cache.shape[-1])
