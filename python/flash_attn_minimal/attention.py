"""Exact attention with FlashAttention's memory: flash_attn_func, flash_attn_varlen_func, merge, query.

The algorithm is FlashAttention (Dao et al. 2022, section 3.1: tiling and the online softmax) in the loop order of
FlashAttention-2 (Dao 2023, section 3.1: queries outside, normalisation delayed to the end). Names and layout are those
of the flash-attn package.

Every function is thread-safe: calls share a scratch buffer that belongs to the calling thread, and a table of earlier
calls (see `_Repeat`) whose entries never change.
"""

from __future__ import annotations

import ctypes as ct
import operator
import struct
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _arrays
from ._arrays import View
from ._library import (
    CPU,
    DEVICES,
    DTYPES,
    OK,
    WORKSPACE_TOO_SMALL,
    AttentionArgs,
    AttentionPlan,
    BadArgument,
    MergeArgs,
    QuantizeArgs,
    Unsupported,
    WorkspaceTooSmall,
    failure,
    load,
    load_packed_forward,
)

_ARGS_SIZE, _PLAN_SIZE, _MERGE_SIZE = ct.sizeof(AttentionArgs), ct.sizeof(AttentionPlan), ct.sizeof(MergeArgs)
_OPEN = (-1, -1)
_NAMES = {number: name for name, number in DTYPES.items()}


# ---- public functions ----


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_OPEN,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    *,
    bias=None,
    mask=None,
    sinks=None,
    top_left=False,
    dropout_seed=None,
    dropout_offset=0,
    out=None,
    kernel=None,
    allow_tf32=False,
    num_threads=0,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out_dtype=None,
):
    """out = softmax(softmax_scale * q k^T + ...) v, without the (seqlen_q, seqlen_k) matrix in memory.

    Arrays come from NumPy, PyTorch, CuPy, JAX, Numba, or anything with DLPack or __cuda_array_interface__, all from
    the same one and on the same device. The result is of the caller's own type; on a GPU the work goes to the caller's
    current stream. (With JAX the call waits for its inputs and for its result.) There is no backward pass: PyTorch
    tensors that require a gradient are refused unless torch.no_grad() is on.

    Arguments:
        q: (batch, seqlen_q, nheads, headdim), float32, float16 or bfloat16. headdim and headdim_v from 1 to 512.
            On a Hopper GPU also float8_e4m3fn with its descale factors (quantize_fp8 makes both), for plain and causal
            attention with head dims that are multiples of 16 up to 256.
        k: (batch, seqlen_k, nheads_k, headdim), the same dtype. nheads is a multiple of nheads_k; head h of q reads
            head h // (nheads // nheads_k) of k and v.
        v: (batch, seqlen_k, nheads_k, headdim_v).
            Strides are free (a broadcast axis with stride 0 is fine), but the last axis must be contiguous.
        dropout_p: chance of dropping a probability, 0 <= p < 1, used as round(65536 p) / 65536. Needs dropout_seed.
        softmax_scale: factor on q k^T; None means headdim ** -0.5.
        causal: row i sees column j only if j <= i + seqlen_k - seqlen_q (bottom-right), or j <= i with top_left=True.
        window_size: (left, right): row i sees columns i' - left .. i' + right, i' being i aligned as above; -1 is open.
        softcap: s = softcap * tanh(s / softcap); 0 is off.
        alibi_slopes: (nheads,) or (batch, nheads) float32: s -= slope * |i' - j|.
        deterministic: the forward pass is bitwise reproducible anyhow; here for flash-attn's signature.
        return_lse: also return lse.
        bias: added to the scores; broadcasts to (batch, nheads, seqlen_q, seqlen_k), but the last axis is always
            seqlen_k long. Of q's dtype or float32.
        mask: bool or uint8, non-zero = attend; broadcasts the same way.
        sinks: (nheads,) float32: one more logit per head in every row's denominator. lse includes it.
        top_left: hang causal and window from the top-left corner instead of the bottom-right one.
        dropout_seed, dropout_offset: 64-bit integers that decide which probabilities are dropped, the same on every
            device.
        out: where to put the result, (batch, seqlen_q, nheads, headdim_v); returned again.
        kernel: force a kernel by name (see kernels()); None means $FLASH_ATTN_KERNEL, else the best one.
        allow_tf32: float32 inputs may use tf32 tensor cores.
        num_threads: for the CPU backend; 0 means $FLASH_ATTN_NUM_THREADS, else one per core.
        q_descale, k_descale, v_descale: what the float8_e4m3fn values of q, k and v are multiplied by, required for
            them and for no other dtype: float32, positive, broadcasting to (batch, nheads), (batch, nheads_k) and
            (batch, nheads_k). The tensor cores sum such products in 14 bits: where V has a mean, thousands of keys lose
            part of it (9 % at 4k), so subtract it first and add it to the output.
        out_dtype: "bfloat16" or "float16" for float8_e4m3fn inputs; None means q's dtype, bfloat16 for these.

    The order is: scale, softcap, ALiBi, bias, mask, causal and window, sinks, dropout.

    causal=True with seqlen_q = 2 and seqlen_k = 5, then with seqlen_q = 5 and seqlen_k = 2:

        bottom-right      top_left=True         bottom-right    top_left=True
        1 1 1 1 0         1 0 0 0 0             0 0             1 0
        1 1 1 1 1         1 1 0 0 0             0 0             1 1
                                                0 0             1 1
                                                1 0             1 1
                                                1 1             1 1

    A row that sees nothing returns out = 0 and lse = -inf (lse = the sink with sinks), never NaN. Keys and values that
    no row may see do not reach the output, whatever they hold.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) in q's dtype; with return_lse the pair (out, lse), lse (batch, nheads,
        seqlen_q) float32, the natural logarithm of each row's sum of exponentials.

    Raises:
        BadArgument (a ValueError): the text names the argument and quotes its value; a given `out` is untouched.
        Unsupported (a NotImplementedError): legal, but no kernel here serves it; the text says why.
        CudaError (a RuntimeError), OutOfMemory (a MemoryError). All of them are FlashAttnError.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_func
    >>> q = np.zeros((1, 2, 1, 8), np.float32)
    >>> k = np.zeros((1, 5, 1, 8), np.float32)
    >>> v = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)
    >>> flash_attn_func(q, k, v, causal=True).ravel()  # the means of 0 1 2 3 and of 0 1 2 3 4
    array([1.5, 2. ], dtype=float32)
    """
    signature = None
    if (
        alibi_slopes is bias is mask is sinks is dropout_seed is kernel is q_descale is out_dtype is None
        and k_descale is v_descale is None
        and deterministic is top_left is allow_tf32 is False
        and dropout_p == softcap == dropout_offset == 0
    ):
        signature = _signature(q, k, v, out, causal, softmax_scale, window_size, return_lse, num_threads)
        repeat = _repeats.get(signature) if signature else None
        results = repeat.call(q, k, v, out) if repeat else None
        if results is not None:
            return results
    args, views = _prepare(
        q, k, v, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        bias, mask, sinks, top_left, dropout_seed, dropout_offset, kernel, allow_tf32, num_threads,
        q_descale, k_descale, v_descale, out_dtype,
    )  # fmt: skip
    qv = views[0]
    out_view = _output(args, views, out, (*qv.shape[:3], args.headdim_v), False)
    lse_view = None
    if _flag("return_lse", return_lse):
        lse_view = qv.door.empty(qv, (args.batch, args.nheads, args.seqlen_q), "float32")
        args.lse = lse_view.pointer
    scratch = _launch(args, views)
    if signature:
        _remember(signature, args, qv, out_view, lse_view, scratch)
    result = out if out is not None else out_view.door.result(out_view)
    return result if lse_view is None else (result, lse_view.door.result(lse_view))


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_OPEN,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    *,
    bias=None,
    mask=None,
    sinks=None,
    top_left=False,
    dropout_seed=None,
    dropout_offset=0,
    out=None,
    kernel=None,
    allow_tf32=False,
    num_threads=0,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out_dtype=None,
):
    """flash_attn_func for sequences of different lengths, packed one after the other.

    Arguments, where they differ:
        q: (total_q, nheads, headdim); k: (total_k, nheads_k, headdim); v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, contiguous, on q's device: sequence b owns the rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1. They start at 0, never decrease and end at most at total. On the
            CPU this is checked; on a GPU, where reading them would wait for the device, rows outside these bounds are
            left alone.
        max_seqlen_q, max_seqlen_k: integers, the longest sequence or more.
        bias, mask: broadcast to (batch, nheads, max_seqlen_q, max_seqlen_k); rows and columns count from the start of
            each sequence.
        alibi_slopes: (nheads,) or (batch, nheads).

    Returns:
        out (total_q, nheads, headdim_v); with return_lse also lse (nheads, total_q). Rows that belong to no sequence
        are 0 in `out` and -inf in `lse`; a given `out` keeps what it holds there.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_varlen_func
    >>> q = np.zeros((4, 1, 8), np.float32)
    >>> v = np.array([1, 3, 10, 20], np.float32).reshape(4, 1, 1)
    >>> cu_seqlens = np.array([0, 2, 4], np.int32)  # rows 0 1 and rows 2 3
    >>> flash_attn_varlen_func(q, q, v, cu_seqlens, cu_seqlens, 2, 2).ravel()
    array([ 2.,  2., 15., 15.], dtype=float32)
    """
    varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    args, views = _prepare(
        q, k, v, varlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        bias, mask, sinks, top_left, dropout_seed, dropout_offset, kernel, allow_tf32, num_threads,
        q_descale, k_descale, v_descale, out_dtype,
    )  # fmt: skip
    qv, cu = views[0], views[3]
    covered = cu.device == CPU and ct.c_int32.from_address(cu.pointer + 4 * args.batch).value == args.total_q
    out_view = _output(args, views, out, (args.total_q, args.nheads, args.headdim_v), not covered)
    lse_view = None
    if _flag("return_lse", return_lse):
        shape = (args.nheads, args.total_q)
        lse_view = qv.door.empty(qv, shape, "float32") if covered else qv.door.full(qv, shape, "float32", -np.inf)
        args.lse = lse_view.pointer
    _launch(args, views)
    result = out if out is not None else out_view.door.result(out_view)
    return result if lse_view is None else (result, lse_view.door.result(lse_view))


def merge(out_a, lse_a, out_b, lse_b):
    """Merges attention over two disjoint sets of keys into attention over their union.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    Associative up to rounding; a side with lse = -inf is the identity, whatever its out holds. With sinks, give them
    to one side only.

    Arguments:
        out_a, out_b: (batch, seqlen, nheads, headdim_v), or packed (total, nheads, headdim_v); last axis contiguous.
        lse_a, lse_b: (batch, nheads, seqlen), or (nheads, total); float32, contiguous.

    Returns (out, lse), new arrays of the caller's own type.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_func, merge
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), dtype=np.float32)
    >>> left = flash_attn_func(q, k[:, :2], v[:, :2], return_lse=True)
    >>> right = flash_attn_func(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> out, lse = merge(*left, *right)
    >>> bool(np.allclose(out, flash_attn_func(q, k, v), atol=1e-6))
    True
    """
    names, arrays = ("out_a", "lse_a", "out_b", "lse_b"), (out_a, lse_a, out_b, lse_b)
    views = [_arrays.view(array, name) for name, array in zip(names, arrays, strict=True)]
    a, la, b, lb = views
    for name, view in zip(names[1:], views[1:], strict=True):
        _check_same_place(name, view, "out_a", a)
    packed = len(a.shape) == 3
    if not packed and len(a.shape) != 4:
        raise BadArgument(
            f"out_a has shape {tuple(a.shape)}: "
            "expected (batch, seqlen, nheads, headdim_v) or (total, nheads, headdim_v)"
        )
    _check_dtype("out_a", a)
    if b.shape != a.shape or b.dtype != a.dtype:
        raise BadArgument(f"out_b is {b.dtype} {tuple(b.shape)}, but out_a is {a.dtype} {tuple(a.shape)}")
    *batch, seqlen, nheads, headdim_v = a.shape
    lse_shape = (*batch, nheads, seqlen)
    for name, view in (("lse_a", la), ("lse_b", lb)):
        if tuple(view.shape) != lse_shape or view.dtype != "float32":
            raise BadArgument(f"{name} is {view.dtype} {tuple(view.shape)}: expected float32 {lse_shape}")
        if not _is_contiguous(view):
            raise BadArgument(
                f"{name} has strides {tuple(view.strides)} for shape {tuple(view.shape)}: it must be contiguous"
            )
    for name, view in (("out_a", a), ("out_b", b)):
        _check_last_axis(name, view)
    out, lse = a.door.empty(a, tuple(a.shape), a.dtype), a.door.empty(a, lse_shape, "float32")

    args = MergeArgs()
    args.struct_size = _MERGE_SIZE
    args.device, args.dtype = a.device, DTYPES[a.dtype]
    args.batch, args.seqlen, args.nheads, args.headdim_v = batch[0] if batch else 1, seqlen, nheads, headdim_v
    for name, view in (("out_a", a), ("out_b", b), ("out", out)):
        setattr(args, f"{name}_data", view.pointer)
        for axis, stride in zip(("batch", "row", "head"), (0, *view.strides[-4:-1])[-3:], strict=True):
            setattr(args, f"{name}_{axis}_stride", stride)
    args.lse_a, args.lse_b, args.lse = la.pointer, lb.pointer, lse.pointer
    load().fa_attention_merge(args, a.door.stream(views))
    return out.door.result(out), lse.door.result(lse)


def quantize_fp8(x, hadamard=False, seed=0):
    """x in float8_e4m3fn with one factor for every head of every batch entry: x is about x8 * descale.

    With hadamard=True every row is first multiplied by random signs and by an orthonormal Hadamard matrix, which
    spreads outliers over the row. q k^T stays as it is when q and k are both rotated with the same seed; rotate neither
    alone, and not v.

    Arguments:
        x: (batch, seqlen, nheads, headdim), or packed (total, nheads, headdim), which counts as one batch entry;
            float32, float16 or bfloat16, finite, last axis contiguous, headdim up to 512, with hadamard a power of two.
        seed: 64-bit integer that decides the signs.

    Returns (x8, descale): x8 like x in float8_e4m3fn, descale (batch, nheads) float32. NumPy knows float8_e4m3fn once
    ml_dtypes is imported.

    On a Hopper GPU, with PyTorch or JAX arrays:

        (q8, q_descale), (k8, k_descale) = quantize_fp8(q, hadamard=True), quantize_fp8(k, hadamard=True)
        v8, v_descale = quantize_fp8(v)
        out = flash_attn_func(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    """
    view = _arrays.view(x, "x")
    if len(view.shape) not in (3, 4):
        raise BadArgument(
            f"x has shape {tuple(view.shape)}: expected (batch, seqlen, nheads, headdim) or (total, nheads, headdim)"
        )
    if view.dtype not in ("float32", "float16", "bfloat16"):
        raise BadArgument(f"x is {view.dtype}: expected float32, float16 or bfloat16")
    _check_last_axis("x", view)
    *batch, seqlen, nheads, headdim = view.shape
    args = QuantizeArgs()
    args.struct_size = ct.sizeof(QuantizeArgs)
    args.device, args.dtype = view.device, DTYPES[view.dtype]
    args.batch, args.seqlen, args.nheads, args.headdim = batch[0] if batch else 1, seqlen, nheads, headdim
    args.hadamard, args.seed = _flag("hadamard", hadamard), _integer("seed", seed, 0, 2**64 - 1)
    try:
        out = view.door.empty(view, tuple(view.shape), "float8_e4m3fn")
    except (TypeError, KeyError, AttributeError):
        raise Unsupported(
            f"{view.door.name} has no dtype float8_e4m3fn here (NumPy has it after `import ml_dtypes`)"
        ) from None
    descale = view.door.empty(view, (args.batch, nheads), "float32")
    for name, array in (("x", view), ("out", out)):
        setattr(args, f"{name}_data", array.pointer)
        for axis, stride in zip(("batch", "row", "head"), (0, *array.strides[-4:-1])[-3:], strict=True):
            setattr(args, f"{name}_{axis}_stride", stride)
    args.descale = descale.pointer
    load().fa_quantize_fp8(args, view.door.stream([view]))
    return out.door.result(out), descale.door.result(descale)


@dataclass(frozen=True)
class Plan:
    """What a call would do."""

    status: str  # "FA_OK", or the name of the status that the call would raise
    error: str  # the text of that error, "" when there is none
    kernel: str  # the kernel that would run, "" when none would
    workspace_bytes: int  # scratch memory that the kernel takes, allocated by the call itself
    why_not: dict[str, str]  # for each kernel preferred to this one, the reason why it does not serve


def query(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    return_lse=False,
    out=None,
    **options,
):
    """What flash_attn_func (or, with cu_seqlens, flash_attn_varlen_func) would do with the same arguments, without
    doing it.

    Arrays that the Python layer refuses raise as they would in the call; what the library says is in the Plan.

    >>> import numpy as np
    >>> from flash_attn_minimal import query
    >>> q = np.zeros((1, 128, 8, 64), np.float32)
    >>> plan = query(q, q, q, causal=True, kernel="cpu_naive")
    >>> plan.status, plan.kernel
    ('FA_OK', 'cpu_naive')
    >>> query(q[:, :, :6], q[:, :, :4], q[:, :, :4]).error
    'nheads=6 is not a multiple of nheads_k=4'
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    missing = [
        name
        for name, x in zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True)
        if x is None
    ]
    if 0 < len(missing) < 4:
        raise BadArgument(
            f"{missing[0]} is None: a varlen query needs cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k"
        )
    args, views = _prepare(q, k, v, None if missing else lengths, **options)
    _flag("return_lse", return_lse)
    shape = (*views[0].shape[:-1], args.headdim_v)
    if out is not None:
        _output(args, views, out, shape, False)
    else:  # as the call would allocate it
        args.out_head_stride, args.out_row_stride = shape[-1], shape[-1] * shape[-2]
        args.out_batch_stride = args.out_row_stride * max(shape[-3], 1)
    return plan_of(args)


def kernels() -> list[dict[str, str]]:
    """The kernels of this build, best first on each device: [{"name", "device", "summary"}, ...].

    >>> from flash_attn_minimal import kernels
    >>> [kernel["name"] for kernel in kernels() if kernel["device"] == "cpu"][-2:]
    ['cpu_portable', 'cpu_naive']
    """
    lib = load()
    return [
        {
            "name": lib.fa_kernel_name(i).decode(),
            "device": DEVICES[lib.fa_kernel_device(i)],
            "summary": lib.fa_kernel_summary(i).decode(),
        }
        for i in range(lib.fa_kernel_count())
    ]


# ---- from arrays to the C struct ----


def _prepare(
    q,
    k,
    v,
    varlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_OPEN,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    bias=None,
    mask=None,
    sinks=None,
    top_left=False,
    dropout_seed=None,
    dropout_offset=0,
    kernel=None,
    allow_tf32=False,
    num_threads=0,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out_dtype=None,
) -> tuple[AttentionArgs, list[View]]:
    """Everything but the outputs and the workspace. The views (q, k, v, then the optional ones) keep the memory
    alive."""
    qv, kv, vv = _arrays.view(q, "q"), _arrays.view(k, "k"), _arrays.view(v, "v")
    views = [qv, kv, vv]
    rank = 4 if varlen is None else 3
    for name, view in (("q", qv), ("k", kv), ("v", vv)):
        if len(view.shape) != rank:
            expected = "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim)"
            raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected {expected}")
        if view.strides[-1] != 1 and view.shape[-1] > 1:
            _check_last_axis(name, view)
    _check_same_place("k", kv, "q", qv)
    _check_same_place("v", vv, "q", qv)
    if kv.dtype != qv.dtype or vv.dtype != qv.dtype:
        raise BadArgument(f"q is {qv.dtype}, k is {kv.dtype}, v is {vv.dtype}: they must be the same")
    _check_dtype("q", qv)

    args = AttentionArgs()
    args.struct_size = _ARGS_SIZE
    args.device = qv.device
    args.dtype = DTYPES[qv.dtype]
    args.q_data, args.k_data, args.v_data = qv.pointer, kv.pointer, vv.pointer
    if varlen is None:
        batch, seqlen_q, nheads, headdim = qv.shape
        batch_k, seqlen_k, nheads_k, headdim_k = kv.shape
        if batch_k != batch or headdim_k != headdim:
            raise BadArgument(
                f"k has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: batch and headdim must agree"
            )
        if vv.shape[:3] != kv.shape[:3]:
            raise BadArgument(f"v has shape {tuple(vv.shape)}, but k has {tuple(kv.shape)}: all but headdim must agree")
        args.q_batch_stride, args.q_row_stride, args.q_head_stride, _ = qv.strides
        args.k_batch_stride, args.k_row_stride, args.k_head_stride, _ = kv.strides
        args.v_batch_stride, args.v_row_stride, args.v_head_stride, _ = vv.strides
    else:
        total_q, nheads, headdim = qv.shape
        total_k, nheads_k, headdim_k = kv.shape
        if headdim_k != headdim:
            raise BadArgument(f"k has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: headdim must agree")
        if vv.shape[:2] != kv.shape[:2]:
            raise BadArgument(f"v has shape {tuple(vv.shape)}, but k has {tuple(kv.shape)}: all but headdim must agree")
        args.q_row_stride, args.q_head_stride, _ = qv.strides
        args.k_row_stride, args.k_head_stride, _ = kv.strides
        args.v_row_stride, args.v_head_stride, _ = vv.strides
        args.total_q, args.total_k = total_q, total_k
        batch, seqlen_q, seqlen_k = _sequences(args, views, *varlen)
    if vv.shape[-1] < 1:  # 0 would mean "the same as headdim" to the library
        raise BadArgument(f"v has shape {tuple(vv.shape)}: headdim_v=0 is outside 1 .. 512")
    args.batch, args.seqlen_q, args.seqlen_k = batch, seqlen_q, seqlen_k
    args.nheads, args.nheads_k, args.headdim, args.headdim_v = nheads, nheads_k, headdim, vv.shape[-1]

    if causal is not False:
        args.causal = _flag("causal", causal)
    if softmax_scale is not None:
        args.softmax_scale, args.has_softmax_scale = _number("softmax_scale", softmax_scale), 1
    if softcap != 0:
        args.softcap = _number("softcap", softcap)
    if window_size is not _OPEN:
        args.window_left, args.window_right = _window(window_size)
        args.has_window = 1
    if top_left is not False:
        args.top_left = _flag("top_left", top_left)
    if alibi_slopes is not None:
        slopes = _option(views, "alibi_slopes", alibi_slopes, ("float32",))
        if tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
            raise BadArgument(
                f"alibi_slopes has shape {tuple(slopes.shape)}: expected ({nheads},) or ({batch}, {nheads})"
            )
        _check_last_axis("alibi_slopes", slopes)
        args.alibi_slopes = slopes.pointer
        args.alibi_batch_stride = slopes.strides[0] if len(slopes.shape) == 2 else 0
    if bias is not None:
        view = _option(views, "bias", bias, (qv.dtype, "float32"))
        args.bias_dtype = DTYPES[view.dtype]
        strides = _broadcast("bias", view, (batch, nheads, seqlen_q, seqlen_k))
        args.bias_data, (args.bias_batch_stride, args.bias_head_stride, args.bias_row_stride) = view.pointer, strides
    if mask is not None:
        view = _option(views, "mask", mask, ("bool", "uint8"))
        strides = _broadcast("mask", view, (batch, nheads, seqlen_q, seqlen_k))
        args.mask_data, (args.mask_batch_stride, args.mask_head_stride, args.mask_row_stride) = view.pointer, strides
    if sinks is not None:
        view = _option(views, "sinks", sinks, ("float32",))
        if tuple(view.shape) != (nheads,):
            raise BadArgument(f"sinks has shape {tuple(view.shape)}: expected ({nheads},)")
        _check_last_axis("sinks", view)
        args.sinks = view.pointer
    if dropout_p != 0:
        args.dropout_p = _number("dropout_p", dropout_p)
        if dropout_seed is None:
            raise BadArgument(
                f"dropout_p={dropout_p} without dropout_seed: "
                "name the seed, so that the same call drops the same elements"
            )
    if dropout_seed is not None:
        args.dropout_seed = _integer("dropout_seed", dropout_seed, 0, 2**64 - 1)
    if dropout_offset != 0:
        args.dropout_offset = _integer("dropout_offset", dropout_offset, 0, 2**64 - 1)
    if deterministic is not False:
        args.deterministic = _flag("deterministic", deterministic)
    if allow_tf32 is not False:
        args.allow_tf32 = _flag("allow_tf32", allow_tf32)
    if num_threads != 0:
        args.num_threads = _integer("num_threads", num_threads, -(2**31), 2**31 - 1)
    for name, factors, heads in (("q", q_descale, nheads), ("k", k_descale, nheads_k), ("v", v_descale, nheads_k)):
        if factors is not None:
            _descale(args, views, f"{name}_descale", factors, (batch, heads))
    if out_dtype is not None:
        if out_dtype not in DTYPES:
            raise BadArgument(f"out_dtype={out_dtype!r} is none of {', '.join(map(repr, DTYPES))}")
        args.out_dtype = DTYPES[out_dtype]
    if kernel is not None:
        if not isinstance(kernel, str):
            raise BadArgument(f"kernel={kernel!r} is not the name of a kernel")
        args.kernel = kernel.encode()
    return args, views


def _sequences(args: AttentionArgs, views: list[View], cu_q, cu_k, max_q, max_k) -> tuple[int, int, int]:
    """Reads the arguments that only varlen calls have; returns batch, seqlen_q, seqlen_k."""
    cu_q = _option(views, "cu_seqlens_q", cu_q, ("int32",))
    cu_k = _option(views, "cu_seqlens_k", cu_k, ("int32",))
    for name, view in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if len(view.shape) != 1 or view.shape[0] < 1:
            raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected (batch + 1,)")
        _check_last_axis(name, view)
    if cu_k.shape[0] != cu_q.shape[0]:
        raise BadArgument(
            f"cu_seqlens_k has {cu_k.shape[0]} entries, but cu_seqlens_q has {cu_q.shape[0]}: both have batch + 1"
        )
    args.cu_seqlens_q, args.cu_seqlens_k = cu_q.pointer, cu_k.pointer
    seqlen_q = _integer("max_seqlen_q", max_q, 0, 2**63 - 1)
    seqlen_k = _integer("max_seqlen_k", max_k, 0, 2**63 - 1)
    return cu_q.shape[0] - 1, seqlen_q, seqlen_k


def _descale(args: AttentionArgs, views: list[View], name: str, factors: Any, full: tuple[int, int]) -> None:
    """Puts an array that broadcasts to `full`, (batch, heads), into args; stride 0 repeats an axis."""
    view = _option(views, name, factors, ("float32",))
    shape, strides = tuple(view.shape), tuple(view.strides)
    if len(shape) > 2 or any(have not in (1, want) for have, want in zip(shape[::-1], full[::-1])):  # noqa: B905
        raise BadArgument(f"{name} has shape {shape}, which does not broadcast to (batch, heads) = {full}")
    moves = [stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    batch_stride, head_stride = [0] * (2 - len(shape)) + moves
    setattr(args, f"{name}_data", view.pointer)
    setattr(args, f"{name}_batch_stride", batch_stride)
    setattr(args, f"{name}_head_stride", head_stride)


def _output(args: AttentionArgs, views: list[View], out: Any, shape: tuple[int, ...], zeroed: bool) -> View:
    """The given or a new output, put into args."""
    qv = views[0]
    dtype = _NAMES.get(args.out_dtype) or ("bfloat16" if qv.dtype == "float8_e4m3fn" else qv.dtype)
    if out is None:
        view = qv.door.full(qv, shape, dtype, 0) if zeroed else qv.door.empty(qv, shape, dtype)
    else:
        view = _arrays.view(out, "out")
        _check_same_place("out", view, "q", qv)
        if tuple(view.shape) != shape or view.dtype != dtype:
            raise BadArgument(f"out is {view.dtype} {tuple(view.shape)}: expected {dtype} {shape}")
        _check_last_axis("out", view)
        if not view.writable:
            raise BadArgument(f"out is a read-only {view.door.name} array")
        for name, other in zip(("q", "k", "v"), views, strict=False):
            if view.pointer == other.pointer and view.pointer and 0 not in shape:
                raise BadArgument(f"out starts at the same address as {name}: it would be overwritten while it is read")
    args.out_data = view.pointer
    if len(shape) == 4:
        args.out_batch_stride, args.out_row_stride, args.out_head_stride, _ = view.strides
    else:
        args.out_row_stride, args.out_head_stride, _ = view.strides
    return view


def _option(views: list[View], name: str, array: Any, dtypes: tuple[str, ...]) -> View:
    """One more input array, of one of these dtypes, from where q comes from."""
    view = _arrays.view(array, name)
    _check_same_place(name, view, "q", views[0])
    if view.dtype not in dtypes:
        raise BadArgument(f"{name} is {view.dtype}: expected {' or '.join(dict.fromkeys(dtypes))}")
    views.append(view)
    return view


def _broadcast(name: str, view: View, full: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """(batch, head, row) strides of an array that broadcasts to `full`; 0 repeats an axis. Columns are never
    repeated."""
    shape, strides = tuple(view.shape), tuple(view.strides)
    if not 1 <= len(shape) <= 4 or any(have not in (1, want) for have, want in zip(shape[::-1], full[::-1])):  # noqa: B905
        raise BadArgument(
            f"{name} has shape {shape}, which does not broadcast to (batch, nheads, seqlen_q, seqlen_k) = {full}"
        )
    if shape[-1] != full[-1]:
        raise BadArgument(f"{name} has shape {shape}: its last axis must have all seqlen_k={full[-1]} columns")
    _check_last_axis(name, view)
    padded = (0,) * (4 - len(shape)) + tuple(
        stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True)
    )
    return padded[:3]


def _check_same_place(name: str, view: View, first_name: str, first: View) -> None:
    if view.door is not first.door:
        raise BadArgument(
            f"{name} is a {view.door.name} array, but {first_name} is a {first.door.name} array: "
            "use one of them for all"
        )
    if view.device != first.device or view.index != first.index:
        raise BadArgument(f"{name} is on {view.place}, but {first_name} is on {first.place}")


def _check_dtype(name: str, view: View) -> None:
    if view.dtype not in DTYPES:
        raise BadArgument(f"{name} is {view.dtype}: expected float32, float16 or bfloat16 (or float8_e4m3fn)")


def _check_last_axis(name: str, view: View) -> None:
    if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise BadArgument(f"{name} has stride {view.strides[-1]} along its last axis: it must be contiguous (stride 1)")


def _is_contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected:
            return 0 in view.shape
        expected *= size
    return True


def _flag(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return int(value)
    raise BadArgument(f"{name}={value!r} is neither True nor False")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadArgument(f"{name}={value!r} is not a number") from None


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise BadArgument(f"{name}={value!r} is not an integer") from None
    if not low <= number <= high:
        raise BadArgument(f"{name}={number} is outside {low} .. {high}")
    return number


def _window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise BadArgument(f"window_size={window_size!r} is not a pair (left, right)") from None
    low, high = -(2**63), 2**63 - 1
    return _integer("window_size[0]", left, low, high), _integer("window_size[1]", right, low, high)


# ---- launch and query ----

_KEPT_SCRATCH = 64 << 20  # bytes of CPU scratch that a thread keeps for its next call


class _Scratch(threading.local):
    buffer = None
    address = size = 0


_scratch = _Scratch()


def _launch(args: AttentionArgs, views: list[View]) -> View | None:
    """Runs the call. Only when the library says that it needs workspace is the size asked for and the memory
    allocated. Returns the workspace of a call on a GPU."""
    qv = views[0]
    forward = load().fa_attention_forward
    on_cpu = qv.device == CPU
    if on_cpu:
        args.workspace, args.workspace_bytes = _scratch.address, _scratch.size
    stream = None if on_cpu else qv.door.stream(views)
    scratch = None
    try:
        forward(args, stream)
    except WorkspaceTooSmall:
        plan = AttentionPlan()
        plan.struct_size = _PLAN_SIZE
        load().fa_attention_query(args, plan)
        size = plan.workspace_bytes
        if on_cpu:
            buffer = (ct.c_char * size)()
            args.workspace, args.workspace_bytes = ct.addressof(buffer), size
            if size <= _KEPT_SCRATCH:
                _scratch.buffer, _scratch.address, _scratch.size = buffer, args.workspace, size
        else:
            scratch = qv.door.empty(qv, (size,), "uint8")
            args.workspace, args.workspace_bytes = scratch.pointer, size
        forward(args, stream)
    return scratch


# ---- the shortcut: a call like one before, on other arrays ----
#
# Most calls differ from an earlier one in nothing but addresses. All that the long way checks and derives follows from
# the call's signature, so a call that worked leaves its argument struct behind, and the next one of the same signature
# fills in the addresses, allocates and launches. What is not plain, and what does not fit, takes the long way, which
# knows the error texts. A new option of flash_attn_func belongs in its test for plain calls, or in the signature.
#
# Host time of a small call on an H200 machine, PyTorch (CuPy), microseconds, medians of 749 rounds:
#
#     the long way   22.7 (22.6)
#     the shortcut   13.9 (13.6): signature and look-up 3.1, output 2.0 (2.9), library with its launch 5.8, the rest 3.0
#     with out=      12.0 (10.3)

_VARYING = ("q_data", "k_data", "v_data", "out_data", "lse", "workspace", "workspace_bytes")


def _packing() -> tuple[struct.Struct, list[slice]]:
    """AttentionArgs as a `struct` format, the varying fields as numbers and what lies between them as bytes; and where
    these bytes are."""
    pattern, gaps, end = "=", [], 0
    for name in _VARYING:
        field = getattr(AttentionArgs, name)
        pattern += f"{field.offset - end}sQ"
        gaps.append(slice(end, field.offset))
        end = field.offset + field.size
    return struct.Struct(pattern + f"{_ARGS_SIZE - end}s"), [*gaps, slice(end, _ARGS_SIZE)]


_PACKED_ARGS, _GAPS = _packing()
_pack_args = _PACKED_ARGS.pack
_MOST_REPEATS = 1024  # signatures kept, some 2 KB each; then the table starts afresh
_REPEATED_SCRATCH = 4096  # bytes; a call that needs more on the GPU has work enough to hide the long way
_repeats: dict[tuple, _Repeat | None] = {}  # None: seen once


def _signature(q, k, v, out, causal, softmax_scale, window_size, return_lse, num_threads) -> tuple | None:
    """All that decides about a call but the addresses, or None for a call that takes the long way. Types are as strict
    as they are because equal keys need not be equally legal (1 == 1.0), and an array may change under its own hash."""
    door = _arrays.common_door(q, k, v, out)
    if (
        door is None
        or not (causal is True or causal is False)
        or not (return_lse is True or return_lse is False)
        or not (softmax_scale is None or type(softmax_scale) is float)
        or not (window_size is _OPEN or (type(window_size) is tuple and [*map(type, window_size)] == [int, int]))
        or type(num_threads) is not int
    ):
        return None
    describe = door.describe
    about_q, about_k, about_v = describe(q), describe(k), describe(v)
    about_out = describe(out) if out is not None else ()
    if about_q is None or about_k is None or about_v is None or about_out is None:
        return None
    return (
        door, about_q, about_k, about_v, about_out, causal, softmax_scale, window_size, return_lse, num_threads
    )  # fmt: skip


class _Repeat:
    """What calls of one signature share. Never changed once made, and holds no array: threads use it side by side."""

    __slots__ = (
        "address",
        "make_out",
        "make_lse",
        "make_scratch",
        "fixed",
        "scratch_bytes",
        "on_cpu",
        "index",
        "stream",
        "forward",
    )

    def __init__(self, args: AttentionArgs, qv: View, out_view: View, lse_view: View | None, scratch: View | None):
        door, filled = qv.door, bytes(args)
        self.address = door.address
        self.make_out = door.maker(qv, out_view)
        self.make_lse = lse_view and door.maker(qv, lse_view)
        self.make_scratch = scratch and door.maker(qv, scratch)
        self.scratch_bytes = scratch.shape[0] if scratch else 0
        self.fixed = [filled[gap] for gap in _GAPS]
        self.on_cpu, self.index, self.stream = qv.device == CPU, qv.index, door.current_stream
        self.forward = load_packed_forward()

    def call(self, q, k, v, out):
        """Launches, and returns what flash_attn_func returns; None sends the caller the long way instead."""
        address = self.address
        try:
            at_q, at_k, at_v = address(q), address(k), address(v)
            result = out if out is not None else self.make_out(q)
            at_out = address(result)
        except RuntimeError:
            return None
        if out is not None and (at_out == at_q or at_out == at_k or at_out == at_v):
            return None
        lse, at_lse = None, 0
        if self.make_lse:
            lse = self.make_lse(q)
            at_lse = address(lse)
        if self.on_cpu:
            stream, at_scratch, scratch_bytes = None, _scratch.address, _scratch.size
        else:
            stream, at_scratch, scratch_bytes = self.stream(self.index), 0, self.scratch_bytes
            if scratch_bytes:  # from the caller's allocator, which knows about streams and graph captures
                scratch = self.make_scratch(q)
                at_scratch = address(scratch)
        head, q_strides, k_strides, v_strides, out_strides, options, nothing, tail = self.fixed
        args = _pack_args(
            head, at_q, q_strides, at_k, k_strides, at_v, v_strides, at_out, out_strides, at_lse,
            options, at_scratch, nothing, scratch_bytes, tail,
        )  # fmt: skip
        status = self.forward(args, stream)
        if status != OK:
            if status == WORKSPACE_TOO_SMALL:  # another kernel than last time, or this thread's first call
                return None
            raise failure(status)
        return result if lse is None else (result, lse)


def _remember(
    signature: tuple, args: AttentionArgs, qv: View, out_view: View, lse_view: View | None, scratch: View | None
) -> None:
    """For the next call of this signature; this one has been launched. Making a _Repeat costs some 3 us, so it waits
    for a signature's second call: a decoder's cache that grows has a new one at every step."""
    if scratch and scratch.shape[0] > _REPEATED_SCRATCH:
        return
    if len(_repeats) >= _MOST_REPEATS and signature not in _repeats:
        _repeats.clear()
    _repeats[signature] = _Repeat(args, qv, out_view, lse_view, scratch) if signature in _repeats else None


def plan_of(args: AttentionArgs) -> Plan:
    """The capability query for a filled struct; its data pointers may be NULL."""
    lib, plan = load(), AttentionPlan()
    plan.struct_size = _PLAN_SIZE
    status = lib.fa_attention_query(args, plan)
    return Plan(
        status=lib.fa_status_name(status).decode(),
        error=lib.fa_last_error().decode(errors="replace") if status else "",
        kernel=plan.kernel.decode(),
        workspace_bytes=plan.workspace_bytes,
        why_not=dict(line.split(": ", 1) for line in plan.why_not.decode(errors="replace").splitlines()),
    )
