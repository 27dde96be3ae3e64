"""Other projects as rungs. They are measured beside this library, and not tested here.

A peer that wants another layout gets views of the same memory. A call is timed as a user of the peer would make it,
including the copies it needs, such as keys repeated for each query head or arrays passed between frameworks. lse is
None if the peer does not return it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import OrderedDict
from typing import Any

from .rung import Calls, Rung, Unavailable

SIXTEEN = ("float16", "bfloat16")
ALL = ("float32", *SIXTEEN)


def _torch(device: str):
    try:
        import torch
    except ImportError:
        raise Unavailable("torch is not installed") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("no GPU")
    return torch


def _top_left(shape) -> str | None:
    """The reason why a peer that aligns its causal mask at the first row cannot serve this shape, or None."""
    if shape.causal and shape.seqlen_q != shape.seqlen_k:
        return "its causal mask is top-left aligned, which differs where seqlen_q is not seqlen_k"
    return None


class Graphs:
    """Runs only the backward pass of a function that PyTorch's autograd differentiates. The first call with given
    inputs runs the forward pass and keeps its graph; later calls reuse the graph. Callers do not write to the inputs
    between the calls. Graphs of one shape, dtype and mask are kept; a call with others drops them."""

    MOST = 64  # graphs that are kept; the oldest is dropped first

    def __init__(self, torch, attention):
        self.torch, self.attention = torch, attention
        self.kind: tuple | None = None
        self.kept: OrderedDict[tuple, tuple] = OrderedDict()

    def forward(self, q, k, v, causal):
        self.keep_only(q, k, causal)
        with self.torch.no_grad():
            return self.attention(q, k, v, causal)

    def backward(self, dout, q, k, v, out, lse, causal):
        self.keep_only(q, k, causal)
        given = (q, k, v)
        key = tuple(x.data_ptr() for x in given)
        if key not in self.kept:
            if len(self.kept) == self.MOST:
                self.kept.popitem(last=False)
            leaves = [x.detach().requires_grad_() for x in given]
            with self.torch.enable_grad():
                # The inputs are kept as well, so that no other array can have their addresses.
                self.kept[key] = self.attention(*leaves, causal)[0], leaves, given
        graph, leaves, _ = self.kept[key]
        return self.torch.autograd.grad(graph, leaves, dout, retain_graph=True)

    def keep_only(self, q, k, causal) -> None:
        kind = (q.shape, k.shape, q.dtype, causal)
        if kind != self.kind:
            self.kept.clear()
            self.kind = kind

    def calls(self) -> Calls:
        return Calls(self.forward, self.backward)


# ---- PyTorch ----


def _sdpa(backend: str, q, k, v, causal: bool):
    """scaled_dot_product_attention, which returns no lse. The memory-efficient kernel has no grouped heads, so k and v
    are repeated for it."""
    import torch

    from flash_attn_lab.bench.systems import only

    group = q.shape[2] // k.shape[2]
    if group > 1 and backend == "efficient":
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    arrays = (x.transpose(1, 2) for x in (q, k, v))
    options = {"enable_gqa": True} if group > 1 and backend != "efficient" else {}
    with only(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=causal, **options)
    return out.transpose(1, 2), None


def _load_sdpa(backend: str) -> Calls:
    return Graphs(_torch("cuda"), functools.partial(_sdpa, backend)).calls()


def _load_cpu() -> Calls:
    torch = _torch("cpu")
    graphs = Graphs(torch, functools.partial(_sdpa, "torch"))

    def given(x):
        """x as a tensor. bfloat16 is passed as its bits, because PyTorch does not know NumPy's extension types."""
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view("uint16")).view(torch.bfloat16)
        return torch.from_numpy(x)

    def back(x, like):
        x = x.contiguous()
        return x.view(torch.uint16).numpy().view(like.dtype) if x.dtype == torch.bfloat16 else x.numpy()

    def forward(q, k, v, causal):
        out, lse = graphs.forward(given(q), given(k), given(v), causal)
        return back(out, q), lse

    def backward(dout, q, k, v, out, lse, causal):
        found = graphs.backward(given(dout), given(q), given(k), given(v), None, None, causal)
        return tuple(back(x, q) for x in found)

    return Calls(forward, backward)


def _load_flex() -> Calls:
    """FlexAttention: a kernel that PyTorch's compiler generates for a mask, in Triton."""
    torch = _torch("cuda")
    try:
        import triton  # noqa: F401
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError as error:
        raise Unavailable(f"FlexAttention: {error}") from None
    # Each shape gets its own kernel. Beyond this limit the compiler would silently fall back to S in memory.
    for limit in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 1000)
    compiled = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def mask(seqlen_q: int, seqlen_k: int):
        shift = seqlen_k - seqlen_q
        return create_block_mask(lambda b, h, row, key: row + shift >= key, None, None, seqlen_q, seqlen_k)

    def attention(q, k, v, causal):
        arrays = (x.transpose(1, 2) for x in (q, k, v))
        block_mask = mask(q.shape[1], k.shape[1]) if causal else None
        grouped = q.shape[2] != k.shape[2]
        out, lse = compiled(*arrays, block_mask=block_mask, enable_gqa=grouped, return_lse=True)
        return out.transpose(1, 2), lse

    return Graphs(torch, attention).calls()


# ---- FlashAttention's own packages ----


def _load_flash_attention(module: str, package: str, **options: Any) -> Calls:
    """flash_attn_func of one of the packages. `options` ask for lse, which not every release then returns."""
    torch = _torch("cuda")
    try:
        function = importlib.import_module(module).flash_attn_func
    except Exception as error:  # the import also fails without a driver, or without the package's compiler
        raise Unavailable(f"{package}: {type(error).__name__}: {error}") from None

    def attention(q, k, v, causal):
        found = function(q, k, v, causal=causal, **options)
        return (found[0], found[1]) if isinstance(found, tuple) else (found, None)

    return Graphs(torch, attention).calls()


# ---- JAX ----

PALLAS_TILES = (
    (64, 256),
    (64, 128),
    (64, 64),
)  # rows of a warpgroup and keys of a tile, as in the project's own example


def _pallas_refusal(shape) -> str | None:
    if shape.seqlen_q % 128 or shape.seqlen_k % 64:
        return "seqlen_q is a multiple of 128 and seqlen_k of 64 there"
    return _top_left(shape)


def _load_pallas() -> Calls:
    """The example of attention on Hopper in JAX's Pallas, with Mosaic GPU. It has no scale, so q is scaled first."""
    torch = _torch("cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        raise Unavailable("the example is for Hopper")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX takes most of the memory
    try:
        import jax
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except Exception as error:  # an example may use anything inside JAX
        raise Unavailable(f"JAX's Pallas with Mosaic GPU: {type(error).__name__}: {error}") from None
    if not [device for device in jax.devices() if device.platform == "gpu"]:
        raise Unavailable("JAX sees no GPU")
    from flash_attn_lab.bench.machine import first_line

    @functools.partial(jax.jit, static_argnums=3)
    def attention(q, k, v, config):
        scaled = (q.astype("float32") * q.shape[-1] ** -0.5).astype(q.dtype)
        out, (lse,) = attention_mgpu.attention(scaled, k, v, config, save_residuals=True)
        return out, lse * 0.6931471805599453  # from base 2

    def seconds(arrays, config) -> float:
        from time import perf_counter

        jax.block_until_ready(attention(*arrays, config))
        began = perf_counter()
        for _ in range(10):
            found = attention(*arrays, config)
        jax.block_until_ready(found)
        return perf_counter() - began

    fastest: dict[tuple, Any] = {}

    def forward(q, k, v, causal):
        arrays = [jax.dlpack.from_dlpack(x) for x in (q, k, v)]
        key = (causal, q.dtype, q.shape, k.shape)
        if key not in fastest:
            times, said = {}, ""
            for rows, keys in PALLAS_TILES:
                try:
                    config = attention_mgpu.TuningConfig(rows, keys, max_concurrent_steps=2, causal=causal)
                    times[config] = seconds(arrays, config)
                except Exception as error:  # usually: more shared memory than the GPU has
                    said = first_line(error)
            if not times:
                raise RuntimeError(f"no tile serves q {tuple(q.shape)}, k {tuple(k.shape)}: {said}")
            fastest[key] = min(times, key=times.get)
        return tuple(torch.from_dlpack(x) for x in attention(*arrays, fastest[key]))

    return Calls(forward)


# ---- the list ----


def _peer(name, language, about, load, device="cuda", dtypes=SIXTEEN, **more) -> Rung:
    return Rung(
        name=name, language=language, about=about, device=device, files=(), load=load, dtypes=dtypes, peer=True, **more
    )


def _torch_peer(backend, about, dtypes=SIXTEEN, headdims=(32, 64, 128, 256), language="CUDA C++") -> Rung:
    load = functools.partial(_load_sdpa, backend)
    more = {"dtypes": dtypes, "headdims": headdims, "refusal": _top_left}
    return _peer(f"torch_{backend}", language, about, load, **more)


FA2 = functools.partial(_load_flash_attention, "flash_attn.flash_attn_interface", "flash-attn", return_attn_probs=True)
FA3 = functools.partial(_load_flash_attention, "flash_attn_interface", "FlashAttention-3")
FA4 = functools.partial(_load_flash_attention, "flash_attn.cute", "flash-attn-4", return_lse=True)
RUNGS = (
    _peer("torch_cpu", "C++", "PyTorch's choice on the CPU", _load_cpu, "cpu", ALL, headdims=(32, 64, 128, 256),
          refusal=_top_left),
    _torch_peer("math", "PyTorch, S in memory", ALL, language="PyTorch"),
    _torch_peer("efficient", "PyTorch, the memory-efficient kernel of xFormers", ALL),
    _torch_peer("fa2", "PyTorch, FlashAttention-2"),
    _torch_peer("cudnn", "PyTorch, NVIDIA's cuDNN", headdims=(64, 128)),
    _peer("flex_attention", "PyTorch", "a Triton kernel that PyTorch's compiler generates for a mask", _load_flex,
          dtypes=ALL),
    _peer("pallas_mgpu", "Pallas", "JAX's example for Hopper, which knows float16; with the exchange of arrays",
          _load_pallas, dtypes=("float16",), refusal=_pallas_refusal),
    _peer("flash_attention_2", "CUDA C++", "FlashAttention-2, its own package", FA2, headdims=(32, 64, 128, 256)),
    _peer("flash_attention_3", "CUDA C++", "FlashAttention-3, its own package", FA3, headdims=(64, 128, 256)),
    _peer("flash_attention_4", "CuTe DSL", "FlashAttention-4, its own package", FA4),
)  # fmt: skip
