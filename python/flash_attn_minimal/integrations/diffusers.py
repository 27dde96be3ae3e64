"""Attention for Hugging Face diffusers: a backend beside those that diffusers.models.attention_dispatch lists.

    from flash_attn_minimal.integrations import diffusers as adapter
    pipeline.transformer.set_attention_backend(adapter.register())

It serves every model that attends through `dispatch_attention_fn`. diffusers keeps the names of backends in an Enum, to
which `register` adds one. Everything else goes through the registry, as for diffusers' own backends.
"""

from __future__ import annotations

import torch
from diffusers.models import attention_dispatch

from .._arrays import torch_modes
from ..errors import BadArgument
from ..torch._inputs import autocast, dense_rows
from ..torch._seeded import attend

torch_modes.active()  # loads PyTorch's functions now, because a trace could not
NAME = "attn_minimal"


def register() -> str:
    """Registers the backend in this process and returns its name. A second call changes nothing."""
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_, member.__objclass__ = NAME.upper(), NAME, names
        member._sort_order_ = len(names._member_names_)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    if member not in registry._backends:
        checks = [attention_dispatch._check_device, attention_dispatch._check_shape]
        registry.register(member, constraints=checks)(attention)
    return NAME


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The function that dispatch_attention_fn calls. Its arguments mean what they mean to the backend `native`.

    Arguments:
        query: (batch, seqlen_q, nheads, headdim); key, value: (batch, seqlen_k, nheads_k, .). Under torch.autocast all
            three take its dtype.
        attn_mask: bool (True: attend) or float (added to the scores), broadcasting to (batch, nheads, seqlen_q,
            seqlen_k); or (batch, seqlen_k), for keys that are not padding. Integers are refused, as by `native`: they
            may be a tokenizer's mask (1: attend) or numbers to add.
        is_causal: row i sees keys 0 .. i.
        scale: None means headdim ** -0.5.
        enable_gqa: nheads_k may be smaller than nheads; without it that is an error.
        return_lse: also return lse, (batch, seqlen_q, nheads) float32.

    Raises:
        ValueError: different numbers of heads without enable_gqa, a mask of integers.
        NotImplementedError: context parallelism (`_parallel_config`), for which diffusers itself splits attention.
    """
    if _parallel_config is not None:
        raise NotImplementedError(f"the backend {NAME} takes no context parallelism: use 'native', or one process")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            what = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise BadArgument(f"{name} is {what}: expected (batch, seqlen, nheads, headdim)")
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise BadArgument(f"attn_mask is a {type(attn_mask).__name__}: expected a torch.Tensor")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(f"query has {query.shape[2]} heads and key {key.shape[2]}: that needs enable_gqa=True")
    q, k, v = dense_rows(*autocast(query, key, value))
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.shape == (q.shape[0], k.shape[1]):
            attn_mask = attn_mask[:, None, None]
        if attn_mask.dtype == torch.bool:
            mask = dense_rows(attn_mask)[0]
        elif attn_mask.is_floating_point():
            bias = dense_rows(attn_mask if attn_mask.dtype == q.dtype else attn_mask.float())[0]
        else:
            raise BadArgument(
                f"attn_mask is {attn_mask.dtype}: expected bool or floating point; attn_mask.bool() attends to the ones"
            )
    options = {"softmax_scale": scale, "causal": is_causal, "top_left": is_causal, "bias": bias, "mask": mask}
    results = attend(q, k, v, dropout_p=dropout_p, return_lse=return_lse, **options)
    return (results[0], results[1].transpose(1, 2)) if return_lse else results
