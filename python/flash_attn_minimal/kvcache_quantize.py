"""Converts an existing cache of keys and values to 8 bits: quantize_kvcache."""

from __future__ import annotations

import ctypes as ct
from typing import Any

from . import _arrays
from ._arrays import View
from ._core import checks, recordings
from ._core.fields import _empty, _option, _put_strides, _put_tensor
from ._core.launch import launch_with_workspace
from ._core.library import load
from ._core.options import AnyArray, Array, DType
from ._core.structs import CACHE_DTYPES, CPU, DTYPES, AttentionArgs, KVCacheArgs, QuantizeArgs, new
from .errors import BadArgument, Unsupported

_FACTORS = ("token", "entry", "head")
_E4M3_MAX, _INT8_MAX = 448.0, 127.0


def quantize_kvcache(
    k_cache: Array,
    v_cache: Array,
    dtype: DType = "float8_e4m3fn",
    factors: str = "token",
    *,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    num_threads: int = 0,
) -> tuple[Array, Array, Array, Array]:
    """Rounds a cache to the 8-bit form that flash_attn_with_kvcache takes: values are about value8 * scale.

    Arguments:
        k_cache: (entries, seqlen_cache, nheads_k, headdim), or pages (pages, page_size, nheads_k, headdim), float32,
            float16 or bfloat16, last axis contiguous. It is only read.
        v_cache: (entries, seqlen_cache, nheads_k, headdim_v), the same dtype.
        dtype: "float8_e4m3fn" or "int8", or such a dtype of NumPy, PyTorch or JAX.
        factors: which values share a factor. A factor is the largest magnitude among them divided by the largest value
            of the dtype, 448 or 127:
            "token": each head of each token, (entries, seqlen_cache, nheads_k). The most accurate; the contents of
                unused rows affect no other row. Costs 4 bytes for each row and head.
            "entry": each head of an entry or page, (entries, 1, nheads_k).
            "head": each head of the whole cache, (nheads_k,). The rows of all entries must lie at one stride.
        k_scale, v_scale: factors to use instead; both or neither, float32, (nheads_k,) or (entries, 1, nheads_k).
        num_threads: for the CPU backend; 0 means $FLASH_ATTN_NUM_THREADS, else one per core.

    All rows count, used or not: with "entry" or "head" fill unused rows with zeros (or NaN) first. Values round to the
    nearest; with given factors they saturate. Zeros stay zero. Where all values are zero the factor is an arbitrary
    positive number. NaN is ignored for the factor and stays NaN in float8_e4m3fn; int8 has no NaN and stores -127. An
    infinity makes its factor infinite; then every value with that factor becomes NaN or infinite.

    Returns k_cache8, v_cache8, k_scale, v_scale: new contiguous arrays, except that given factors are returned as is.

    Raises: as flash_attn_with_kvcache. NumPy arrays need the ml_dtypes package for float8_e4m3fn; CuPy has int8 only.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_with_kvcache, quantize_kvcache
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 50, 2, 64), dtype=np.float32)
    >>> exact = flash_attn_with_kvcache(q, k, v)
    >>> k8, v8, k_scale, v_scale = quantize_kvcache(k, v, "int8")
    >>> out = flash_attn_with_kvcache(q, k8, v8, k_scale=k_scale, v_scale=v_scale)
    >>> bool(np.abs(out - exact).max() < 0.02)
    True
    """
    if recordings.current() is not None:
        raise Unsupported("quantize_kvcache is not recorded: call it outside the recording")
    kv, vv = _arrays.view(k_cache, "k_cache"), _arrays.view(v_cache, "v_cache")
    for name, view in (("k_cache", kv), ("v_cache", vv)):
        checks.shape(name, view, len(view.shape) == 4, "(entries, seqlen_cache, nheads_k, headdim)")
        checks.floats(name, view)
        checks.last_axis(name, view)
    checks.same_place("v_cache", vv, "k_cache", kv)
    if vv.dtype != kv.dtype or tuple(vv.shape[:3]) != tuple(kv.shape[:3]):
        raise BadArgument(
            f"v_cache is {vv.dtype} {tuple(vv.shape)}, but k_cache is {kv.dtype} {tuple(kv.shape)}: "
            "all but headdim must agree"
        )
    dtype, factors = checks.dtype_name("dtype", dtype, CACHE_DTYPES), checks.one_of("factors", factors, _FACTORS)
    checks.pair("k_scale", k_scale, "v_scale", v_scale)
    views = [kv, vv]
    k8, v8 = _empty(kv, tuple(kv.shape), dtype), _empty(vv, tuple(vv.shape), dtype)
    given = k_scale is not None
    if given:
        scales = [_given(views, n, s) for n, s in (("k_scale", k_scale), ("v_scale", v_scale))]
    elif factors == "token":
        scales = [kv.door.empty(kv, tuple(kv.shape[:3]), "float32") for _ in views]
    else:
        k_scale, v_scale = _largest("k_cache", kv, k8, factors, dtype), _largest("v_cache", vv, v8, factors, dtype)
        scales = [_arrays.view(k_scale, "k_scale"), _arrays.view(v_scale, "v_scale")]
    by_token = not given and factors == "token"
    threads = checks.integer("num_threads", num_threads, 0, 4096)
    if 0 not in kv.shape and 0 not in vv.shape:
        _round(views, (k8, v8), scales, dtype, by_token, threads)
    if by_token:
        k_scale, v_scale = (view.door.result(view) for view in scales)
    return k8.door.result(k8), v8.door.result(v8), k_scale, v_scale


def _given(views: list[View], name: str, scale: Any) -> View:
    entries, _, nheads_k, _ = views[0].shape
    view = _option(views, name, scale, ("float32",))
    shapes = (nheads_k,), (entries, 1, nheads_k)
    expected = f'{shapes[0]} or {shapes[1]}; the factors of tokens are not given (factors="token")'
    checks.shape(name, view, tuple(view.shape) in shapes, expected)
    return view


def _largest(name: str, view: View, into: View, factors: str, dtype: str) -> Any:
    """The factors of heads, from fa_quantize_fp8. That function also rounds x to float8; the rounded values go to
    `into`, where _round overwrites them."""
    entries, rows, nheads_k, headdim = view.shape
    batch_stride, row_stride, head_stride, _ = view.strides
    if factors == "head":
        if entries > 1 and rows > 1 and batch_stride != rows * row_stride:
            raise Unsupported(
                f"{name} has strides {tuple(view.strides)}: factors='head' takes rows at one stride, "
                f"{rows} x {row_stride} from entry to entry"
            )
        entries, rows, row_stride = 1, entries * rows, row_stride if rows > 1 else batch_stride
    shape = (nheads_k,) if factors == "head" else (entries, 1, nheads_k)
    descale = view.door.empty(view, shape, "float32")
    args = new(QuantizeArgs)
    args.device, args.dtype = view.device, DTYPES[view.dtype]
    args.batch, args.seqlen, args.nheads, args.headdim = entries, rows, nheads_k, headdim
    width = nheads_k * headdim
    for tensor, data, strides in (
        ("x", view.pointer, (batch_stride, row_stride, head_stride)),
        ("out", into.pointer, (rows * width, width, headdim)),
    ):
        _put_strides(args, tensor, data, strides, ("batch", "row", "head"))
    args.descale = descale.pointer
    load().fa_quantize_fp8(args, view.door.stream([view]))
    recordings.wrote([view, into, descale])
    scale = view.door.result(descale)
    return scale if dtype == "float8_e4m3fn" else scale * (_E4M3_MAX / _INT8_MAX)


def _round(
    views: list[View], caches: tuple[View, View], scales: list[View], dtype: str, by_token: bool, threads: int
) -> None:
    """Rounds all rows into the caches by a step of flash_attn_with_kvcache that appends them and has no queries."""
    kv, vv = views[:2]
    entries, rows, nheads_k, headdim = kv.shape
    args, call = new(AttentionArgs), new(KVCacheArgs)
    call.attention = ct.pointer(args)
    args.device, args.dtype, args.num_threads = kv.device, DTYPES[kv.dtype], threads
    args.batch, args.seqlen_q, args.nheads, args.headdim = entries, 0, nheads_k, headdim
    args.seqlen_k, args.nheads_k, args.headdim_v = rows, nheads_k, vv.shape[-1]
    args.kernel = b"cpu_naive" if kv.device == CPU else b"minimal"  # it takes every cache, and is not launched here
    _put_tensor(args, "q", kv)
    for name, view in zip("kv", caches, strict=True):
        _put_tensor(args, name, view)
    _put_tensor(args, "out", caches[1])
    call.cache_dtype, call.cache_batch, call.seqlen_new = CACHE_DTYPES[dtype], entries, rows
    _put_tensor(call, "k_new", kv)
    _put_tensor(call, "v_new", vv)
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        batch_stride, row_stride, head_stride = (0, 0, *scale.strides) if len(scale.shape) == 1 else scale.strides
        strides = (batch_stride, (row_stride or 1) if by_token else 0, head_stride)
        _put_strides(call, name, scale.pointer, strides, ("batch", "row", "head"))
    launch_with_workspace("kvcache_attention", call, args, views, (*caches, *scales))
