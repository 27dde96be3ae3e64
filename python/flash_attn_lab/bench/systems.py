"""The systems that are timed: our kernels by name, and the peers that come with PyTorch. Each has a launch(i) that runs
on input set i and returns the output in our layout. A system that refuses a shape is left out, with the reason."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flash_attn_minimal import backward, backward_query, flash_attn_func, flash_attn_varlen_func, quantize_fp8, query
from flash_attn_minimal.errors import BadArgument, Unsupported

from .machine import DTYPES, BenchError, first_line


@dataclass(frozen=True)
class Shape:
    """Self-attention of `batch` sequences of `seqlen` tokens, or of packed sequences with `lengths`; `seqlen` is then
    the longest. `seqlen_k` is 0 if there are as many keys as queries, `headdim_v` 0 if values are as wide as keys."""

    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    headdim: int
    causal: bool
    dtype: str
    lengths: tuple[int, ...] = ()
    mix: str = ""  # the name of the distribution of the lengths
    backward: bool = False
    allow_tf32: bool = False
    seqlen_k: int = 0  # only for sequences that are not packed
    headdim_v: int = 0

    @property
    def given(self) -> Shape:
        """The shape of the inputs as they are made, which are bfloat16 for fp8. This library gets them quantised, and
        the peers as they are."""
        return replace(self, dtype="bfloat16") if self.dtype == "float8_e4m3fn" else self

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions in which a system may compute."""
        return (self.dtype, "tf32") if self.allow_tf32 else (self.dtype,)

    @property
    def tokens(self) -> int:
        return sum(self.lengths) or self.batch * self.seqlen

    @property
    def keys_each(self) -> int:
        """Keys of a sequence."""
        return self.seqlen_k or self.seqlen

    @property
    def dim_v(self) -> int:
        return self.headdim_v or self.headdim

    @property
    def flops(self) -> float:
        """FLOP of two products over all pairs of a query and a key; five in the backward pass, three of them as wide as
        the keys. A causal mask takes away half of a square of seqlen x seqlen, however many keys there are."""
        squares = sum(n * n for n in self.lengths) or self.batch * self.seqlen**2
        pairs = squares if self.lengths else self.batch * self.seqlen * self.keys_each
        width = 3 * self.headdim + 2 * self.dim_v if self.backward else self.headdim + self.dim_v
        return 2.0 * width * self.nheads * (pairs - (0.5 * squares if self.causal else 0.0))

    @property
    def bytes(self) -> int:
        """q, k, v read once and out written once; backward: q, k, v, out, dout read and dq, dk, dv written."""
        one, written = DTYPES[self.dtype], DTYPES[self.given.dtype]
        q, k, v, out = map(math.prod, self.sizes)
        if self.backward:
            return 2 * (q + k + v + out) * one
        return (q + k + v) * one + out * written

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

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of q, k, v and out."""
        queries = (self.tokens,) if self.lengths else (self.batch, self.seqlen)
        keys = queries if self.lengths else (self.batch, self.keys_each)
        return (
            (*queries, self.nheads, self.headdim),
            (*keys, self.nheads_k, self.headdim),
            (*keys, self.nheads_k, self.dim_v),
            (*queries, self.nheads, self.dim_v),
        )

    def keys(self) -> dict[str, Any]:
        """The shape's part of a benchmark row."""
        row = {
            "dtype": self.dtype,
            "headdim": self.headdim,
            "headdim_v": self.dim_v,
            "causal": self.causal,
            "seqlen_q": self.seqlen,
            "seqlen_k": self.keys_each,
            "batch": self.batch,
            "nheads": self.nheads,
            "nheads_k": self.nheads_k,
        }
        return row | {"mix": self.mix, "tokens": self.tokens} if self.lengths else row

    def __str__(self) -> str:
        heads = f"{self.nheads}" if self.nheads == self.nheads_k else f"{self.nheads}/{self.nheads_k}"
        length = f"{self.seqlen} queries, {self.seqlen_k} keys" if self.seqlen_k else f"seqlen {self.seqlen}"
        where = f"{self.mix}: {self.batch} sequences" if self.lengths else f"batch {self.batch}, {length}"
        dims = f"{self.headdim}/{self.headdim_v}" if self.headdim_v else f"{self.headdim}"
        return f"headdim {dims}, {'causal' if self.causal else 'full'}, {where}, heads {heads}"


class Inputs:
    """Enough sets of q, k, v, out that a launch finds nothing of its set in the level-2 cache, but at most MAX_SETS.
    Inputs of a few kilobytes therefore stay in the cache, as they do for a caller that has just written them. For a
    backward shape, out is the forward result, and gradients[i] are dout, lse and the arrays for dq, dk, dv."""

    MAX_SETS, L2_FACTOR = 64, 3

    def __init__(self, machine, shape: Shape, seed: int):
        count = (
            max(1, min(self.MAX_SETS, math.ceil(self.L2_FACTOR * machine.l2_bytes / shape.bytes)))
            if machine.l2_bytes
            else 1
        )
        *sizes, out_size = shape.sizes
        self.sets = [
            (
                *(machine.random(size, shape.dtype, seed + 3 * i + j) for j, size in enumerate(sizes)),
                machine.nans(out_size, shape.dtype),
            )
            for i in range(count)
        ]
        self.options: list[dict[str, Any]] = [{}] * count  # options of our calls, by set
        self.cu_seqlens = machine.int32(shape.starts) if shape.lengths else None
        self.gradients: list[tuple] = []
        for i, (q, k, v, out) in enumerate(self.sets if shape.backward else ()):
            _, lse = flash_attn_func(q, k, v, causal=shape.causal, out=out, return_lse=True)
            dout = machine.random(out_size, shape.dtype, seed + 3 * count + i)
            places = (machine.nans(size, shape.dtype) for size in sizes)
            self.gradients.append((dout, lse, *places))

    def __getitem__(self, i: int):
        return self.sets[i % len(self.sets)]

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def results(self) -> tuple:
        """The arrays into which this library writes the answer of set 0."""
        return self.gradients[0][2:] if self.gradients else self.sets[0][3:]

    def quantised(self, machine, shape: Shape) -> tuple[Inputs, list]:
        """These inputs in float8_e4m3fn with descale factors; and q, k, v of set 0 as float32, with the factors
        applied."""
        mine, stand_for = copy.copy(self), []
        mine.sets, mine.options = [], []
        for *given, out in self.sets:
            pairs = [quantize_fp8(x) for x in given]
            mine.sets.append((*(x for x, _ in pairs), out))
            names = ("q_descale", "k_descale", "v_descale")
            mine.options.append({name: factor for name, (_, factor) in zip(names, pairs, strict=True)})
            if not stand_for:
                spread = (..., None) if shape.lengths else (slice(None), None, slice(None), None)
                stand_for = [machine.cast(x, "float32") * factor[spread] for x, factor in pairs]
        return mine, stand_for


MODES = ("deterministic", "fast_accum")  # options; a suite may also time this library with one of them, in another row


@dataclass
class System:
    name: str  # "ours", "cudnn", ...
    kernel: str | None  # the name of our kernel; None for a peer
    launch: Callable[[int], Any]  # runs on input set i; returns the output in our layout, or the gradients
    tf32: bool = False  # whether products may round float32 to tf32


class Refused(Exception):
    """A system does not serve a shape."""


def ours(shape: Shape, inputs: Inputs, kernel: str | None, threads: int, **more: bool) -> System:
    """flash_attn_func, flash_attn_varlen_func or backward with the named kernel (None: the library's choice). `more`:
    one of MODES, in addition to the options of the shape."""
    options: dict[str, Any] = {"causal": shape.causal, "kernel": kernel, "num_threads": threads, **more}
    if shape.allow_tf32:
        options["allow_tf32"] = True
    lengths = (inputs.cu_seqlens, inputs.cu_seqlens, shape.seqlen, shape.seqlen) if shape.lengths else ()
    attention = flash_attn_varlen_func if shape.lengths else flash_attn_func

    def forward(i):
        q, k, v, out = inputs[i]
        return attention(q, k, v, *lengths, out=out, **options, **inputs.options[i % len(inputs)])

    def gradients(i):
        q, k, v, out = inputs[i]
        dout, lse, dq, dk, dv = inputs.gradients[i % len(inputs)]
        return backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)

    try:
        q, k, v, _ = inputs[0]
        plan = (backward_query if shape.backward else query)(q, k, v, *lengths, **options, **inputs.options[0])
    except (BadArgument, Unsupported) as error:
        raise Refused(first_line(error)) from None
    if plan.status != "FA_OK":
        raise Refused(plan.error)
    return System("ours", plan.kernel, gradients if shape.backward else forward, tf32="tf32" in plan.kernel)


# ---- peers, all through PyTorch ----


def only(name: str):
    """A context with only this backend of scaled_dot_product_attention; for any other name, PyTorch chooses."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": "CUDNN_ATTENTION",
        "fa2": "FLASH_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "math": "MATH",
    }
    return sdpa_kernel(getattr(SDPBackend, backends[name])) if name in backends else contextlib.nullcontext()


def sdpa(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """scaled_dot_product_attention with one backend, or on the CPU with the one that PyTorch chooses. It takes (batch,
    heads, seqlen, headdim), and gets views of the same memory."""
    if shape.lengths:
        raise Refused("scaled_dot_product_attention has no packed sequences")
    options: dict[str, Any] = {"is_causal": shape.causal}
    if shape.causal and shape.keys_each != shape.seqlen:  # is_causal is top-left aligned
        if name == "cudnn":
            raise Refused("its causal mask is top-left; bottom-right it takes as an array only")
        from torch.nn.attention.bias import causal_lower_right

        options = {"attn_mask": causal_lower_right(shape.seqlen, shape.keys_each)}
    one_for_all = name == "efficient" and shape.nheads_k == 1 and not shape.backward
    if shape.nheads != shape.nheads_k and not one_for_all:
        options["enable_gqa"] = True

    def forward(q, k, v):
        if one_for_all:  # this backend has no grouped heads, but accepts a view that repeats the single head
            k, v = (x.expand(-1, shape.nheads, -1, -1) for x in (k, v))
        with only(name):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    if shape.backward:
        leaves = [[x.transpose(1, 2).detach().requires_grad_() for x in arrays[:3]] for arrays in inputs.sets]
        outs = [forward(*arrays) for arrays in leaves]
        launch = backward_of(torch, outs, leaves, [grads[0].transpose(1, 2) for grads in inputs.gradients])
        return System(name, None, lambda i: tuple(x.transpose(1, 2) for x in launch(i)))

    def launch(i):
        q, k, v, _ = inputs[i]
        return forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return System(name, None, launch, tf32=name == "efficient" and shape.allow_tf32)


def backward_of(torch, outs, leaves, douts):
    """A launch of only the backward pass, through the graph that each output keeps."""

    def launch(i):
        i %= len(outs)
        return torch.autograd.grad(outs[i], leaves[i], douts[i], retain_graph=True)

    return launch


def torch_varlen(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """FlashAttention-2 on packed sequences, as it comes with PyTorch."""
    if not shape.lengths:
        return sdpa(name, torch, shape, inputs)
    varlen_attn, options = varlen_options(torch, shape.causal, shape.nheads != shape.nheads_k)

    def launch(i):
        q, k, v, _ = inputs[i]
        return varlen_attn(q, k, v, inputs.cu_seqlens, inputs.cu_seqlens, shape.seqlen, shape.seqlen, **options)

    return System(name, None, launch)


def varlen_options(torch, causal: bool, grouped: bool) -> tuple[Callable, dict[str, Any]]:
    """PyTorch's varlen_attn and its options. The argument for causal differs between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Refused(f"PyTorch {torch.__version__} has no torch.nn.attention.varlen") from None
    accepted = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
    if "window_size" not in accepted:
        options = {"is_causal": causal}
    if grouped and "enable_gqa" in accepted:
        options["enable_gqa"] = True
    return varlen_attn, options


def torch_loop(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """PyTorch's default attention on the CPU. Packed sequences take one call each."""
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


PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


def fa_function(name: str, function: str) -> Callable:
    """A function of FlashAttention-3's or -4's own Python package."""
    try:
        return getattr(importlib.import_module(PACKAGES[name]), function)
    except ImportError:
        raise Refused(f"{PACKAGES[name]} is not installed") from None
    except AttributeError:
        raise Refused(f"{PACKAGES[name]} has no {function}") from None


def flash_attention(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """FlashAttention-3 or -4 through its own Python package. FlashAttention-4 compiles a kernel at its first call."""
    attention = fa_function(name, "flash_attn_func")
    if shape.lengths:
        raise Refused(f"{PACKAGES[name]} is not timed with packed sequences")

    def forward(i, *arrays):
        out = attention(*arrays, causal=shape.causal, **inputs.options[i % len(inputs)])
        return out[0] if isinstance(out, tuple) else out

    if shape.backward:
        leaves = [[x.detach().requires_grad_() for x in arrays[:3]] for arrays in inputs.sets]
        outs = [forward(i, *arrays) for i, arrays in enumerate(leaves)]
        return System(name, None, backward_of(torch, outs, leaves, [grads[0] for grads in inputs.gradients]))
    return System(name, None, lambda i: forward(i, *inputs[i][:3]))


def standard(name: str, torch, shape: Shape, inputs: Inputs) -> System:
    """The three steps with S in memory: a product, a float32 softmax, a product."""
    tf32 = name == "standard_tf32"
    if shape.lengths or shape.backward:
        raise Refused(
            f"standard attention is not timed with {'a backward pass' if shape.backward else 'packed sequences'}"
        )
    if tf32 and not shape.allow_tf32:
        raise Refused("only with --dtype fp32 --allow-tf32")
    scores = shape.batch * shape.nheads * shape.seqlen * shape.keys_each
    needed = scores * (2 * DTYPES[shape.dtype] + 8)  # S and P, each of them in float32 for a while
    q = inputs[0][0]
    room = torch.cuda.mem_get_info()[0] if q.is_cuda else 8 << 30
    if needed > 0.7 * room:
        raise Refused(f"S takes {needed / 2**30:.0f} GiB")
    group = shape.nheads // shape.nheads_k
    scale = shape.headdim**-0.5
    hidden = None
    if shape.causal:
        everything = torch.ones(shape.seqlen, shape.keys_each, dtype=torch.bool, device=q.device)
        hidden = everything.triu(1 + shape.keys_each - shape.seqlen)

    def launch(i):
        q, k, v, _ = inputs[i]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        with allowing_tf32(torch, tf32):
            s = q @ k.transpose(2, 3) * scale
            if hidden is not None:
                s = s.masked_fill_(hidden, -math.inf)
            p = torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
            return (p @ v).transpose(1, 2)

    return System(name, None, launch, tf32)


@contextlib.contextmanager
def allowing_tf32(torch, allow: bool):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


PEERS = {
    "cuda": {
        "cudnn": sdpa,
        "fa2": torch_varlen,
        "fa3": flash_attention,
        "fa4": flash_attention,
        "efficient": sdpa,
        "standard": standard,
        "standard_tf32": standard,
    },
    "cpu": {"torch": torch_loop, "standard": standard},
}
# On the CPU the library's kernel cpu_naive takes the place of standard attention.
USUAL_PEERS = {"cuda": "cudnn,fa2,fa3,fa4,standard", "cpu": "torch"}
LABELS = {
    "ours": "flash-attn-minimal",
    "activated": "PyTorch SDPA, flash-attn-minimal as its flash backend",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN (PyTorch)",
    "fa2": "FlashAttention-2 (PyTorch)",
    "efficient": "memory-efficient attention (PyTorch)",
    "torch": "PyTorch SDPA",
    "flex": "FlexAttention (PyTorch, compiled)",
    "cudnn_flex": "flex_attention of cuDNN's frontend",
    "read": "a read alone",
    "cublas": "cuBLAS",
    "blas": "BLAS",
    "standard": "standard (PyTorch, S in memory)",
    "standard_tf32": "standard in tf32 (PyTorch, S in memory)",
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


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # the parent package is missing, or cannot be imported
        return False


def peers_of(machine, asked: str | None, usual: str | None = None, known: list[str] | None = None) -> list[str]:
    """The names that --peers stands for: `none`, `all` or a list of the known ones, which are this module's unless the
    suite has its own. The default is the usual peers of the suite or of the device, with FlashAttention-3 and -4 only
    if they are installed."""
    known = known or list(PEERS[machine.device])
    if asked == "none" or (asked in (None, "all") and machine.framework != "torch"):
        return []
    if asked == "all":
        return known
    if asked is None:
        known = [name for name in known if name not in PACKAGES or installed(PACKAGES[name])]
        return [name for name in (usual or USUAL_PEERS[machine.device]).split(",") if name in known]
    names = asked.split(",")
    for name in names:
        if name not in known:
            raise BenchError(f"--peers {asked}: {name!r} is not one of {', '.join(known)} on this device")
    if machine.framework != "torch":
        raise BenchError(f"--peers {asked}: the peers need PyTorch arrays, but these are of {machine.framework}")
    return names
