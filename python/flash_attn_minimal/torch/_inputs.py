"""Tensors as the core takes them."""

from __future__ import annotations

from typing import Any

import torch


def dense_rows(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors, made contiguous along the last axis."""
    return [x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in tensors]


def autocast(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors in the dtype of torch.autocast, if it is on for their device. As in PyTorch's own attention, float32,
    float16 and bfloat16 become that dtype; other dtypes and None stay."""
    device = next(x.device.type for x in tensors if x is not None)
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [
        x if x is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)
        for x in tensors
    ]  # fmt: skip
