"""Attention with dropout whose seed comes from PyTorch's generators.

A plain call draws a seed and passes it to the core. In a graph the draw has to be one of the graph's operations, or
every run would drop the same probabilities. There the operator attention_seeded takes the arguments of attention, and
the seed as a tensor. It also serves vmap, which draws a seed for each entry, or one for all."""

from __future__ import annotations

from typing import Any

import torch

from .._arrays import torch_modes
from .._core.options import Options
from ..attention import flash_attn_func, flash_attn_varlen_func
from ..errors import Unsupported
from . import autograd
from ._operators import ARRAYS, NUMBERS, OPTION_ARRAYS, OUTSIDE_CUDA_GRAPHS, Operators, Transformed, packed

_SEED = len(ARRAYS) + 2 + list(NUMBERS).index("dropout_seed")  # its position among the operator's arguments


def draw_dropout(dropout_p: float, device: torch.device) -> dict[str, Any]:
    """dropout_p with a seed and an offset from PyTorch's generator of the device, which advances. So torch.manual_seed
    decides which probabilities are dropped, and activation checkpointing drops the same ones again."""
    if not dropout_p:
        return {}
    seed, offset = _draw(device)
    return {"dropout_p": dropout_p, "dropout_seed": seed, "dropout_offset": offset}


def _draw(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch_modes.mapped():  # PyTorch applies vmap's `randomness` when it draws
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


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: tuple | None = None, dropout_p: float = 0.0,
    return_lse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """flash_attn_func, or with varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    flash_attn_varlen_func. If dropout_p is not 0, the seed comes from PyTorch's generators."""
    transformed = dropout_p and _transforms()
    if not dropout_p or torch_modes.watcher() is None or (transformed and not torch_modes.mapped()):
        if dropout_p:
            options |= draw_dropout(dropout_p, q.device)
        if varlen is None:
            return flash_attn_func(q, k, v, return_lse=return_lse, **options)
        return flash_attn_varlen_func(q, k, v, *varlen, return_lse=return_lse, **options)
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    given = Options(dropout_p=dropout_p, **options)
    cu_q, cu_k, max_q, max_k = varlen or (None, None, 0, 0)
    run = _transformed.forward if transformed else _operators.forward
    out, lse = run(
        seed, q, k, v, *[getattr(given, name) for name in OPTION_ARRAYS], cu_q, cu_k, max_q, max_k,
        *packed(given),
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _transforms() -> bool:
    return torch_modes.transforms() and not torch.compiler.is_compiling()


def _drawn(seed: torch.Tensor, arguments: tuple) -> tuple:
    if arguments[0].is_cuda:
        check_replays_may_differ()
    return (*arguments[:_SEED], int(seed), *arguments[_SEED + 1 :])


def _forward(seed, *arguments):
    return autograd.forward(*_drawn(seed, arguments))


def _backward(seed, dout, dlse, out, lse, want_dbias, want_dsinks, *arguments):
    return autograd.backward(dout, dlse, out, lse, want_dbias, want_dsinks, *_drawn(seed, arguments))


# A CUDA graph would hold the seed drawn at its capture, so every replay would drop the same probabilities.
_operators = Operators(
    "attention_seeded", autograd.LONGEST, _forward, _backward, lambda seed, *arguments: autograd.fake(*arguments),
    first=("seed",), tags=OUTSIDE_CUDA_GRAPHS,
    choose=lambda *_: _transformed.backward if _transforms() else _operators.backward,
)  # fmt: skip
_transformed = Transformed(_operators)  # dropout depends on the place of an entry in the batch
