"""What is timed: our kernels by name, and the peers that PyTorch brings. Each is a launch(i) on input set i that
returns its output in our layout; who refuses a shape is left out with the reason."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import flash_attn_func, flash_attn_varlen_func, query
from .._library import BadArgument, Unsupported
from .machine import DTYPES, BenchError, first_line


@dataclass(frozen=True)
class Shape:
    """Self-attention of `batch` sequences of `seqlen`, or, packed, of sequences of `lengths` with `seqlen` the
    longest."""

    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    headdim: int
    causal: bool
    dtype: str
    lengths: tuple[int, ...] = ()
    mix: str = ""  # where the lengths are from

    @property
    def tokens(self) -> int:
        return sum(self.lengths) or self.batch * self.seqlen

    @property
    def flops(self) -> float:
        """Two products of 2 S^2 D each; a causal mask counts as half of them, at any S."""
        pairs = sum(n * n for n in self.lengths) or self.batch * self.seqlen**2
        return 4.0 * pairs * self.headdim * self.nheads * (0.5 if self.causal else 1.0)

    @property
    def bytes(self) -> int:
        """q, k, v read once and out written once."""
        return self.tokens * self.headdim * 2 * (self.nheads + self.nheads_k) * DTYPES[self.dtype]

    @property
    def starts(self) -> list[int]:
        """cu_seqlens."""
        starts = [0]
        for n in self.lengths:
            starts.append(starts[-1] + n)
        return starts

    def where(self, b: int, h: int) -> tuple:
        """The index of one head of one sequence in an array of this shape: array[where] is (seqlen, headdim)."""
        return (slice(self.starts[b], self.starts[b + 1]), h) if self.lengths else (b, slice(None), h)

    def size(self, heads: int) -> tuple[int, ...]:
        return (self.tokens, heads, self.headdim) if self.lengths else (self.batch, self.seqlen, heads, self.headdim)

    def keys(self) -> dict[str, Any]:
        """The shape's part of a benchmark row."""
        row = {
            "dtype": self.dtype,
            "headdim": self.headdim,
            "headdim_v": self.headdim,
            "causal": self.causal,
            "seqlen_q": self.seqlen,
            "seqlen_k": self.seqlen,
            "batch": self.batch,
            "nheads": self.nheads,
            "nheads_k": self.nheads_k,
        }
        return row | {"mix": self.mix, "tokens": self.tokens} if self.lengths else row

    def __str__(self) -> str:
        heads = f"{self.nheads}" if self.nheads == self.nheads_k else f"{self.nheads}/{self.nheads_k}"
        where = f"{self.mix}: {self.batch} sequences" if self.lengths else f"batch {self.batch}, seqlen {self.seqlen}"
        return f"headdim {self.headdim}, {'causal' if self.causal else 'full'}, {where}, heads {heads}"


class Inputs:
    """Enough sets of q, k, v, out that the level-2 cache does not carry from one launch to the next; at most
    MAX_SETS, so that inputs of a few kilobytes, which a real caller has just written, are found there."""

    MAX_SETS, L2_FACTOR = 64, 3

    def __init__(self, machine, shape: Shape, seed: int):
        count = (
            max(1, min(self.MAX_SETS, math.ceil(self.L2_FACTOR * machine.l2_bytes / shape.bytes)))
            if machine.l2_bytes
            else 1
        )
        q, kv = shape.size(shape.nheads), shape.size(shape.nheads_k)
        sizes = (q, kv, kv)
        self.sets = [
            (
                *(machine.random(size, shape.dtype, seed + 3 * i + j) for j, size in enumerate(sizes)),
                machine.nans(q, shape.dtype),
            )
            for i in range(count)
        ]
        self.cu_seqlens = machine.int32(shape.starts) if shape.lengths else None

    def __getitem__(self, i: int):
        return self.sets[i % len(self.sets)]

    def __len__(self) -> int:
        return len(self.sets)


@dataclass
class System:
    name: str  # "ours", "cudnn", ...
    kernel: str | None  # ours: which one
    launch: Callable[[int], Any]  # of input set i; returns out (batch, seqlen, nheads, headdim), or packed


class Refused(Exception):
    """A system does not serve a shape."""


def ours(shape: Shape, inputs: Inputs, kernel: str | None, threads: int) -> System:
    """flash_attn_func with the named kernel, or with the one that the library picks."""
    q, k, v, out = inputs[0]
    options: dict[str, Any] = {"causal": shape.causal, "kernel": kernel, "num_threads": threads}
    if shape.lengths:
        lengths = (inputs.cu_seqlens, inputs.cu_seqlens, shape.seqlen, shape.seqlen)

        def launch(i):
            q, k, v, out = inputs[i]
            return flash_attn_varlen_func(q, k, v, *lengths, out=out, **options)

    else:
        lengths = ()

        def launch(i):
            q, k, v, out = inputs[i]
            return flash_attn_func(q, k, v, out=out, **options)

    try:
        plan = query(q, k, v, *lengths, out=out, **options)
    except (BadArgument, Unsupported) as error:
        raise Refused(first_line(error)) from None
    if plan.status != "FA_OK":
        raise Refused(plan.error)
    return System("ours", plan.kernel, launch)


# ---- peers, all through PyTorch ----


def sdpa(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """scaled_dot_product_attention with one backend, or on the CPU with the one that PyTorch picks. It wants (batch,
    heads, seqlen, headdim), and gets that as views of the same memory."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if shape.lengths:
        raise Refused("scaled_dot_product_attention has no packed sequences")
    attention = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": shape.causal} | ({"enable_gqa": True} if shape.nheads != shape.nheads_k else {})
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}.get(name)

    def launch(i):
        q, k, v, _ = inputs[i]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if backend is None:
            return attention(q, k, v, **options).transpose(1, 2)
        with sdpa_kernel(backend):
            return attention(q, k, v, **options).transpose(1, 2)

    return System(name, None, launch)


def torch_varlen(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """FlashAttention-2 on packed sequences, as PyTorch carries it. Its way to say causal has changed between
    releases."""
    if not shape.lengths:
        return sdpa(name, torch, shape, inputs)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Refused(f"PyTorch {torch.__version__} has no torch.nn.attention.varlen") from None
    accepted = inspect.signature(varlen_attn).parameters
    if "window_size" in accepted:
        options = {"window_size": (-1, 0 if shape.causal else -1)}
    else:
        options = {"is_causal": shape.causal}
    if shape.nheads != shape.nheads_k and "enable_gqa" in accepted:
        options["enable_gqa"] = True

    def launch(i):
        q, k, v, _ = inputs[i]
        return varlen_attn(q, k, v, inputs.cu_seqlens, inputs.cu_seqlens, shape.seqlen, shape.seqlen, **options)

    return System(name, None, launch)


def torch_loop(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """On the CPU: PyTorch's own choice, one call for each sequence when they are packed."""
    if not shape.lengths:
        return sdpa(name, torch, shape, inputs)
    starts = shape.starts
    gqa = {"enable_gqa": True} if shape.nheads != shape.nheads_k else {}

    def launch(i):
        q, k, v, out = inputs[i]
        for a, b in zip(starts, starts[1:], strict=False):
            one = [x[None, a:b].transpose(1, 2) for x in (q, k, v)]
            result = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=shape.causal, **gqa)
            out[a:b] = result[0].transpose(0, 1)
        return out

    return System(name, None, launch)


def standard(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """The three steps with S in memory: a product, a float32 softmax, a product."""
    if shape.lengths:
        raise Refused("standard attention has no packed sequences")
    scores = shape.batch * shape.nheads * shape.seqlen**2
    needed = scores * (2 * DTYPES[shape.dtype] + 8)  # S and P, and both in float32 on the way
    q = inputs[0][0]
    room = torch.cuda.mem_get_info()[0] if q.is_cuda else 8 << 30
    if needed > 0.7 * room:
        raise Refused(f"S takes {needed / 2**30:.0f} GiB")
    group = shape.nheads // shape.nheads_k
    scale = shape.headdim**-0.5
    hidden = torch.ones(shape.seqlen, shape.seqlen, dtype=torch.bool, device=q.device).triu(1) if shape.causal else None

    def launch(i):
        q, k, v, _ = inputs[i]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = q @ k.transpose(2, 3) * scale
        if hidden is not None:
            s = s.masked_fill_(hidden, -math.inf)
        p = torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
        return (p @ v).transpose(1, 2)

    return System(name, None, launch)


PEERS = {
    "cuda": {"cudnn": sdpa, "fa2": torch_varlen, "standard": standard},
    "cpu": {"torch": torch_loop, "standard": standard},
}
LABELS = {
    "ours": "flash-attn-minimal",
    "cudnn": "cuDNN (PyTorch)",
    "fa2": "FlashAttention-2 (PyTorch)",
    "torch": "PyTorch SDPA",
    "standard": "standard (PyTorch, S in memory)",
}


def peer(name: str, machine, shape: Shape, inputs: Inputs) -> System:
    """A peer, tried once on this shape."""
    torch = machine.torch
    with warnings.catch_warnings(record=True) as said:  # PyTorch explains a refusal in warnings
        warnings.simplefilter("always")
        try:
            system = PEERS[machine.device][name](name, torch, shape, inputs)
            system.launch(0)
            machine.synchronize()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            texts = [str(w.message).partition(" (Triggered")[0].strip() for w in said]
            texts = [text for text in texts if "not used because" not in text and "disabled" not in text]
            machine.release()
            raise Refused(first_line(" ".join(dict.fromkeys(texts)) or error)) from None
    return system


def peers_of(machine, asked: str | None) -> list[str]:
    """The names behind --peers: `none`, `all` (the default) or a list."""
    known = list(PEERS[machine.device])
    if asked == "none" or (asked in (None, "all") and machine.framework != "torch"):
        return []
    if asked == "all":
        return known
    if asked is None:  # on the CPU the naive rung of the ladder already plays standard attention
        return [name for name in known if not (machine.device == "cpu" and name == "standard")]
    names = asked.split(",")
    for name in names:
        if name not in known:
            raise BenchError(f"--peers {asked}: {name!r} is none of {', '.join(known)} on this device")
    if machine.framework != "torch":
        raise BenchError(f"--peers {asked}: the peers need PyTorch arrays, but these are of {machine.framework}")
    return names
