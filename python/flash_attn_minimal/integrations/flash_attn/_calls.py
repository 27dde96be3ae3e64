"""Shared by the functions of both packages: options as the core takes them, errors, dropout's seed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from ... import attention as core
from ..._arrays import torch_modes
from ..._core import checks
from ...errors import FlashAttnError
from ...torch._seeded import draw_dropout as _draw_dropout
from ._packed import owners

_Arguments, _Result = ParamSpec("_Arguments"), TypeVar("_Result")


class Refused(RuntimeError):
    """A call that the library does not serve. Its text is that of the library's own error, which is its cause."""


def refusing(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function raise RuntimeErrors, as flash_attn does, instead of the library's errors, and where it failed
    because an argument is not a tensor or has too few axes."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except FlashAttnError as error:
            if isinstance(error, RuntimeError):
                raise
            raise Refused(str(error)) from error
        except (AttributeError, IndexError, TypeError) as error:  # looked at only now, so that good calls pay nothing
            if (why := _misfit(function, args, kwargs)) is None:
                raise
            raise Refused(why) from error

    return call


_ROWS = ("q", "k", "v", "qv", "k_cache", "v_cache")


def _misfit(function: Callable, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """The text of an error about the first argument that is not a tensor where the function's annotation wants one, or
    that has too few axes for rows of heads; None if there is no such argument."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # an argument is missing, or unknown, which Python's own error says
        return None
    for name, x in given.items():
        wanted = inspect.signature(function).parameters[name].annotation
        if wanted not in ("torch.Tensor", "torch.Tensor | None") or (x is None and wanted != "torch.Tensor"):
            continue
        if not isinstance(x, torch.Tensor):
            return f"{name} is a {type(x).__name__}: expected a torch.Tensor"
        if name in _ROWS and x.ndim < 3:
            return f"{name} has shape {tuple(x.shape)}: expected (batch, seqlen, nheads, headdim), or packed rows"
        if x.ndim == 0:
            return f"{name} has shape (): a tensor without axes"
    return None


def check_array(first: torch.Tensor, name: str, x: Any, *shape: int | str) -> None:
    """Raises unless x is None or a tensor of this shape on the device of `first`. A string names an axis of any
    size."""
    if x is None:
        return
    if not isinstance(x, torch.Tensor):
        raise RuntimeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    if x.ndim != len(shape) or any(n != m and not isinstance(n, str) for n, m in zip(shape, x.shape, strict=True)):
        expected = f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))
        raise RuntimeError(f"{name} has shape {tuple(x.shape)}: expected ({expected})")
    if x.device != first.device:
        raise RuntimeError(f"{name} is on {x.device}: expected {first.device}")


def parts(name: str, x: torch.Tensor, count: int, *rows: str) -> tuple[torch.Tensor, ...]:
    """The tensors that are packed in x (*rows, count, nheads, headdim)."""
    check_array(x, name, x, *rows, count, "nheads", "headdim")
    return x.unbind(-3)


class _NoGradient(torch.autograd.Function):
    """Marks results of inputs that require a gradient: a backward pass through them raises."""

    @staticmethod
    def forward(ctx, why: str, count: int, *tensors: torch.Tensor):
        ctx.why = why
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_: Any):
        raise Refused(ctx.why)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, also those inside tuples, lists and dicts."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (tuple, list, dict)):
            yield from _tensors(x.values() if isinstance(x, dict) else x)


def without_gradient(why: str) -> Callable[[Callable[_Arguments, Any]], Callable[_Arguments, Any]]:
    """Lets a function without a gradient, whose result is a tensor or several, take tensors that require one. A
    backward pass through the results raises an error with the text `why`, instead of losing the gradient."""

    def decorate(function: Callable[_Arguments, Any]) -> Callable[_Arguments, Any]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Any:
            inputs = [x for x in _tensors((*args, *kwargs.values())) if x.requires_grad]
            if not inputs or not torch_modes.records():
                return function(*args, **kwargs)
            with torch.no_grad():
                results = function(*args, **kwargs)
            several = isinstance(results, tuple)
            results = results if several else (results,)
            marked = _NoGradient.apply(why, len(results), *results, *inputs)
            return marked if several else marked[0]

        return call

    return decorate


def window(window_size: Any) -> tuple[int, int]:
    """The window with -1 for an open end, for which flash_attn takes any negative number."""
    left, right = checks.window(window_size)
    return max(left, -1), max(right, -1)


def score_options(softmax_scale, causal, window_size, softcap, alibi_slopes=None) -> dict[str, Any]:
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window(window_size),
        "softcap": max(float(softcap), 0.0),
        "alibi_slopes": alibi_slopes,
    }


# Not in a graph of torch.compile, which would hold the numbers drawn while it was traced.
_drawn = torch.compiler.disable(_draw_dropout)


def draw_dropout(dropout_p: float, device: torch.device) -> dict[str, Any]:
    return _drawn(dropout_p, device) if dropout_p else {}


_COLUMNS = 256  # columns of a unit matrix in one call


def _probabilities(attend: Callable[..., torch.Tensor], key: torch.Tensor, longest: int) -> torch.Tensor:
    """P of a call, (..., nheads, longest), read from attention over values that are rows of the unit matrix. attend(v):
    makes the call with these values, one row for each key; key: the number of each key in its sequence."""
    columns = [
        attend((key[..., None, None] == torch.arange(first, min(first + _COLUMNS, longest), device=key.device)).float())
        for first in range(0, longest, _COLUMNS)
    ]
    return torch.cat(columns, -1)


@torch.no_grad()
def signed_probabilities(q, k, varlen: tuple | None, options: dict[str, Any]) -> torch.Tensor:
    """flash_attn's S_dmask: (batch, nheads, seqlen_q, seqlen_k), for packed sequences with the lengths of the longest
    ones. An element is exp(score - the row's greatest score), negative if dropout drops it. For tests: it needs the
    memory that FlashAttention avoids, and a call for every 256 keys.

    varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    drops = {name: options[name] for name in ("dropout_p", "dropout_seed", "dropout_offset")}
    scores = {name: value for name, value in options.items() if name not in drops}
    q32, k32, nheads_k = q.detach().float(), k.detach().float(), k.shape[-2]
    if varlen is None:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        key = torch.arange(seqlen_k, device=q.device).expand(batch, seqlen_k)
        p = _probabilities(
            lambda v: core.flash_attn_func(q32, k32, v.expand(-1, -1, nheads_k, -1), **scores), key, seqlen_k
        )
    else:
        cu_q, cu_k, seqlen_q, seqlen_k = varlen
        batch = cu_q.shape[0] - 1
        _, key = owners(cu_k, k.shape[0])
        packed = _probabilities(
            lambda v: core.flash_attn_varlen_func(q32, k32, v.expand(-1, nheads_k, -1), *varlen, **scores),
            key, seqlen_k,
        )  # fmt: skip
        p = packed.new_zeros(batch, seqlen_q, *packed.shape[1:])
        for b, (first, last) in enumerate(zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False)):
            p[b, : last - first] = packed[first:last]
    p = p / p.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    # Dropout does not depend on q and k. With all of them zero, an element that is kept is 1 / seqlen_k.
    zeros = q32.new_zeros(batch, max(seqlen_q, seqlen_k), q.shape[-2], 1)
    key = torch.arange(seqlen_k, device=q.device).expand(batch, seqlen_k)
    kept = _probabilities(
        lambda v: core.flash_attn_func(zeros[:, :seqlen_q], zeros[:, :seqlen_k, :1], v, **drops), key, seqlen_k
    )
    return torch.where(kept > 0, p, -p).transpose(1, 2).to(q.dtype)
