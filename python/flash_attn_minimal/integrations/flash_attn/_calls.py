"""Shared by the functions of both packages: options as the core takes them, errors, dropout's seed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from ... import _modes
from ... import attention as core
from ..._library import FlashAttnError, Unsupported

_Arguments, _Result = ParamSpec("_Arguments"), TypeVar("_Result")


class Refused(RuntimeError):
    """A call that the library does not serve. Its text is that of the library's own error, which is its cause."""


def refusing(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function raise RuntimeErrors, as flash_attn does, instead of the library's errors."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except FlashAttnError as error:
            if isinstance(error, RuntimeError):
                raise
            raise Refused(str(error)) from error

    return call


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
            if not inputs or not _modes.records():
                return function(*args, **kwargs)
            with torch.no_grad():
                results = function(*args, **kwargs)
            several = isinstance(results, tuple)
            results = results if several else (results,)
            marked = _NoGradient.apply(why, len(results), *results, *inputs)
            return marked if several else marked[0]

        return call

    return decorate


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


def window(window_size: Any) -> tuple[int, int]:
    """The window with -1 for an open end, for which flash_attn takes any negative number."""
    left, right = (max(edge, -1) for edge in window_size)
    return left, right


def score_options(softmax_scale, causal, window_size, softcap, alibi_slopes=None) -> dict[str, Any]:
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window(window_size),
        "softcap": max(float(softcap), 0.0),
        "alibi_slopes": alibi_slopes,
    }


def draw_dropout(dropout_p: float, device: torch.device) -> dict[str, Any]:
    """dropout_p with a seed and an offset from PyTorch's generator of the device, which advances. So torch.manual_seed
    decides which probabilities are dropped, and activation checkpointing drops the same ones again."""
    if not dropout_p:
        return {}
    seed, offset = _draw(device)
    return {"dropout_p": dropout_p, "dropout_seed": seed, "dropout_offset": offset}


@torch.compiler.disable  # a graph would hold the numbers drawn while it was traced
def _draw(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or _modes.mapped():  # PyTorch applies vmap's `randomness` when it draws
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")), 0
    check_replays_may_differ()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    seed, offset = generator.initial_seed() % 2**64, generator.get_offset()
    generator.set_offset(offset + 4)  # the generator requires multiples of 4
    return seed, offset


def check_replays_may_differ() -> None:
    """Raises if a seed of PyTorch's generators would go into a CUDA graph. A launch holds its seed as a number, so
    every replay would drop the same probabilities."""
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "dropout with a seed of PyTorch's generators, in a CUDA graph that is being captured: every replay would "
            "drop the same probabilities; leave this call out of the graph (torch.compile(mode='reduce-overhead') "
            "does), or pass dropout_seed to flash_attn_func, for the same ones every time"
        )


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
        rows = torch.arange(k.shape[0], device=q.device)
        key = rows - cu_k[torch.searchsorted(cu_k[1:].contiguous(), rows, right=True).clamp_max(batch - 1)]
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
