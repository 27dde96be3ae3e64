"""The experiments library from Python: experiments.h through ctypes, with PyTorch tensors on a GPU.

`python -m flash_attn_lab experiment` reads the same library and table (flash_attn_lab.experiments).
"""

from __future__ import annotations

import ctypes as ct
import functools

import numpy as np

from flash_attn_lab.experiments import _variants
from flash_attn_lab.experiments._variants import Variant
from flash_attn_minimal._core import structs

EXPERIMENTS = ("block-size", "traffic", "optimisation", "online-softmax", "trace")
# fa_trace of experiments.h.
TRACE_OFFSET, TRACE_BLOCKS, TRACE_ROLES, TRACE_STAMPS = 256, 4, 4, 4096
TRACE_EVENTS = (
    *("wait_item", "wait_keys", "wait_values", "copied", "wait_turn", "scores"),
    *("product", "wait_scores", "softmax", "wait_product", "rescale", "epilogue"),
)
STAMP = np.dtype([("clock", "<u8"), ("tile", "<i4"), ("item", "<u2"), ("event", "<u2")])
ROLE = np.dtype([("count", "<u4"), ("multiprocessor", "<u4"), ("stamps", STAMP, TRACE_STAMPS)])
SOFTMAX_ROW = np.dtype([("tiles", "<u4"), ("moved", "<u4"), ("rescales", "<u4"), ("rise", "<f4")])


@functools.cache
def load() -> ct.CDLL:
    """The library, whose functions raise exceptions. LibraryNotFound says how to build it."""
    return _variants.open_variants()[1]


def variants(device: int = -1) -> list[Variant]:
    """The table for a GPU; with device=-1, the facts known without a GPU."""
    return _variants.table(load(), device)


# ---- calls; q, k, v, out and gradients are PyTorch tensors (batch, seqlen, heads, headdim), bfloat16, on a GPU ----


def arguments(shape_q, shape_k, causal: bool = False, dtype: str = "bfloat16") -> structs.AttentionArgs:
    """fa_attention_args of a plain call with contiguous tensors, without their addresses."""
    args = structs.new(structs.AttentionArgs)
    args.device, args.dtype, args.causal = structs.CUDA, structs.DTYPES[dtype], causal
    args.batch, args.seqlen_q, args.nheads, args.headdim = shape_q
    args.seqlen_k, args.nheads_k = shape_k[1:3]
    for name, (_, rows, heads, dim) in {"q": shape_q, "k": shape_k, "v": shape_k, "out": shape_q}.items():
        _strides(args, name, (rows * heads * dim, heads * dim, dim))
    return args


def _strides(args, name, strides):
    for axis, stride in zip(("batch", "row", "head"), strides, strict=True):
        setattr(args, f"{name}_{axis}_stride", stride)


def _put(args, **tensors):
    for name, x in tensors.items():
        setattr(args, f"{name}_data", x.data_ptr())
        _strides(args, name, x.stride()[:3])


def workspace_bytes(name: str, args) -> int:
    """Bytes of workspace for a call. Raises Unsupported with the reason if the variant does not serve the call."""
    size = ct.c_size_t()
    load().fa_variant_workspace(name.encode(), args, size)
    return size.value


def _workspace(name, args, device):
    import torch

    scratch = torch.empty(workspace_bytes(name, args), dtype=torch.uint8, device=device)
    args.workspace, args.workspace_bytes = scratch.data_ptr(), scratch.numel()
    return scratch


def _stream(x) -> int:
    import torch

    return torch.cuda.current_stream(x.device).cuda_stream


def prepare_forward(name: str, q, k, v, causal: bool = False):
    """Prepares a call for repetition. Returns launch, and the tensors that launch() writes: out, lse, workspace."""
    import torch

    out = torch.full_like(q, float("nan"))
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), dtype=torch.float32, device=q.device)
    args = arguments(q.shape, k.shape, causal)
    _put(args, q=q, k=k, v=v, out=out)
    args.lse = lse.data_ptr()
    workspace, lib, text = _workspace(name, args, q.device), load(), name.encode()

    def launch() -> None:
        lib.fa_variant_forward(text, args, _stream(q))

    launch.keeps = (q, k, v, workspace)
    return launch, out, lse, workspace


def forward(name: str, q, k, v, causal: bool = False):
    """out and lse."""
    launch, out, lse, _ = prepare_forward(name, q, k, v, causal)
    launch()
    return out, lse


def prepare_backward(name: str, dout, q, k, v, out, lse, causal: bool = False):
    """Prepares a call for repetition. Returns launch, and the tensors that launch() writes: dq, dk, dv."""
    import torch

    args, whole = arguments(q.shape, k.shape, causal), structs.new(structs.AttentionBackwardArgs)
    _put(args, q=q, k=k, v=v, out=out)
    args.lse = lse.data_ptr()
    workspace = _workspace(name, args, q.device)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    whole.forward = ct.pointer(args)
    _put(whole, dout=dout, dq=gradients[0], dk=gradients[1], dv=gradients[2])
    lib, text = load(), name.encode()

    def launch() -> None:
        lib.fa_variant_backward(text, whole, _stream(q))

    launch.keeps = (dout, q, k, v, out, lse, workspace, args)
    return launch, *gradients


def backward(name: str, dout, q, k, v, out, lse, causal: bool = False):
    """dq, dk and dv."""
    launch, *gradients = prepare_backward(name, dout, q, k, v, out, lse, causal)
    launch()
    return tuple(gradients)


def read_trace(workspace) -> np.ndarray:
    """The trace in a workspace after the call: (blocks, roles) of ROLE. Stamps from index `count` on are empty."""
    raw = workspace.cpu().numpy()[TRACE_OFFSET:]
    return raw.view(ROLE).reshape(TRACE_BLOCKS, TRACE_ROLES)


def read_counters(workspace, batch: int, nheads: int, seqlen_q: int) -> np.ndarray:
    """The counters of an online-softmax call: (batch, nheads, seqlen_q) of SOFTMAX_ROW."""
    return workspace.cpu().numpy().view(SOFTMAX_ROW).reshape(batch, nheads, seqlen_q)
