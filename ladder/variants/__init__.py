"""The experiments library from Python: experiments.h through ctypes, with PyTorch tensors on a GPU.

The library is the file FLASH_ATTN_EXPERIMENTS names, else libflash_attn_experiments.so beside the library itself.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flash_attn_minimal import _library

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


class VariantStruct(ct.Structure):
    """fa_variant."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *[(name, ct.c_char_p) for name in ("name", "experiment", "kernel", "about")],
        *[(name, ct.c_int32) for name in ("order", "backward", "tile_m", "tile_n", "stages", "threads", "registers")],
        *[(name, ct.c_int32) for name in ("shared_bytes", "spill_bytes", "blocks_per_sm", "headdim", "compute")],
    ]


@dataclass(frozen=True)
class Variant:
    """One row of the table; the fields are those of fa_variant."""

    name: str
    experiment: str
    kernel: str
    about: str
    order: int
    backward: bool
    tile_m: int
    tile_n: int
    stages: int
    threads: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    blocks_per_sm: int
    headdim: int
    compute: int


def path() -> Path:
    named = os.environ.get("FLASH_ATTN_EXPERIMENTS")
    file = Path(named) if named else _library.path().with_name("libflash_attn_experiments.so")
    if not file.is_file():
        raise _library.LibraryNotFound(f"no {file}: build the library with CMake and -DFLASH_ATTN_EXPERIMENTS=ON")
    return file


@functools.cache
def load() -> ct.CDLL:
    file = path()
    try:
        lib = ct.CDLL(str(file))
    except OSError as error:
        raise _library.LibraryNotFound(f"{file} does not load: {error}") from error
    forward, backward = ct.POINTER(_library.AttentionArgs), ct.POINTER(_library.AttentionBackwardArgs)
    for name, *arguments in (
        ("get", ct.c_int32, ct.c_int32, ct.POINTER(VariantStruct)),
        ("forward", ct.c_char_p, forward, ct.c_void_p),
        ("backward", ct.c_char_p, backward, ct.c_void_p),
        ("workspace", ct.c_char_p, forward, ct.POINTER(ct.c_size_t)),
    ):
        function = _library.declare(lib, f"fa_variant_{name}", ct.c_int, *arguments)
        function.errcheck = functools.partial(_raise, lib)
    _library.declare(lib, "fa_variant_count", ct.c_int32)
    _library.declare(lib, "fa_variant_last_error", ct.c_char_p)
    return lib


def _raise(lib, status, function, arguments):
    if status:
        raise _library._ERRORS[status](lib.fa_variant_last_error().decode())


def variants(device: int = -1) -> list[Variant]:
    """The table, as it stands for a GPU, or with device=-1 what is known without one."""
    lib, rows = load(), []
    for index in range(lib.fa_variant_count()):
        struct = _library.new(VariantStruct)
        try:
            lib.fa_variant_get(index, device, struct)
        except _library.Unsupported:  # a kernel of another GPU
            lib.fa_variant_get(index, -1, struct)
        values = {name: getattr(struct, name) for name, _ in VariantStruct._fields_[1:]}
        values = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
        rows.append(Variant(**{**values, "backward": bool(values["backward"])}))
    return rows


# ---- calls; q, k, v and the others are PyTorch tensors (batch, seqlen, heads, headdim), bfloat16, on a GPU ----


def arguments(shape_q, shape_k, causal: bool = False, dtype: str = "bfloat16") -> _library.AttentionArgs:
    """fa_attention_args of a plain call with contiguous tensors, without their addresses."""
    args = _library.new(_library.AttentionArgs)
    args.device, args.dtype, args.causal = _library.CUDA, _library.DTYPES[dtype], causal
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
    """What a call needs; raises Unsupported with the reason when the variant does not serve it."""
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
    """A call to be repeated: launch(), and the tensors it writes: out, lse, workspace."""
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
    """A call to be repeated: launch(), and dq, dk, dv."""
    import torch

    args, whole = arguments(q.shape, k.shape, causal), _library.new(_library.AttentionBackwardArgs)
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
    """The trace in a workspace after its call: (blocks, roles) of ROLE; stamps from `count` on are empty."""
    raw = workspace.cpu().numpy()[TRACE_OFFSET:]
    return raw.view(ROLE).reshape(TRACE_BLOCKS, TRACE_ROLES)


def read_counters(workspace, batch: int, nheads: int, seqlen_q: int) -> np.ndarray:
    """The counters of an online-softmax call: (batch, nheads, seqlen_q) of SOFTMAX_ROW."""
    return workspace.cpu().numpy().view(SOFTMAX_ROW).reshape(batch, nheads, seqlen_q)
