"""Captured tensors in a Form: steps that compute an option from them at every call, also in compiled code, and a check
of those that were read only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..._arrays import torch_modes
from ...errors import BadArgument


class Step(NamedTuple):
    """function(*arguments, **options), whose arguments are steps, tensors and numbers."""

    function: Callable
    arguments: tuple
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody writes to it)


def computed(x: Any) -> Any:
    """The result of a step, from its tensors as they are now; anything else as it is."""
    if not isinstance(x, Step):
        return x
    arguments = [computed(a) for a in x.arguments]
    return x.function(*arguments, **{name: computed(a) for name, a in x.options.items()})


def tensors_of(x: Any) -> list[torch.Tensor]:
    """The tensors in a step or a term (_terms.py)."""
    if isinstance(x, torch.Tensor):
        return [x]
    inner = tree_leaves((x.arguments, x.options)) if hasattr(x, "arguments") else ()
    return [tensor for y in inner for tensor in tensors_of(y)]


class Fixed(NamedTuple):
    """A captured tensor whose values are part of a form."""

    tensor: torch.Tensor
    version: int
    where: str  # the expression that it is part of
    scales: bool  # whether the scores depend smoothly on it: then its gradient would be lost


def fix(tensors: Iterable[torch.Tensor], where: str, scales: bool) -> list[Fixed]:
    """The tensors with their versions, except those made in inference mode, whose changes are not counted."""
    return [Fixed(x, x._version, where, scales) for x in tensors if not x.is_inference()]


class Derived(NamedTuple):
    """A captured tensor from which a score_mod or mask_mod computed another one while it was read."""

    source: torch.Tensor
    version: int | None  # None if the result is a view of it, or if its changes are not counted
    lost: bool  # whether the result would have a gradient, but none was recorded


def derive(result: Any, sources: Iterable[Any], detached: bool) -> list[Derived]:
    """The sources of a result. detached: whether the function wanted no gradient of this result."""
    if not isinstance(result, torch.Tensor):
        return []
    found = []
    for source in sources:
        if isinstance(source, torch.Tensor) and source is not result:
            counted = not _is_view(result, source) and not source.is_inference()
            lost = result.is_floating_point() and not detached and not torch_modes.records()
            found.append(Derived(source, source._version if counted else None, lost))
    return found


def _is_view(x: torch.Tensor, of: torch.Tensor) -> bool:
    try:
        return x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a layout, or a wrapper of a transform, that has no memory
        return False


def check(fixed: Iterable[Fixed], derived: Iterable[Derived]) -> None:
    """Raises if a form no longer computes what its functions would compute now, or if it would lose a gradient."""
    for tensor, version, where, scales in fixed:
        if tensor._version != version:
            raise BadArgument(
                f"{where} has changed since the form was made, which holds what it was then: call recognise again"
            )
        if scales and tensor.requires_grad and torch_modes.records():
            raise BadArgument(f"{where} has a tensor that requires a gradient, which only a bias gets: detach it")
    for source, version, lost in derived:
        shape = tuple(source.shape)
        if version is not None and source._version != version:
            raise BadArgument(
                f"a captured tensor of shape {shape} has changed since the form was made, and the function computes "
                "another tensor from it: call recognise again, or compute that tensor outside of the function"
            )
        if lost and source.requires_grad and torch_modes.records():
            raise BadArgument(
                f"a captured tensor of shape {shape} requires a gradient, but the form, which holds another tensor "
                "that the function computes from it, was made where no gradient was recorded"
            )
