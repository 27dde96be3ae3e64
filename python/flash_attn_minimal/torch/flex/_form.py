"""Attention with a recognised score_mod and mask_mod in this library's terms: the options of one call, or of calls on
packed sequences. A Form can be called many times, also in compiled code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...attention import flash_attn_func, flash_attn_varlen_func
from ...errors import BadArgument
from .._inputs import autocast, dense_rows
from ._found import Call, Found, refuse
from ._live import Derived, Fixed, Step, check, computed
from ._measured import measured


@dataclass(frozen=True, eq=False)
class Documents:
    """Runs of rows that see only each other, as packed sequences: those of all batch entries one after the other."""

    cu_seqlens: torch.Tensor  # (documents + 1,) int32
    longest: int
    entry: torch.Tensor  # (documents,) the batch entry of each


@dataclass(frozen=True, eq=False)
class Prefix:
    """Each row sees the keys of its entry's prefix, and those up to itself. Rows inside the prefix see only the prefix,
    and the rows after it are causal: two calls on packed sequences. Row numbers count over all batch entries."""

    inside: torch.Tensor  # the rows inside
    behind: torch.Tensor  # the rows after
    back: torch.Tensor  # for each row, its position in `inside` followed by `behind`
    cu_inside: torch.Tensor  # (batch + 1,) int32
    cu_behind: torch.Tensor
    cu_all: torch.Tensor
    longest_inside: int
    longest_behind: int


@dataclass(frozen=True, eq=False)
class Form:
    """Attention over (batch, heads, rows) queries and `keys` keys, with options that `recognise` found. Row i is
    aligned with key i, or if `from_end` with key i + keys - rows, and sees the keys from window[0] before that key to
    window[1] after it; -1 is open.

    A bias, slopes, masks in memory and padding are computed from their captured tensors at every call, and a bias gets
    its gradient, wherever the form was made. Documents, prefixes, masks by intervals or by blocks, numbers and the
    contents of a BlockMask decide which call it is, so their tensors are read only once. A call raises if such a tensor
    has since changed in place.
    (Compiled code does not check, and tensors made in inference mode do not count their changes.)"""

    batch: int
    heads: int
    rows: int
    keys: int
    window: tuple[int, int] = (-1, -1)
    from_end: bool = False
    factor: float = 1.0  # multiplies the scale
    softcap: float = 0.0
    alibi_slopes: Step | None = None  # (heads,) or (batch, heads), float32
    bias: Step | None = None
    mask: Step | None = None
    documents: Documents | None = None
    prefix: Prefix | None = None
    row_indices: torch.Tensor | None = None  # startend_row_indices
    blocks: torch.Tensor | None = None  # block_mask
    fixed: tuple[Fixed, ...] = ()
    derived: tuple[Derived, ...] = ()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """query (batch, heads, rows, headdim), key and value (batch, heads_k, keys, .), as in flex_attention. Returns
        out (batch, heads, rows, headdim_v), with return_lse also lse (batch, heads, rows), float32."""
        self._check(query, key, value, enable_gqa)
        if not torch.compiler.is_compiling():
            check(self.fixed, self.derived)
        query, key, value = autocast(query, key, value)
        scale = (query.shape[-1] ** -0.5 if scale is None else scale) * self.factor
        options: dict[str, Any] = {
            "softmax_scale": scale, "softcap": self.softcap, "alibi_slopes": computed(self.alibi_slopes),
            "bias": computed(self.bias), "mask": computed(self.mask), "startend_row_indices": self.row_indices,
            "block_mask": self.blocks,
        }  # fmt: skip
        if self.bias is not None and options["bias"].dtype not in (torch.float32, query.dtype):
            options["bias"] = options["bias"].float()
        q, k, v = dense_rows(*(x.transpose(1, 2) for x in (query, key, value)))
        left, right = self.window
        if right == 0:
            options |= {"causal": True, "window_size": (left, -1)}
        else:
            options["window_size"] = self.window
        if self.documents is not None:
            out, lse = self._per_document(q, k, v, options)
        elif self.prefix is not None:
            out, lse = self._per_prefix(q, k, v, options)
        else:
            top_left = self.rows != self.keys and not self.from_end
            out, lse = flash_attn_func(q, k, v, return_lse=True, top_left=top_left, **options)
        out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    def _check(self, query, key, value, enable_gqa: bool) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, torch.Tensor):
                raise BadArgument(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if tuple(query.shape[:-1]) != (self.batch, self.heads, self.rows):
            form = (self.batch, self.heads, self.rows, "headdim")
            raise BadArgument(f"query has shape {tuple(query.shape)}: this form is of {form}")
        for name, x in (("key", key), ("value", value)):
            if x.dim() != 4 or x.shape[0] != self.batch or x.shape[2] != self.keys:
                raise BadArgument(
                    f"{name} has shape {tuple(x.shape)}: this form is of {(self.batch, 'heads', self.keys, 'headdim')}"
                )
        if not enable_gqa and key.shape[1] != self.heads:
            raise BadArgument(f"query has {self.heads} heads, key {key.shape[1]}: that needs enable_gqa=True")

    def _unpacked(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = out.view(self.batch, self.rows, *out.shape[1:])
        return out, lse.view(self.heads, self.batch, self.rows).transpose(0, 1)

    def _per_document(self, q, k, v, options: dict[str, Any]):
        runs = self.documents
        cu, longest = runs.cu_seqlens, runs.longest
        if self.alibi_slopes is not None and options["alibi_slopes"].dim() == 2:
            options["alibi_slopes"] = options["alibi_slopes"][runs.entry]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return self._unpacked(*flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, return_lse=True, **options))

    def _per_prefix(self, q, k, v, options: dict[str, Any]):
        p = self.prefix
        options.pop("window_size")
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = flash_attn_varlen_func(
            q[p.inside], k[p.inside], v[p.inside], p.cu_inside, p.cu_inside, p.longest_inside, p.longest_inside,
            return_lse=True, **options,
        )  # fmt: skip
        behind, lse_behind = flash_attn_varlen_func(
            q[p.behind], k, v, p.cu_behind, p.cu_all, p.longest_behind, self.keys, causal=True, return_lse=True,
            **options,
        )  # fmt: skip
        out, lse = torch.cat([out, behind]), torch.cat([lse, lse_behind], 1)
        return self._unpacked(out[p.back], lse[:, p.back])


def documents(ids: torch.Tensor) -> Documents | None:
    """The Documents for ids (properties, batch, rows): rows of an entry belong to one document if all properties agree.
    None if a document is not one run of rows."""
    changes = (ids[:, :, 1:] != ids[:, :, :-1]).any(0)
    first = torch.cat([torch.ones_like(ids[0, :, :1], dtype=torch.bool), changes], 1)
    runs = first.sum(1).tolist()
    if any(torch.unique(ids[:, b], dim=1).shape[1] != n for b, n in enumerate(runs)):
        return None
    total = ids.shape[1] * ids.shape[2]
    starts = first.flatten().nonzero().squeeze(1)
    cu_seqlens = torch.cat([starts, starts.new_tensor([total])]).int()
    return Documents(cu_seqlens, int(cu_seqlens.diff().max()), starts // ids.shape[2])


def prefix(lengths: torch.Tensor, rows: int) -> Prefix:
    """The Prefix for lengths (batch,), the number of keys in each entry's prefix."""
    lengths = lengths.long().clamp(0, rows)
    inside = torch.arange(rows, device=lengths.device) < lengths[:, None]
    places = [x.flatten().nonzero().squeeze(1) for x in (inside, ~inside)]
    back = torch.cat(places).argsort()
    cu = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (lengths, rows - lengths)]
    everything = torch.arange(lengths.shape[0] + 1, device=lengths.device, dtype=torch.int32) * rows
    return Prefix(*places, back, *cu, everything, int(lengths.max()), rows - int(lengths.min()))


# ---- the options of a call that express what was found in a score_mod and mask_mod ----


def form_of(found: Found, call: Call) -> Form:
    """The Form for a call. Raises Unsupported if no options express the functions."""
    rows, keys = call.rows, call.keys
    form = Form(call.batch, call.heads, rows, keys, factor=found.factor, softcap=found.softcap)
    packed = _packed(form, found, call)
    slopes = None
    ends = [0] if rows == keys else [0, keys - rows]  # the key that row 0 is aligned with
    if found.slopes is not None:
        slopes = found.slopes
        sign, place = found.distance
        # kv_idx - q_idx + place is the distance, or its negative, for a row that is aligned with key q_idx - place.
        ends = [end for end in ends if end == -place]
        if not ends:
            refuse(
                found.alibi, f"distances from q_idx + {-place}: rows stand at q_idx, or at q_idx + seqlen_k - seqlen_q"
            )
        if sign:
            below = found.high is not None and found.high <= -place
            above = found.low is not None and found.low >= -place
            if not below and not above:
                refuse(found.alibi, "a signed distance needs a causal mask, or abs() of it")
            slopes = Step(operator.mul, (slopes, -sign if below else sign))
    low, high = found.low, found.high
    held = [end for end in ends if (low is None or low <= end) and (high is None or high >= end)]
    end = (held or ends)[0]
    window = (-1 if low is None else end - low, -1 if high is None else high - end) if held else None
    if window is None or packed is None or found.rest:  # a window of options holds the key that its row stands at
        form = replace(form, **measured(found, call, end, window))
    else:
        form = replace(packed, window=window)
    return replace(
        form, from_end=end != 0, alibi_slopes=slopes, blocks=form.blocks if found.blocks is None else found.blocks,
        bias=_joined(found.biases, operator.add, call), mask=_joined(found.masks, operator.and_, call),
        fixed=tuple(found.fixed), derived=tuple(found.derived),
    )  # fmt: skip


def _joined(parts: list[Step], join: Callable, call: Call) -> Step | None:
    if not parts:
        return None
    whole = parts[0]
    for other in parts[1:]:
        whole = Step(join, (whole, other))
    return Step(_with_keys, (whole, call.keys))


def _with_keys(x: torch.Tensor, keys: int) -> torch.Tensor:
    if x.shape[3] != keys:
        x = x.expand(*x.shape[:3], keys)
    return x if x.stride(-1) == 1 or keys <= 1 else x.contiguous()


def _packed(form: Form, found: Found, call: Call) -> Form | None:
    """The form for documents or a prefix as packed sequences, or without both the form itself. None where packed
    sequences cannot say it."""
    if not found.conditions:
        return form
    if call.rows != call.keys or found.masks or found.biases or found.rest or found.blocks is not None:
        return None
    if found.prefixes:
        if len(found.conditions) > 1 or (found.low, found.high) != (None, None):
            return None
        return replace(form, prefix=prefix(found.prefixes[0].view(-1).expand(call.batch), call.rows))
    ids = [call.values(x)[:, 0, :, 0].expand(call.batch, -1) for x in found.same]
    if any((x != x).any() for x in ids):  # NaN, which is not equal to itself
        return None
    runs = documents(torch.stack([x.unique(return_inverse=True)[1] for x in ids]))
    return None if runs is None else replace(form, documents=runs)
