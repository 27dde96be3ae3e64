"""What a Form keeps of captured tensors: steps that compute an option from them at every call, in compiled code too,
and a watch over those that it has read once and for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ... import _modes
from ..._library import BadArgument


class Step(NamedTuple):
    """function(*arguments, **options), whose arguments are steps, tensors and numbers."""

    function: Callable
    arguments: tuple
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody writes to it)


def computed(x: Any) -> Any:
    """What a step computes, of tensors as they are now."""
    if not isinstance(x, Step):
        return x
    arguments = [computed(a) for a in x.arguments]
    return x.function(*arguments, **{name: computed(a) for name, a in x.options.items()})


def tensors_of(x: Any) -> list[torch.Tensor]:
    """The tensors that a step, or a term (_terms.py), is made of."""
    if isinstance(x, torch.Tensor):
        return [x]
    inner = tree_leaves((x.arguments, x.options)) if hasattr(x, "arguments") else ()
    return [tensor for y in inner for tensor in tensors_of(y)]


class Fixed(NamedTuple):
    """A captured tensor whose values are part of a form."""

    tensor: torch.Tensor
    version: int
    where: str  # the expression
    scales: bool  # whether the scores depend smoothly on it, so that a gradient of it would be lost


def fix(tensors: Iterable[torch.Tensor], where: str, scales: bool) -> list[Fixed]:
    """Tensors of the inference mode do not count their changes, so that nobody can watch them."""
    return [Fixed(x, x._version, where, scales) for x in tensors if not x.is_inference()]


class Derived(NamedTuple):
    """A captured tensor that a score_mod or mask_mod has computed another one from while it was read."""

    source: torch.Tensor
    version: int | None  # None where the other is a view of it, or where nothing counts
    lost: bool  # whether the other would have a gradient, but none was recorded; a view has requires_grad, and no graph


def derive(result: Any, sources: Iterable[Any], detached: bool) -> list[Derived]:
    """detached: whether the function wanted no gradient of this result."""
    if not isinstance(result, torch.Tensor):
        return []
    found = []
    for source in sources:
        if isinstance(source, torch.Tensor) and source is not result:
            counted = not _is_view(result, source) and not source.is_inference()
            lost = result.is_floating_point() and not detached and not _modes.records()
            found.append(Derived(source, source._version if counted else None, lost))
    return found


def _is_view(x: torch.Tensor, of: torch.Tensor) -> bool:
    try:
        return x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a layout, or a wrapper of a transform, without memory of its own
        return False


def check(fixed: Iterable[Fixed], derived: Iterable[Derived]) -> None:
    """Raises where a form no longer says what its functions would say now, or would lose a gradient."""
    for tensor, version, where, scales in fixed:
        if tensor._version != version:
            raise BadArgument(
                f"{where} has changed since the form was made, which holds what it was then: call recognise again"
            )
        if scales and tensor.requires_grad and _modes.records():
            raise BadArgument(f"{where} has a tensor that requires a gradient, which only a bias gets: detach it")
    for source, version, lost in derived:
        shape = tuple(source.shape)
        if version is not None and source._version != version:
            raise BadArgument(
                f"a captured tensor of shape {shape} has changed since the form was made, and the function computes "
                "another tensor from it: call recognise again, or compute that tensor outside of the function"
            )
        if lost and source.requires_grad and _modes.records():
            raise BadArgument(
                f"a captured tensor of shape {shape} requires a gradient, but the form, which holds another tensor "
                "that the function computes from it, was made where no gradient was recorded"
            )
