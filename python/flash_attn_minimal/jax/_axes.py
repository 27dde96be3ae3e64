"""The axes of a mesh that an array varies over. In jax.shard_map the arguments, results and gradients of a custom call
must vary over the same axes."""

from __future__ import annotations

import jax


def vary(arrays, others) -> list:
    """The arrays, marked as varying over every axis that any of `others` varies over."""
    axes = frozenset().union(*map(varying_axes, others))
    missing = [tuple(sorted(axes - varying_axes(array))) for array in arrays]
    return [_cast(array, more) if more else array for array, more in zip(arrays, missing, strict=True)]


def varying_axes(array) -> frozenset:
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def _cast(array, axes):
    return jax.lax.pcast(array, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, axes)
