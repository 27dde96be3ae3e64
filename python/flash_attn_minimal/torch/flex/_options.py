"""The options of a call that express what was found in a score_mod and mask_mod."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch

from ._form import Form, documents, prefix
from ._found import Call, Found, refuse
from ._live import Step
from ._measured import measured


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
