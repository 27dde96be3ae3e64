"""Between padded batches (batch, seqlen, ...) and packed rows (total, ...): flash_attn.bert_padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` of x (rows, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, ...) zeros whose rows `indices`, each there once, are `values`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `indices` of x, and x."""
    return index_first_axis(x, indices), x


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The rows of a padded batch that count.

    Arguments:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers: which rows are tokens.
        unused_mask: the same of rows that take part in the packing and are not used.

    Returns:
        the rows (total, ...); their numbers in the flattened batch; cu_seqlens (batch + 1,) int32; the length of the
        longest sequence; (batch,) int32, how many rows of each sequence are used.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """unpad_input where an entry of the batch holds several sequences, one behind the other: row b of
    attention_mask_in_length, (batch, seqlen) integers, has their lengths and then zeros. The results are those of
    unpad_input but for the last."""
    seqlen = attention_mask_in_length.shape[-1]
    kept = torch.arange(seqlen, device=hidden_states.device) < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Packed rows back in their batch (batch, seqlen, ...), with zeros between them: the inverse of unpad_input."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
